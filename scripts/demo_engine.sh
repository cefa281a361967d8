#!/usr/bin/env bash
# The second part of `make demo`: the reference engine answers conversations through the service, compared with a dense
# reference. Installs torch if it is missing; if that fails, only the first part runs.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv/bin/python -c 'import torch, grpc_health' 2>/dev/null; then
    printf '== the second part needs torch\n'
    if ! scripts/setup.sh service,cli,worker; then
        printf 'demo: torch cannot be installed, so the second part is skipped; the first part is complete\n'
        exit 0
    fi
fi
exec .venv/bin/python -W ignore::UserWarning -m tests.engine.demo "$@"
