#!/usr/bin/env bash
# Write locks/*.txt, the exact versions that images and the tests' environment take. Run it to take newer versions:
#
#     scripts/lock.sh
#
# service.txt and build.txt have hashes, for the image of the service. dev.txt has none, because it only limits what
# scripts/setup.sh installs; torch, whose build depends on the machine, is pinned there.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=.tools/uv/bin/uv
if [ ! -x "$uv" ]; then
    python3 -m venv .tools/uv
    .tools/uv/bin/pip install --quiet --disable-pip-version-check "uv>=0.9,<1"
fi
export UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh

lock() {
    local name=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --upgrade --no-emit-index-url --no-annotate \
        --output-file "locks/$name.txt" "$@"
}

lock service --generate-hashes --extra service --extra cli --extra fleet pyproject.toml
lock build --generate-hashes - <<<"$(.venv/bin/python -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')"
# The interpreter of Triton that torch asks for does not run every kernel; the tests take another.
lock dev --extra service --extra cli --extra worker --extra dev --no-emit-package torch \
    --overrides - pyproject.toml <<<"triton==3.6.0; sys_platform == 'linux' and platform_machine == 'x86_64'"
