#!/usr/bin/env bash
# `make demo-engine`: the reference engine answers conversations through the service, compared with the same model without
# a cache. Installs torch if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv/bin/python -c 'import torch, grpc_health' 2>/dev/null; then
    printf '== the engine computes with torch, which is installed first\n'
    scripts/setup.sh service,cli,worker
fi
exec .venv/bin/python -W ignore::UserWarning -m tests.engine.demo "$@"
