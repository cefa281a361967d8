"""What the policy HAZARD learns: how long unused content of each class waits for its next use, and whether to evict by
that or by LRU. Integers only; time is the number of admissions. Nothing here knows a block.

    request of an admission      its prompt is divided where content is new, was seen, was seen many times
    piece                        such a division of one request; all its keys have one class
    class                        which piece -> how many tokens of the prompt are new -> how many it has,
                                 or: which piece -> what the engine hints -> how many are new
    hazard of a class at an age  of the keys that were unused at this age, the share that was used before the next age

The worth of a key is its Gittins index: over all times that one could wait from its age on, the greatest probability of
a use within the time per expected waiting. So a class that always returns after a pause is kept through it and let go
behind it. A class without data has the hazards of the class above it; the root begins with a constant hazard per
logarithmic age, whose order is that of LRU.

Only a sample of the keys is followed, those whose digest ends in zero bits. What is learnt includes evicted keys.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Longs: TypeAlias = npt.NDArray[np.int64]

PIECES = 3  # new, seen, seen many times
NEW, SEEN, MANY = range(PIECES)
MANY_USES = 24
HORIZON = 1 << 14  # admissions that are remembered
MOST_SAMPLED = 1 << 14  # keys of a pool that are followed, at most
GHOST_POOLS = 4  # keys that are remembered, in pools
NODES = 1 << 11  # classes, at most
_HINT = 1 << 7  # marks a feature of a class as a hint

_ONE = 1 << 20  # probability
_ALIVE = 1 << 30
_UNIT = 1 << 10  # a use
_PRIOR = _ONE // 50
_SHRINK_TOKENS = 1 << 18  # of data that weigh as much as the class above
_DECAY_EVERY, _DECAY_SHIFT = 128, 7  # half-life: 11,000 admissions
_REFRESH_EVERY, _REFRESHED = 16, 128  # admissions; classes
_DUEL_POOLS = 8  # look-ups that the duel remembers, in pools
_WINS = 1000  # HAZARD begins with 1/1000 of the look-ups more than LRU


def _ages() -> list[int]:
    ages = [1]
    while ages[-1] < HORIZON:
        ages.append(max(ages[-1] + 1, ages[-1] * 5 // 4))
    return [*ages[:-1], HORIZON]


AGES = np.array(_ages(), np.int64)  # bin k has the ages AGES[k] to AGES[k + 1] - 1
NUM_AGES = len(AGES) - 1
_WIDTHS = np.diff(AGES)
_BIN = np.concatenate([[0], np.repeat(np.arange(NUM_AGES), _WIDTHS)])  # by age


@dataclass(frozen=True, slots=True)
class Prompt:
    """An admitted prompt: its number, its tokens, and where its content stops to be seen many times and to be seen."""

    number: int
    num_tokens: int
    many_end: int
    seen_end: int


class Hazards:
    """The hazards of all classes, and the index by class and age that follows from them.

    Attributes:
        index: worth by class and age bin.
    """

    def __init__(self, shrink: int) -> None:
        self._shrink = max(1, shrink) * _UNIT
        self.used = np.zeros((NODES, NUM_AGES), np.int64)
        self.waited = np.zeros((NODES, NUM_AGES), np.int64)
        self.index = np.zeros((NODES, NUM_AGES), np.int64)
        self.parent = np.zeros(NODES, np.int64)  # 0 is the root
        self.names: dict[int, int] = {}
        self._next = 0
        self.compute(np.zeros(1, np.int64))

    def node(self, name: Sequence[int]) -> int:
        """Return the class with these features, the coarsest first; that of the features before if there are too
        many classes.
        """
        node, key = 0, 1
        for feature in name:
            key = key << 8 | feature
            found = self.names.get(key)
            if found is None:
                if len(self.names) == NODES - 1:
                    return node
                found = self.names[key] = len(self.names) + 1
                self.parent[found] = node
                self.index[found] = self.index[node]
            node = found
        return node

    def add(self, table: _Longs, nodes: _Longs, ages: _Longs, counts: _Longs | int) -> None:
        """Add counts of keys to `used` or `waited`, for classes and all above them."""
        while True:
            np.add.at(table, (nodes, ages), counts)
            if not nodes.any():
                return
            counts = np.where(nodes == 0, 0, counts)
            nodes = self.parent[nodes]

    def state(self) -> list[Any]:
        """Return the state, which `load` takes."""
        count = len(self.names) + 1
        tables = [_words(table[:count]) for table in (self.used, self.waited, self.index, self.parent)]
        return [self.names.copy(), self._next, *tables]

    def load(self, state: list[Any]) -> None:
        """Continue from a state. Raises ValueError if it does not fit."""
        self.names, self._next, *words = state
        count = len(self.names) + 1
        check(sorted(self.names.values()) == list(range(1, count)) and count <= NODES, "classes")
        for table, one in zip((self.used, self.waited, self.index, self.parent), words, strict=True):
            table[:count] = _longs(one).reshape(table[:count].shape)
        above = self.parent[:count]
        check(bool(((above >= 0) & (above <= np.maximum(np.arange(count) - 1, 0))).all()), "classes above")
        check(0 <= self._next < max(count, 1), "next class")

    def decay(self) -> None:
        """Let earlier data weigh less."""
        for table in (self.used, self.waited):
            table -= table >> _DECAY_SHIFT

    def refresh(self) -> None:
        """Compute the index of some classes, in turn."""
        count = len(self.names) + 1
        first, self._next = self._next, (self._next + _REFRESHED) % count if count > _REFRESHED else 0
        self.compute(np.arange(first, min(first + _REFRESHED, count)))

    def compute(self, nodes: _Longs) -> None:
        """Compute the index of classes."""
        chain = [nodes]
        while chain[-1].any():
            chain.append(self.parent[chain[-1]])
        hazard = np.full((len(nodes), NUM_AGES), _PRIOR, np.int64)
        for level in reversed(chain):
            used, waited = self.used[level], self.waited[level]
            shrunk = (used * _ONE + self._shrink * hazard) // (waited + self._shrink)
            hazard = np.minimum(shrunk, _ONE - (_ONE >> 5))
        alive = np.full((len(nodes), NUM_AGES + 1), _ALIVE, np.int64)
        uses, held = np.zeros_like(alive), np.zeros_like(alive)
        for age in range(NUM_AGES):
            now, risk = alive[:, age], hazard[:, age]
            alive[:, age + 1] = np.maximum(now * (_ONE - risk) // _ONE, _ONE >> 10)
            uses[:, age + 1] = uses[:, age] + now * risk // _ONE
            held[:, age + 1] = held[:, age] + now * (2 * _ONE - risk) // (2 * _ONE) * _WIDTHS[age]
        for age in range(NUM_AGES):
            gain = (uses[:, age + 1 :] - uses[:, age : age + 1]) << 32
            self.index[nodes, age] = (gain // (held[:, age + 1 :] - held[:, age : age + 1])).max(axis=1)


class History:
    """The last HORIZON admissions: the class of each piece, and how many of its sampled keys were not used since."""

    def __init__(self, hazards: Hazards) -> None:
        self._hazards = hazards
        self.now = 0
        self.node = np.zeros((HORIZON, PIECES), np.int64)
        self.alive = np.zeros((HORIZON, PIECES), np.int64)

    def state(self) -> list[Any]:
        """Return the state, which `load` takes."""
        count = min(self.now + 1, HORIZON)
        return [self.now, _words(self.node[:count]), _words(self.alive[:count])]

    def load(self, state: list[Any]) -> None:
        """Continue from a state. Raises ValueError if it does not fit."""
        self.now, node, alive = state
        check(0 <= self.now < 1 << 60, "number of admissions")
        count = min(self.now + 1, HORIZON)
        self.node[:count], self.alive[:count] = _longs(node).reshape(-1, PIECES), _longs(alive).reshape(-1, PIECES)
        check(int(self.node.min()) >= 0 and int(self.node.max()) <= len(self._hazards.names), "classes of admissions")

    def begin(self) -> int:
        """Begin the next admission; what is unused at the end of an age bin has waited through it. Returns its
        number.
        """
        self.now += 1
        born = self.now - AGES[1:]
        bins = np.flatnonzero(born > 0)
        rows = born[bins] % HORIZON
        for piece in range(PIECES):
            alive = self.alive[rows, piece]
            self._hazards.add(self._hazards.waited, self.node[rows, piece], bins, alive * _UNIT)
        self.alive[self.now % HORIZON] = 0
        return self.now

    def use(self, owners: _Longs) -> None:
        """Record uses of keys that these pieces used last."""
        numbers, pieces = owners // PIECES, owners % PIECES
        recent = numbers > self.now - HORIZON
        numbers, pieces = numbers[recent], pieces[recent]
        nodes, ages = self.node[numbers % HORIZON, pieces], _BIN[self.now - numbers]
        for table in (self._hazards.used, self._hazards.waited):
            self._hazards.add(table, nodes, ages, _UNIT)
        np.subtract.at(self.alive, (numbers % HORIZON, pieces), 1)

    def lose(self, owner: int) -> None:
        """A key that this piece used last is not followed any more."""
        if owner // PIECES > self.now - HORIZON:
            self.alive[owner // PIECES % HORIZON, owner % PIECES] -= 1

    def order(self, owners: _Longs, depths: _Longs, count: int) -> _Longs:
        """Return the positions of the `count` entries of least worth, the least first: of equal ones the oldest first,
        of one request the deepest first. No key is worth less than one behind it in the same request.
        """
        numbers, pieces = owners // PIECES, owners % PIECES
        rows, ages = numbers % HORIZON, self.now - numbers
        bins = _BIN[np.clip(ages, 0, HORIZON - 1)]
        has = np.zeros((HORIZON, PIECES), np.bool_)
        has[rows, pieces] = True
        worth = np.zeros(len(owners), np.int64)
        for piece in range(PIECES):
            mine = np.where(has[rows, piece] & (pieces >= piece), self._hazards.index[self.node[rows, piece], bins], 0)
            worth = np.maximum(worth, mine)
        worth[ages >= HORIZON] = 0
        at = np.arange(len(owners))
        if count < len(owners) // 4:
            bound = np.partition(worth, count)[count]
            at = np.flatnonzero(worth <= bound)
        chosen: _Longs = at[np.lexsort((-depths[at], numbers[at], worth[at]))[:count]]
        return chosen


class Learner:
    """Follows admissions; keeps the history and the ghosts: an LRU pool and a HAZARD pool of sampled keys.

    Attributes:
        leads: whether HAZARD hits more than LRU, by the ghosts.
    """

    def __init__(self, num_hash_blocks: int, hash_block_size: int) -> None:
        self._size = hash_block_size
        self._shift = max(0, -(-num_hash_blocks // MOST_SAMPLED) - 1).bit_length()
        self._pool = max(1, num_hash_blocks >> self._shift)
        self._hazards = Hazards(_SHRINK_TOKENS // hash_block_size >> self._shift)
        self.history = History(self._hazards)
        most = GHOST_POOLS * max(self._pool, MOST_SAMPLED)
        self._entry: OrderedDict[int, int] = OrderedDict()  # by key, the least recently used first
        self._unused = list(range(most, -1, -1))
        self._owner = np.zeros(most + 1, np.int64)
        self._depth = np.zeros(most + 1, np.int64)
        self._uses = np.zeros(most + 1, np.int64)
        self._resident = np.zeros(most + 1, np.bool_)
        self._num_resident = 0
        self._victims: deque[tuple[int, int]] = deque()
        self._lru: OrderedDict[int, None] = OrderedDict()
        self.leads, self._gain, self._looked_up = False, 0, 0

    def admit(self, digests: Sequence[bytes], domain: str, num_tokens: int, num_hit: int = 0, hint: int = 0) -> Prompt:
        """Follow an admission; returns how its prompt is divided. `num_hit`: tokens of its hit, which were seen."""
        keys, depths = self._sampled(digests, domain)
        entries = [self._entry.get(key, -1) for key in keys]
        known = next((at for at, entry in enumerate(entries) if entry < 0), len(entries))
        uses = self._uses[entries[:known]]
        many = int(np.count_nonzero(uses >= MANY_USES - 1))
        many_end = depths[many - 1] if many else 0
        seen_end = max(num_hit, depths[known - 1] if known else 0)
        self._duel(keys, entries[:known])
        number = self.history.begin()
        self.history.use(self._owner[[entry for entry in entries if entry >= 0]])
        prompt = Prompt(number, num_tokens, many_end, seen_end)
        self.describe(prompt, hint)
        self._touch(keys, depths, entries, number * PIECES, (many, known))
        if number % _DECAY_EVERY == 0:
            self._hazards.decay()
        if number % _REFRESH_EVERY == 0:
            self._hazards.refresh()
        self._shrink()
        return prompt

    def describe(self, prompt: Prompt, hint: int) -> None:
        """Give the pieces of a prompt their classes. A hint, which may change until the blocks are released, comes
        before what the prompt shows, and replaces its length: the fewer the classes, the sooner each is known.
        """
        if prompt.number <= self.history.now - HORIZON:
            return  # its row is that of a later prompt
        new = ((prompt.num_tokens - prompt.seen_end) >> 9).bit_length()
        features = (_HINT | hint, new) if hint else (new, (prompt.num_tokens >> 9).bit_length())
        for piece in range(PIECES):
            self.history.node[prompt.number % HORIZON, piece] = self._hazards.node((piece, *features))

    def _touch(
        self, keys: Sequence[int], depths: Sequence[int], entries: list[int], first: int, ends: tuple[int, int]
    ) -> None:
        alive, many, known = self.history.alive[first // PIECES % HORIZON], *ends
        for key, entry in zip(keys, entries, strict=True):
            if entry >= 0:
                self._entry.move_to_end(key)  # it must not be the one that a new entry replaces
        for at in range(len(keys) - 1, -1, -1):
            key, entry = keys[at], entries[at]
            if entry < 0:
                entry = entries[at] = self._new_entry()
                self._entry[key] = entry
            else:
                self._entry.move_to_end(key)
            piece = MANY if at < many else SEEN if at < known else NEW
            alive[piece] += 1
            self._owner[entry], self._depth[entry] = first + piece, depths[at]
            self._uses[entry] += 1
            self._num_resident += not self._resident[entry]
            self._resident[entry] = True
            self._lru[key] = None
            self._lru.move_to_end(key)

    def _new_entry(self) -> int:
        if not self._unused:
            _, entry = self._entry.popitem(last=False)
            self.history.lose(int(self._owner[entry]))
            self._num_resident -= bool(self._resident[entry])
            self._resident[entry] = False
            self._uses[entry] = 0
            return entry
        return self._unused.pop()

    def _shrink(self) -> None:
        """Evict from both ghosts what does not fit."""
        while len(self._lru) > self._pool:
            self._lru.popitem(last=False)
        now = self.history.now
        while self._num_resident > self._pool:
            if not self._victims:
                at = np.flatnonzero(self._resident & (self._owner < now * PIECES))  # a request holds its blocks
                if not len(at):
                    break  # it is longer than the pool
                count = max(self._num_resident - self._pool, self._pool // 64, 1)
                found = at[self.history.order(self._owner[at], self._depth[at], count)]
                self._victims.extend(zip(found.tolist(), self._owner[found].tolist(), strict=True))
            entry, owner = self._victims.popleft()
            if self._resident[entry] and self._owner[entry] == owner:
                self._resident[entry] = False
                self._num_resident -= 1

    def _duel(self, keys: Sequence[int], entries: Sequence[int]) -> None:
        """Compare what the ghosts hit of a prompt."""
        lru = next((at for at, key in enumerate(keys) if key not in self._lru), len(keys))
        hazard = next((at for at, entry in enumerate(entries) if not self._resident[entry]), len(entries))
        remembered = _DUEL_POOLS * self._pool
        self._gain -= self._gain * len(keys) // remembered
        self._looked_up -= self._looked_up * len(keys) // remembered
        self._gain += (hazard - lru) * _UNIT
        self._looked_up += len(keys) * _UNIT
        if self._gain * _WINS > self._looked_up:
            self.leads = True
        elif self._gain < 0:
            self.leads = False

    def _sampled(self, digests: Sequence[bytes], domain: str) -> tuple[list[int], list[int]]:
        """Return the sampled keys of a chain of digests, each once, and how many tokens end with each. An engine that
        sends hashes may repeat one.
        """
        mask = (1 << self._shift) - 1
        salt = int.from_bytes(blake2b(domain.encode(), digest_size=8).digest()) if domain else 0
        found: dict[int, int] = {}
        for at, digest in enumerate(digests):
            if not int.from_bytes(digest[:2], "little") & mask:
                found.setdefault(int.from_bytes(digest[:8], "little") ^ salt, (at + 1) * self._size)
        return list(found), list(found.values())

    def state(self) -> list[Any]:
        """Return the state, which `load` takes. Entries are numbered by the last use of their keys."""
        entries = list(self._entry.values())
        number_of = {entry: number for number, entry in enumerate(entries)}
        victims = [(number_of[entry], owner) for entry, owner in self._victims if entry in number_of]
        columns = [_words(column[entries]) for column in (self._owner, self._depth, self._uses, self._resident)]
        ghosts = [array("Q", self._entry), columns, array("Q", self._lru), victims]
        return [self._hazards.state(), self.history.state(), ghosts, [self.leads, self._gain, self._looked_up]]

    def load(self, state: list[Any]) -> None:
        """Continue from a state. Raises ValueError if it does not fit this pool."""
        hazards, history, (keys, columns, lru, victims), (self.leads, self._gain, self._looked_up) = state
        if len(keys) > len(self._owner) or len(lru) > self._pool:
            raise ValueError(f"{len(keys)} keys of the ghosts")
        self._hazards.load(hazards)
        self.history.load(history)
        self._entry = OrderedDict(zip(keys, range(len(keys)), strict=True))
        self._unused = list(range(len(self._owner) - 1, len(keys) - 1, -1))
        for column, words in zip((self._owner, self._depth, self._uses, self._resident), columns, strict=True):
            column[:] = 0
            column[: len(keys)] = _longs(words)
        check(
            int(self._owner.min()) >= 0 and int(self._owner.max()) < (self.history.now + 1) * PIECES, "owners of keys"
        )
        check(all(0 <= entry < len(keys) for entry, _ in victims), "victims")
        self._num_resident = int(np.count_nonzero(self._resident))
        self._lru = OrderedDict.fromkeys(lru)
        self._victims = deque((entry, owner) for entry, owner in victims)


def check(holds: bool, what: str) -> None:
    """Raise ValueError unless a loaded state fits; a mirrored engine can send any."""
    if not holds:
        raise ValueError(f"{what} of the policy's state")


def _words(values: npt.NDArray[Any]) -> array[int]:
    return array("Q", values.astype(np.int64).tobytes())


def _longs(words: array[int]) -> _Longs:
    return np.frombuffer(words, np.int64).copy()
