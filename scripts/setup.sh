#!/usr/bin/env bash
# Prepare .venv in the root of the repository: kvplane (editable) with the given extras.
#
#     scripts/setup.sh service,cli              what `make demo` needs
#     scripts/setup.sh service,cli,worker,dev   what `make test` needs
#
# Run again after a change of pyproject.toml; the Makefile does so. PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."

# Version of torch for the tests; the wheel accepts a range.
torch=2.13.0
extras=${1:?usage: scripts/setup.sh EXTRAS, for example service,cli}
python=${PYTHON:-python3}

say() { printf '== %s\n' "$*"; }
fail() { printf 'set-up: %s\n' "$*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$python is missing or older than 3.11; name a newer one with PYTHON=/path/to/python"

"$python" -c 'import ensurepip' 2>/dev/null || fail "this Python cannot create environments: sudo apt-get install python3-venv"

# Recreate an incomplete environment, or one whose interpreter is missing.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" \
        | sed -nu '/^\(Collecting\|Processing\|Installing\)/ { s/ (from .*//; p }'
}

if [[ ,$extras, == *,worker,* ]]; then
    say "installing torch $torch into .venv (about 900 MB, several minutes where it is downloaded)"
    install "torch==$torch"
fi
say "installing kvplane[$extras] into .venv (the first time: 45 packages or more, 230 MB or more, one to three minutes)"
install --constraint locks/dev.txt --editable ".[$extras]"
.venv/bin/python -m pip check
said='from kvplane.base.hashing import native; from kvplane_core.face import loader; print(native.describe() + "; core:", loader.describe())'
say "block hashes: $(.venv/bin/python -c "$said" || echo unknown)"
say "ready: $(.venv/bin/python --version), $(.venv/bin/python -m pip list 2>/dev/null | tail -n +3 | wc -l) packages, ${SECONDS} s"
