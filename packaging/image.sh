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
# Without apt, manuals, translations and character sets, which no program of the image reads. Without usrmerge, which
# brings 47 MB of perl's libraries: the hook has done its work before the first package is there.
without='path-exclude=/usr/share'
if [ ! -s "$base" ]; then
    mmdebstrap --quiet --variant=essential --include=python3,python3-venv,libstdc++6,ca-certificates,usr-is-merged \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --setup-hook='printf "Package: usrmerge\nPin: release *\nPin-Priority: -1\n" > "$1/etc/apt/preferences.d/usrmerge"' \
        --dpkgopt="$without/doc/*" --dpkgopt="$without/man/*" --dpkgopt="$without/locale/*" --dpkgopt="$without/info/*" \
        --dpkgopt='path-exclude=/usr/lib/*/gconv/*' bookworm "$folder/new.tar" 2> "$folder/base.log" ||
        { tail -3 "$folder/base.log" >&2; exit 1; }
    mv "$folder/new.tar" "$base"
fi
printf 'FROM scratch\nADD base.tar /\n' > "$folder/Containerfile"
buildah build --quiet --tag kneewatch-base "$folder" > /dev/null
echo "base    $(buildah images --format '{{.Size}}' localhost/kneewatch-base)"
# Where pip needs a configuration or certificates of this machine, name the files: PIP_FILES="/etc/pip.conf".
volumes=
for file in ${PIP_FILES:-}; do volumes="$volumes --volume $file:$file:ro"; done
mounted='' container=''
trap 'rm -rf "$folder/source" "$folder/layers"; [ -z "$container" ] || buildah rm "$container" > /dev/null' EXIT
git archive --prefix=source/ HEAD | tar -x -C "$folder"

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

# Build the image $1 with the extras $2, print its size and layers, and try what every image must do.
try_image() {
    # shellcheck disable=SC2086
    buildah build --quiet --format docker --network host $volumes --build-arg BASE=localhost/kneewatch-base \
        --build-arg "EXTRAS=$2" --file packaging/Containerfile --tag "$1" "$folder/source" > /dev/null
    [ -z "$container" ] || buildah rm "$container" > /dev/null
    container=$(buildah from "$1")
    mounted=$(buildah mount "$container")
    echo "image   $1 (extras: ${2:-none}): $(buildah images --format '{{.Size}}' "localhost/$1"); compressed layers:"
    buildah push --quiet "$1" "dir:$folder/layers"
    python3 -c 'import json, sys
for layer in json.load(sys.stdin)["layers"]:
    print("        %.0f MB %s" % (layer["size"] / 1e6, layer["digest"][:19]))' < "$folder/layers/manifest.json"
    rm -rf "$folder/layers"
    du -s "$mounted"/opt/kneewatch/lib/python3*/site-packages/* | sort -rn | head -5 |
        while read -r kib path; do echo "        $((kib * 1024 / 1000000)) MB ${path##*/}"; done
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
    grep -q kv_pressure "$folder/demo.txt"
    echo "tried   demo: concludes kv_pressure"
    as_in_a_cluster python -c '
import signal, subprocess, time
daemon = subprocess.Popen(["kneewatch", "run", "--demo", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
while not daemon.stdout.readline().startswith(b"triage"):
    assert daemon.poll() is None, "it did not start"
begun_s = time.monotonic()
daemon.send_signal(signal.SIGTERM)
status = daemon.wait()
took_s = time.monotonic() - begun_s
print(f"tried   run --demo: ended {took_s:.1f} s after SIGTERM, exit status {status}")
assert status == 0 and took_s < 3
'
}

try_image kneewatch ''
# Without the report's libraries: it says so, and how to get them.
status=0
as_in_a_cluster kneewatch report > "$folder/report.txt" 2>&1 || status=$?
[ "$status" -eq 2 ] && grep -q 'EXTRAS=\[report\]' "$folder/report.txt" || { cat "$folder/report.txt" >&2; exit 1; }
echo "tried   report: $(tail -1 "$folder/report.txt")"

try_image kneewatch-report '[report,kubernetes]'
as_in_a_cluster sh -eu -c '
    python -c "import kubernetes"
    demo=$(python -c "import kneewatch.agent as a; print(a.__path__[0])")/demo.jsonl.gz
    kneewatch run "$demo" --interval 1s --for 20s --listen 127.0.0.1:0 > /tmp/said.txt 2>&1 || { cat /tmp/said.txt >&2; exit 1; }
    kneewatch report --since 1h --out /tmp/report.html 2> /tmp/said.txt || [ $? -eq 1 ] || { cat /tmp/said.txt >&2; exit 1; }
    echo "tried   report of a played recording: $(wc -c < /tmp/report.html) bytes"
'
