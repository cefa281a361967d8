"""Serving compiles no kernel: a random walk of batches needs only those of the warm-up. Later compiles are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STEPS = 300
MOST_KERNELS = 16


def test_random_walk_of_batches_needs_only_the_kernels_of_the_warm_up():
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.variants", str(STEPS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["later"] == {}
    assert set(found["planned"]) == {"attention_spans", "merge_parts", "write_tokens", "move_pages"}
    assert sum(found["planned"].values()) <= MOST_KERNELS
    assert found["latents"] == {"attention_spans": 2, "merge_parts": 2, "write_tokens": 1}
    assert found["states"] == {
        "hold_states": 4,
        "convolve_tokens": 2,
        "keep_inputs": 2,
        "scan_rows": 2,
        "scan_channels": 2,
        "invert_chunks": 2,
        "advance_heads": 4,
    }, "of Mamba-2, Mamba-1, the delta rule with either kind of gates, convolutions before these; decodes and chunks"
    assert found["worker"] == {"move_pages": 8}, "copy, zero, two sums, gather and scatter, and these for the host link"
    assert found["compiled"] == {name: found["planned"][name] for name in ("write_tokens", "move_pages")}
    assert found["late"] == [{}, {"move_pages": 1}], "one kernel is compiled after the warm-up"
