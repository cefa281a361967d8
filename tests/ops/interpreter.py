"""Triton's interpreter, adapted to many small launches.

A process interprets kernels or compiles them: TRITON_INTERPRET is read when a kernel is decorated.
"""

from __future__ import annotations

from math import prod
from typing import Any

import triton
from triton.runtime import interpreter

from kvplane_worker.ops.triton_ops.launch import Launch

# A launch with more programs takes seconds.
MAX_PROGRAMS = 2000
RUN = Launch.run


def is_on() -> bool:
    return bool(triton.knobs.runtime.interpret)


def quicken() -> None:
    """Make calls between kernel functions plain calls, and limit the size of launches.

    Triton 3.6 patches the modules of its language at each such call, on top of the last patch, in milliseconds each.
    Skipping that is safe: the launch has already patched `triton.language`.
    """
    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def run(self: Launch) -> None:
        assert prod(self.grid) <= MAX_PROGRAMS, f"{self.grid} programs: at most {MAX_PROGRAMS} in the interpreter"
        RUN(self)

    interpreter.InterpretedFunction.__call__ = call
    Launch.run = run  # type: ignore[method-assign]
