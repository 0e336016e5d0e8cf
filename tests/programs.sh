#!/bin/sh
# Installs the programs that some tests need and pip cannot install: prometheus (with promtool in
# its package), prometheus-alertmanager, victoria-metrics and chromium. Where that is not possible
# it says what is missing and leaves the rest to the tests, which skip (with CI=true: fail). No
# service is left running or enabled: their ports stay free. What is there already is not touched.
set -eu

missing=
need() {
    command -v "$1" >/dev/null 2>&1 && return
    case " $missing " in *" $2 "*) ;; *) missing="$missing $2" ;; esac
}
need prometheus prometheus
need promtool prometheus
need prometheus-alertmanager prometheus-alertmanager
need victoria-metrics victoria-metrics
need chromium chromium
[ -n "$missing" ] || exit 0

give_up() {
    echo "programs.sh: missing:$missing ($1)" >&2
    exit 0
}

command -v apt-get >/dev/null 2>&1 || give_up "there is no apt-get here"
as_root=
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || give_up "installing Debian's packages needs root"
    as_root="sudo -n"
fi

systemd() {
    [ -d /run/systemd/system ] || return 0
    for package in $missing; do
        [ "$package" = chromium ] || $as_root systemctl --quiet "$@" "$package.service" || true
    done
}

install_package() {
    # A browser without a font draws boxes.
    more=
    [ "$1" != chromium ] || more=fonts-dejavu-core
    # In runlevel 1 an init script of the package is not run; for systemd the unit is masked.
    # shellcheck disable=SC2086
    $as_root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq --yes --no-install-recommends \
        -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 "$1" $more \
        </dev/null >/dev/null 2>&1
}

stop_script() {
    # Where no init system runs there is no runlevel either, and the script has started a server.
    [ ! -x "/etc/init.d/$1" ] || $as_root "/etc/init.d/$1" stop >/dev/null 2>&1 || true
}

systemd --runtime mask
trap 'systemd --runtime unmask; systemd disable 2>/dev/null' EXIT
updated=
for package in $missing; do
    if ! install_package "$package"; then
        [ -n "$updated" ] || { $as_root apt-get update -qq >/dev/null 2>&1 && updated=yes; } || true
        install_package "$package" || {
            echo "programs.sh: missing: $package (apt-get could not install it)" >&2
            continue
        }
    fi
    stop_script "$package"
done
