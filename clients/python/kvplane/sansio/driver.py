"""Runs logic without I/O: a generator that yields actions and receives their outcomes.

The generator does not wait; a driver carries out its actions one by one, blocking or awaited. Any exception of an
action, including KeyboardInterrupt and CancelledError, is raised in the generator at the yield, so that one piece of
code restores the state for both drivers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

A = TypeVar("A")
T = TypeVar("T")

Work: TypeAlias = Generator[A, Any, T]  # yields actions of kind A, returns T


@dataclass(slots=True)
class Pause:
    """The action of waiting for `seconds`."""

    seconds: float


def drive(work: Work[A, T], act: Callable[[A], object]) -> T:
    """Carry out the actions of a generator and return its result."""
    try:
        action = next(work)
        while True:
            try:
                outcome = act(action)
            except BaseException as error:
                action = work.throw(error)
            else:
                action = work.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result


async def drive_async(work: Work[A, T], act: Callable[[A], Awaitable[object]]) -> T:
    """`drive`, with awaited actions."""
    try:
        action = next(work)
        while True:
            try:
                outcome = await act(action)
            except BaseException as error:
                action = work.throw(error)
            else:
                action = work.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
