#!/bin/sh
# Installs the programs that some tests need and pip cannot install: prometheus, with promtool in
# its package. Where that is not possible it says what is missing and leaves the rest to the tests,
# which skip (with CI=true: fail). No service is left running or enabled: port 9090 stays free.
set -eu

missing=
for program in prometheus promtool; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -n "$missing" ] || exit 0

give_up() {
    echo "programs.sh: missing:$missing ($1)" >&2
    exit 0
}

command -v apt-get >/dev/null 2>&1 || give_up "there is no apt-get here"
as_root=
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || give_up "installing Debian's prometheus needs root"
    as_root="sudo -n"
fi

systemd() {
    [ ! -d /run/systemd/system ] || $as_root systemctl --quiet "$@" prometheus.service || true
}

install_package() {
    # In runlevel 1 an init script of the package is not run; for systemd the unit is masked.
    $as_root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq --yes --no-install-recommends \
        -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 prometheus \
        </dev/null >/dev/null 2>&1
}

systemd --runtime mask
trap 'systemd --runtime unmask; systemd disable 2>/dev/null' EXIT
install_package || { $as_root apt-get update -qq >/dev/null 2>&1 && install_package; } ||
    give_up "apt-get could not install prometheus"
# Where no init system runs there is no runlevel either, and the script has started a server.
[ ! -x /etc/init.d/prometheus ] || $as_root /etc/init.d/prometheus stop >/dev/null 2>&1 || true
