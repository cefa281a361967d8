#!/usr/bin/env bash
# Prometheus or promtool, from the PATH or else from Debian's package, unpacked into .tools/ on first use:
#     scripts/prometheus.sh promtool check rules FILE
set -euo pipefail

program=${1:?usage: scripts/prometheus.sh prometheus|promtool ARGUMENTS}
shift
if command -v "$program" >/dev/null; then
    exec "$program" "$@"
fi
tools=$(cd "$(dirname "$0")/.." && pwd)/.tools
home=$tools/prometheus
if [ ! -x "$home/usr/bin/$program" ]; then
    command -v apt-get >/dev/null || { echo "$program is missing: install Prometheus" >&2; exit 69; }
    echo "$program is missing: unpacking Debian's package prometheus into .tools" >&2
    mkdir -p "$tools"
    fresh=$(mktemp -d "$tools/prometheus-XXXXXX")
    chmod 755 "$fresh"  # apt fetches as a user of its own
    (
        cd "$fresh"
        apt-get download -qq prometheus >&2 || { apt-get update -qq >&2 && apt-get download -qq prometheus >&2; }
        dpkg -x prometheus_*.deb .
    )
    mv -T "$fresh" "$home" 2>/dev/null || rm -rf "$fresh"
fi
exec "$home/usr/bin/$program" "$@"
