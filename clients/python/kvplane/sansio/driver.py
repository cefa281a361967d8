"""Runs what the client decides without I/O: a generator that yields actions and is sent what they came to.

The generator never waits: its driver carries out one action after the other, blocking or awaited. An exception
of an action, of whatever kind (Ctrl-C and a cancelled task too), is raised inside the generator, where the action was
yielded: so the state is put right in one place, for both drivers.
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
    """The action of waiting."""

    seconds: float


def drive(work: Work[A, T], act: Callable[[A], object]) -> T:
    """Carry out the actions of the work, and return what it returns."""
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
    """As `drive`, awaited."""
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
