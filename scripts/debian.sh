#!/usr/bin/env bash
# Run a server or tool that the tests need: from the PATH, or else from Debian's packages, unpacked into .tools/ on first
# use. Nothing is installed on the machine, and no root is needed once apt knows its packages.
#     scripts/debian.sh promtool check rules FILE
#     scripts/debian.sh redis-server --port 7000
set -euo pipefail

program=${1:?usage: scripts/debian.sh chromium|etcd|faketime|prometheus|promtool|redis-server ARGUMENTS}
shift
if command -v "$program" >/dev/null; then
    exec "$program" "$@"
fi
case $program in
    chromium) packages=(chromium) ;;
    etcd) packages=(etcd-server) ;;
    faketime) packages=(faketime libfaketime) ;;
    prometheus | promtool) packages=(prometheus) ;;
    redis-server) packages=(redis-server redis-tools) ;;
    *) echo "debian.sh: $program: not one of chromium, etcd, faketime, prometheus, promtool, redis-server" >&2; exit 64 ;;
esac
tools=$(cd "$(dirname "$0")/.." && pwd)/.tools
home=$tools/${packages[0]}
binary=$home/usr/bin/$program
[ "$program" != chromium ] || binary=$home/usr/lib/chromium/chromium  # the script in usr/bin reads /etc
if [ ! -x "$binary" ]; then
    command -v apt-get >/dev/null || { echo "$program is missing: install it" >&2; exit 69; }
    echo "$program is missing: unpacking Debian's package ${packages[0]} into .tools" >&2
    mkdir -p "$tools"
    fresh=$(mktemp -d "$tools/${packages[0]}-XXXXXX")
    chmod 755 "$fresh"  # apt fetches as a user of its own
    (
        cd "$fresh"
        missing() { apt-get install --simulate --no-install-recommends "${packages[0]}" | sed -n 's/^Inst \([^ ]*\).*/\1/p'; }
        download() { apt-get download -qq $(printf '%s\n' "${packages[@]}" $(missing) | sort -u) >&2; }
        download || { apt-get update -qq >&2 && download; }
        for package in *.deb; do dpkg -x "$package" .; done
        rm -- *.deb
    )
    mv -T "$fresh" "$home" 2>/dev/null || rm -rf "$fresh"
fi
libraries=$(echo "$home"/usr/lib/*-linux-gnu)
LD_LIBRARY_PATH=$libraries:$libraries/pulseaudio exec "$binary" "$@"
