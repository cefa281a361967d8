"""Kills vLLM engines at random points, and prints how many keys the next engine kept and whether a token differed.

    python -m tests.vllm.kills MODEL LIVES [SEED [on|off]]

Needs `make vllm-env`. MODEL is llama, gptoss, gemma3 or qwen3next. LIVES engines start; all but the last are killed.
"on" and "off": in mode remote, with this value of the option `pipeline`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.vllm.processes import Service, run, worker_in


def main(model: str, num_lives: str, seed: str = "1", pipeline: str = "") -> None:
    """Run the lives and print a summary. Exits with status 1 if a token differs or too few keys are kept."""
    with ExitStack() as stack:
        worker = stack.enter_context(worker_in(Path(stack.enter_context(TemporaryDirectory())) / "w"))
        remote = ("remote", stack.enter_context(Service()).address, pipeline) if pipeline else ()
        lives = run("restarts.py", model, worker, seed, num_lives, *remote)
    names = ("killed", "kept", "of", "differing", "compared", "cached")
    total = {name: sum(life[name] for life in lives) for name in names}
    sys.stdout.write(
        f"{model}: {total['killed']} kills in the middle of work; {total['kept']} of {total['of']} keys kept; "
        f"{total['differing']} of {total['compared']} outputs differ; {total['cached']} tokens were hits\n"
    )
    sys.exit(total["differing"] > 0 or total["kept"] < 0.9 * total["of"])


if __name__ == "__main__":
    main(*sys.argv[1:])
