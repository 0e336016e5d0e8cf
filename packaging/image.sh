#!/bin/sh
# Build the container on a Debian that is made here, and try it: not root, read-only, no capabilities.
# Needs root, mmdebstrap and buildah (Debian's packages), and no registry of images.
# Usage: sh packaging/image.sh [FOLDER]    FOLDER keeps the base between calls; default build/image
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/image}
mkdir -p "$folder"
export BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}" STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}"

base=$folder/base.tar
# Without apt, manuals and translations, which no program of the image reads: 147 MiB in place of 215.
exclude='path-exclude=/usr/share'
[ -s "$base" ] || mmdebstrap --quiet --variant=essential --include=python3,python3-venv,ca-certificates \
    --dpkgopt="$exclude/doc/*" --dpkgopt="$exclude/man/*" --dpkgopt="$exclude/locale/*" --dpkgopt="$exclude/info/*" \
    bookworm "$base"
printf 'FROM scratch\nADD base.tar /\n' > "$folder/Containerfile"
buildah build --quiet --tag kneewatch-base "$folder" > /dev/null
# Where pip needs a configuration or certificates of this machine, name the files: PIP_FILES="/etc/pip.conf".
volumes=
for file in ${PIP_FILES:-}; do volumes="$volumes --volume $file:$file:ro"; done
git archive --prefix=source/ HEAD | tar -x -C "$folder"
# shellcheck disable=SC2086
buildah build --quiet --format docker --network host $volumes --build-arg BASE=localhost/kneewatch-base \
    --file packaging/Containerfile --tag kneewatch "$folder/source" > /dev/null

container=$(buildah from kneewatch)
trap 'buildah rm "$container" > /dev/null; rm -rf "$folder/source"' EXIT
echo "base    $(du -h "$base" | cut -f1)"
mounted=$(buildah mount "$container")
echo "image   $(du -sh "$mounted" | cut -f1), of it kneewatch and its dependencies $(du -sh "$mounted/opt/kneewatch" | cut -f1)"
du -s "$mounted"/opt/kneewatch/lib/python3*/site-packages/* | sort -rn | head -6 |
    while read -r kib path; do echo "        $((kib / 1024)) MiB ${path##*/}"; done

# As Kubernetes runs it: user 65532, a read-only root, no capabilities, no new privileges.
as_in_a_cluster() {
    unshare --mount --pid --fork sh -eu -c '
        root=$1 && shift
        mount --bind "$root" "$root" && mount -o remount,bind,ro "$root"
        mount -t proc proc "$root/proc"
        for folder in /tmp /var/lib/kneewatch; do mount -t tmpfs -o mode=1777 tmpfs "$root$folder"; done
        exec chroot "$root" env -i PATH=/opt/kneewatch/bin:/usr/bin:/bin STATE_DIRECTORY=/var/lib/kneewatch \
            PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp setpriv --reuid 65532 --regid 65532 --clear-groups \
            --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
    ' sh "$mounted" "$@"
}
as_in_a_cluster python -c '
import os
assert os.getuid() == 65532, os.getuid()
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert int(lines["CapBnd"], 16) == int(lines["CapEff"], 16) == 0, lines["CapBnd"]
try:
    open("/opt/kneewatch/written", "w")
except OSError as error:
    print("tried   user 65532, no capabilities, root:", error.strerror.lower())
else:
    raise SystemExit("the root can be written")
'
status=0
as_in_a_cluster kneewatch demo > "$folder/demo.txt" || status=$?
[ "$status" -eq 1 ] || { echo "demo: exit status $status" >&2; exit 1; }
as_in_a_cluster python -c '
import signal, subprocess, time
daemon = subprocess.Popen(["kneewatch", "run", "--demo", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE)
while not daemon.stdout.readline().startswith(b"triage"):
    assert daemon.poll() is None, "it did not start"
begun_s = time.monotonic()
daemon.send_signal(signal.SIGTERM)
status = daemon.wait()
print(f"ended   {time.monotonic() - begun_s:.1f} s after SIGTERM, exit status {status}")
'
