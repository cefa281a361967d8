#!/usr/bin/env bash
# buf at a pinned version, fetched by npm into .tools/ on first use: scripts/buf.sh lint, scripts/buf.sh curl ...
set -euo pipefail

version=1.75.0
tools=$(cd "$(dirname "$0")/.." && pwd)/.tools
home=$tools/buf-$version

if [ ! -x "$home/node_modules/.bin/buf" ]; then
    command -v npm >/dev/null || { echo "buf is installed by npm, which is missing: apt-get install npm" >&2; exit 69; }
    mkdir -p "$tools"
    # Installed to a temporary directory and renamed, so that concurrent first uses never see an incomplete one.
    fresh=$(mktemp -d "$tools/buf-XXXXXX")
    npm install --prefix "$fresh" --no-save --no-audit --no-fund --loglevel=error "@bufbuild/buf@$version" >&2
    mv -T "$fresh" "$home" 2>/dev/null || rm -rf "$fresh"
fi
exec "$home/node_modules/.bin/buf" "$@"
