"""Triton's interpreter, adapted to many small launches.

A process interprets kernels or compiles them: TRITON_INTERPRET is read when a kernel is decorated.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np
import triton
from triton.language import core
from triton.runtime import interpreter

from kvplane_kernels.triton_ops.launch import Launch

# A launch with more programs takes seconds.
MAX_PROGRAMS = 2000
RUN = Launch.run
NUMPY_TYPE, BLOCK_TYPE, EQUAL = interpreter._get_np_dtype, core.block_type.__init__, core.tuple.__eq__
POINTERS, TRUE = np.dtype(np.uint64), core.constexpr(True)


def is_on() -> bool:
    return bool(triton.knobs.runtime.interpret)


def quicken() -> None:
    """Make calls between kernel functions plain calls, limit the size of launches, and make types cheap.

    Triton 3.6 patches the modules of its language at each such call, on top of the last patch, in milliseconds each.
    Skipping that is safe: the launch has already patched `triton.language`. It also computes every sum of integers
    twice, to find overflows, and drops what it finds unless it debugs: half of the time of a launch.
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
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.ScanOps.generic_scan = scan_all
    keep_types()
    Launch.run = run  # type: ignore[method-assign]


def scan_all(self: Any, given: list[Any]) -> list[Any]:
    """An associative scan with one call of the combining function per place of the axis; Triton's makes one for each
    element.
    """
    parts = [np.moveaxis(one.handle.data, self.axis, 0) for one in given]
    found = [np.empty_like(part) for part in parts]
    total: list[Any] = []
    for place in range(len(parts[0])):
        new = [self.to_tensor(part[place], one.dtype) for part, one in zip(parts, given, strict=True)]
        total = list(self.combine_fn.fn(*total, *new)) if total else new
        for part, one in zip(found, total, strict=True):
            part[place] = one.handle.data
    return [self.to_tensor(np.moveaxis(part, 0, self.axis), one.dtype) for part, one in zip(found, given, strict=True)]


def keep_types() -> None:
    """Compute the shapes of types and tensors once per shape, and not per tensor: two thirds of the rest."""
    numpy_type = cache(NUMPY_TYPE)

    @cache
    def of_block(shape: tuple[int, ...]) -> tuple[Any, int]:
        made = object.__new__(core.block_type)
        BLOCK_TYPE(made, core.float32, list(shape))
        return made.shape, made.numel

    @cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        self.element_ty, self.name = element_ty, f"<{sizes}>"
        self.shape, self.numel = of_block(sizes)

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - its name in Triton
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape) if type.is_block() else ())

    def type_of(kind: Any) -> np.dtype:
        return POINTERS if isinstance(kind.scalar, core.pointer_type) else numpy_type(kind.scalar)

    interpreter._get_np_dtype = type_of
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core.tuple.__eq__ = lambda self, other: TRUE if self is other else EQUAL(self, other)
