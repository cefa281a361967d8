#!/usr/bin/env bash
# Build what a release consists of into dist/, and install each part where nothing of kvplane is:
#
#     scripts/release.sh
#
# The wheels and the source distribution: in an empty environment each, where the commands run. The chart: as a package,
# rendered with the oldest Helm. The build contexts of the images: unpacked, installed as the Dockerfiles do.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '== %s\n' "$*"; }
fail() { printf 'release: %s\n' "$*" >&2; exit 1; }

[ -z "$(git status --porcelain)" ] || fail "the working tree has changes: commit or stash them"
[ -f .venv/kvplane-dev ] || fail "the tools are not installed: make .venv/kvplane-dev"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf dist

say "wheels, one compiled and one in Python alone, and source distribution"
KVPLANE_BUILD=python .venv/bin/python -m hatchling build --directory dist
KVPLANE_BUILD=native .venv/bin/python -m hatchling build --target wheel --directory dist

say "chart"
scripts/helm.sh package helm/kvplane --destination dist >/dev/null

say "build context of the images"
git archive --prefix=kvplane-images/ --output=dist/kvplane-images.tar.gz HEAD \
    docker .dockerignore $(sed -n 's/^!//p' .dockerignore)

# Install what the first argument names with the extras of the images, away from this folder, and run the demo with it.
try() {
    local name=$1 environment=$scratch/$2
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "$name[cli,service]"
    (cd "$scratch" && "$environment/bin/kvplane" version && "$environment/bin/kvplane" demo --plain | tail -n 1)
}

for archive in dist/*.whl dist/kvplane-[0-9]*.tar.gz; do
    say "trying $archive"
    try "$PWD/$archive" "$(basename "$archive")"
done

say "trying dist/kvplane-images.tar.gz"
tar -xzf dist/kvplane-images.tar.gz -C "$scratch"
try "$scratch/kvplane-images" images

for chart in dist/kvplane-*.tgz; do
    say "trying $chart"
    scripts/helm.sh template release "$chart" --kube-version 1.29.0 >"$scratch/manifests.yaml"
    grep -c '^kind:' "$scratch/manifests.yaml" | sed 's/$/ manifests/'
done

say "ready in ${SECONDS} s:"
(cd dist && sha256sum -- *)
