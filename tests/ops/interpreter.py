"""Triton's interpreter, made fit for many small launches.

A process interprets kernels or compiles them: TRITON_INTERPRET is read when a kernel is decorated.
"""

from __future__ import annotations

from math import prod
from typing import Any

import triton
from triton.runtime import interpreter

from kvplane_worker.ops.triton_ops.launch import Launch

# Beyond so many programs a launch takes seconds.
MAX_PROGRAMS = 2000
RUN = Launch.run


def is_on() -> bool:
    return bool(triton.knobs.runtime.interpret)


def quicken() -> None:
    """Let a kernel's calls of other functions be plain calls, and launches be small.

    Triton 3.6 patches the modules of its language at each such call, over the patch before: milliseconds and more each
    time. The launch has patched `triton.language` already; once is enough for the module behind it.
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
