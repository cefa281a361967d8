"""How one of several places is chosen for a prompt. Each policy ranks the places by a number, the least one first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from random import Random


class Policy(Enum):
    """See RoutingPolicy in routing.proto."""

    COST = "cost"
    TTFT = "ttft"
    WEIGHTS = "weights"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted costs of a prompt at a place, in seconds; see PlaceCost in routing.proto."""

    queue_s: float = 0.0
    miss_s: float = 0.0
    delay_s: float = 0.0
    displacement_s: float = 0.0
    decode_s: float = 0.0
    later_s: float = 0.0
    load_s: float = 0.0
    memory_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.queue_s + self.memory_s + self.load_s + self.miss_s

    @property
    def total_s(self) -> float:
        """All costs."""
        return self.first_token_s + self.delay_s + self.displacement_s + self.decode_s + self.later_s


@dataclass(frozen=True, slots=True)
class Option:
    """A place that may be chosen.

    Attributes:
        place: its name.
        cached_share: part of the prompt that it is expected to hit; what it has in another tier counts less.
        waiting: prompts there without their first token.
        in_flight: prompts there that have not ended.
        lacked_share: blocks that it has to wait for, of those of the place.
        cost: predicted costs.
    """

    place: str
    cached_share: float
    waiting: int
    in_flight: int
    lacked_share: float
    cost: Cost


class Chooser:
    """Orders the places for a prompt. Only `round_robin` and `random` remember anything."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._turn = rng, 0
        self._ranks: Mapping[Policy, Callable[[Sequence[Option]], list[float]]] = {
            Policy.COST: lambda options: [one.cost.total_s for one in options],
            Policy.TTFT: lambda options: [one.cost.first_token_s for one in options],
            Policy.WEIGHTS: _weights,
            Policy.LEAST_LOADED: lambda options: [one.in_flight for one in options],
            Policy.ROUND_ROBIN: self._round_robin,
            Policy.RANDOM: lambda options: [rng.random() for _ in options],
        }

    def order(self, policy: Policy, options: Sequence[Option], prompt: bytes) -> list[Option]:
        """Return the places, the chosen one first. Equal ones are in an order that depends on the prompt alone (highest
        random weight), so that several routers choose the same.
        """
        ranks = self._ranks[policy](options)
        keyed = zip(ranks, options, strict=True)
        return [one for _, one in sorted(keyed, key=lambda item: (round(item[0], 6), _tie(prompt, item[1].place)))]

    def _round_robin(self, options: Sequence[Option]) -> list[float]:
        names = sorted(one.place for one in options)
        self._turn += 1
        return [float((names.index(one.place) - self._turn) % len(names)) for one in options]


def _weights(options: Sequence[Option]) -> list[float]:
    waiting = [one.waiting for one in options]
    least, most = min(waiting), max(waiting)

    def score(one: Option) -> float:
        queue = 1.0 if most == least else 1 - (one.waiting - least) / (most - least)
        return 3 * one.cached_share + 2 * queue + 2 * (1 - one.lacked_share)

    return [-score(one) for one in options]


def _tie(prompt: bytes, place: str) -> bytes:
    return blake2b(place.encode(), key=prompt[:64], digest_size=8).digest()
