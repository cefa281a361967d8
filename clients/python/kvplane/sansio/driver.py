"""Drivers of generators that yield actions and receive their outcomes, one blocking and one for asyncio.

The generator itself does not wait. Any exception of an action, including KeyboardInterrupt and CancelledError, is
raised in the generator at the `yield`, so that the generator restores its state in the same way with both drivers.
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
    """The action to wait for a number of seconds."""

    seconds: float


def drive(work: Work[A, T], act: Callable[[A], object]) -> T:
    """Run a generator: call `act` for each action that it yields, and return the generator's result."""
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
    """Run a generator: await `act` for each action that it yields, and return the generator's result."""
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
