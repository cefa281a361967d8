#!/usr/bin/env bash
# The second act of `make demo`: the reference engine answers conversations through the service, beside its twin.
# It needs torch, which is installed here when it is missing; where it cannot be, the first act stands alone.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv/bin/python -c 'import torch, grpc_health' 2>/dev/null; then
    printf '== the second act needs torch\n'
    if ! scripts/setup.sh service,cli,worker; then
        printf 'demo: torch cannot be installed here, so the second act is left out; the first one is complete\n'
        exit 0
    fi
fi
exec .venv/bin/python -W ignore::UserWarning -m tests.engine.demo "$@"
