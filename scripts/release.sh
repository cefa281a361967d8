#!/usr/bin/env bash
# Build what a release consists of into dist/, and install each part where nothing of kvplane is:
#
#     PYTHON_DIGEST=sha256:... scripts/release.sh
#
# PYTHON_DIGEST is the digest of the images' base, as `docker buildx imagetools inspect` prints it.
#
# The wheels and the source distribution: in an empty environment each, where the commands run. The chart: as a package,
# rendered with the oldest Helm. The build contexts of the images: unpacked, installed as the Dockerfiles do.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '== %s\n' "$*"; }
fail() { printf 'release: %s\n' "$*" >&2; exit 1; }

tag=$(sed -n 's/^ARG PYTHON_TAG=//p' docker/service.Dockerfile)
[[ ${PYTHON_DIGEST:-} =~ ^sha256:[0-9a-f]{64}$ ]] \
    || fail "PYTHON_DIGEST is not sha256: and 64 hex digits: docker buildx imagetools inspect python:$tag prints it"
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
mkdir "$scratch/kvplane-images"
git archive HEAD docker .dockerignore $(sed -n 's/^!//p' .dockerignore) | tar -x -C "$scratch/kvplane-images"
sed -i "s/^ARG PYTHON_DIGEST=$/&@$PYTHON_DIGEST/" "$scratch"/kvplane-images/docker/*.Dockerfile
tar -czf dist/kvplane-images.tar.gz -C "$scratch" kvplane-images

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
try "$scratch/kvplane-images" images

say "software bill of materials of the service's image"
python3 -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install --quiet --disable-pip-version-check "cyclonedx-bom>=7,<8"
python3 -m venv "$scratch/locked"
"$scratch/locked/bin/pip" install --quiet --disable-pip-version-check --require-hashes --requirement locks/service.txt
"$scratch/locked/bin/pip" install --quiet --disable-pip-version-check --no-deps dist/*-none-any.whl
"$scratch/tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible \
    --output-file dist/kvplane-service.cdx.json "$scratch/locked/bin/python"
"$scratch/locked/bin/kvplane" demo --plain | tail -n 1

for chart in dist/kvplane-*.tgz; do
    say "trying $chart"
    scripts/helm.sh template release "$chart" --kube-version 1.29.0 >"$scratch/manifests.yaml"
    grep -c '^kind:' "$scratch/manifests.yaml" | sed 's/$/ manifests/'
done

say "ready in ${SECONDS} s:"
(cd dist && sha256sum -- *)
