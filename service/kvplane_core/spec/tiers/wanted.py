"""What a tier copies from the place before it early, before that evicts it: by the policies `through` and `reuse`.

    through   what was computed on the device, or stored in the tier before
    reuse     what was computed or hit there a second time, or loaded from the tier before

A place is a block of the device, or a slot of the tier before. Its stamp or version says whether it still has the
content that was wanted, so nothing has to be removed here when content leaves its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvplane.base.groups import SavePolicy
from kvplane_core.face.keys import Key

_FNV_BASIS, _FNV_PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1  # FNV-1a, of domain and group


class Wanted:
    """What one tier wants, and for `reuse` which keys were computed before.

    Attributes:
        policy: of the tier. With BEHIND nothing is ever wanted.
        version: stamp or version of the content of each place that is wanted, the one that was wanted first first.
        recent, before: 64 bits of each key that was computed; `before` is dropped when `recent` has `most_seen` keys.
    """

    def __init__(self, policy: SavePolicy, most_seen: int) -> None:
        """`most_seen`: keys that are remembered at least: as many as the tier has slots, since no more could be hit."""
        self.policy = policy
        self.version: dict[int, int] = {}
        self.recent: set[int] = set()
        self.before: set[int] = set()
        self._most_seen = most_seen

    @property
    def is_early(self) -> bool:
        """Whether the tier saves anything before it is about to be evicted."""
        return self.policy is not SavePolicy.BEHIND

    def __len__(self) -> int:
        return len(self.version)

    def add(self, place: int, version: int) -> None:
        """Want the content of a place, behind all that is wanted already."""
        self.version[place] = version

    def note_computed(self, place: int, version: int, key: Key) -> None:
        """Record that the content of a key was computed in this place."""
        if self.policy is SavePolicy.THROUGH or (self.policy is SavePolicy.REUSE and self._was_seen(key)):
            self.add(place, version)

    def note_used(self, place: int, version: int) -> None:
        """Record that content that is in this place was hit there, or loaded from it."""
        if self.policy is SavePolicy.REUSE:
            self.add(place, version)

    def first(self) -> tuple[int, int]:
        """Return the place, with its version, that was wanted first. The caller has checked that there is one."""
        return next(iter(self.version.items()))

    def remove_first(self) -> None:
        """Forget what `first` returns."""
        del self.version[next(iter(self.version))]

    def clear(self) -> None:
        """Forget everything."""
        for one in (self.version, self.recent, self.before):
            one.clear()

    def state(self) -> list[object]:
        """Return the state, which `load` takes."""
        columns = [array("Q", one) for one in (self.version.values(), sorted(self.recent), sorted(self.before))]
        return [self.policy.value, list(self.version), *columns]

    def load(self, state: Sequence[Any]) -> None:
        """Load the state into an object that was not used. Raises ValueError if it is that of another policy."""
        policy, places, versions, recent, before = state
        if policy != self.policy.value:
            raise ValueError(f"a tier with the policy {policy}")
        for place, version in zip(places, versions, strict=True):
            self.add(place, version)
        self.recent, self.before = set(recent), set(before)

    def _was_seen(self, key: Key) -> bool:
        """Whether the key was computed before, in its domain; it is remembered from now on."""
        name = _name(key)
        was_seen = name in self.recent or name in self.before
        self.recent.add(name)
        if len(self.recent) >= self._most_seen:
            self.recent, self.before = set(), self.recent
        return was_seen


def _name(key: Key) -> int:
    """Return 64 bits of a key. Two keys with equal bits cost one early save, and no wrong hit."""
    domain, group, digest = key
    salt = _FNV_BASIS
    for byte in (*domain.encode(), group):
        salt = (salt ^ byte) * _FNV_PRIME & _WORD
    return int.from_bytes(digest[:8], "little") ^ salt
