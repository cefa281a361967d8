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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplane_core.spec.recency import Recency

_Longs: TypeAlias = npt.NDArray[np.int64]

PIECES = 3  # new, seen, seen many times
NEW, SEEN, MANY = range(PIECES)
MANY_USES = 24
HORIZON = 1 << 14  # admissions that are remembered
MOST_SAMPLED = 1 << 14  # keys of a pool that are followed, at most
GHOST_POOLS = 4  # keys that are remembered, in pools
LEAST_REMEMBERED = 1 << 16  # keys
BATCHES = 64  # parts of a pool; victims are chosen one part at a time
NODES = 1 << 11  # classes, at most
_HINT = 1 << 7  # marks a feature of a class as a hint

_FNV_BASIS, _FNV_PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1  # FNV-1a, of domains

_ONE = 1 << 20  # probability
_ALIVE = 1 << 30
_UNIT = 1 << 10  # a use
_PRIOR = _ONE // 50
_SHRINK_TOKENS = 1 << 18  # of data that weigh as much as the class above
_DECAY_EVERY, _DECAY_SHIFT = 128, 7  # half-life: 11,000 admissions
_REFRESH_EVERY, _REFRESHED = 32, 256  # admissions; classes
_DUEL_POOLS = 8  # look-ups that the duel remembers, in pools
_FIRST_POOLS = 3  # look-ups before HAZARD can lead, in pools
_WINS = 1000  # HAZARD begins with 1/1000 of the look-ups more than LRU
_SPREAD = 4, 3  # and with a gain whose square is over 3/4 of the sum of the squared differences
MOST_COUNT = 1 << 42  # of a table; of a state that is loaded


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

    def add(self, nodes: _Longs, ages: _Longs, used: int, waited: _Longs) -> None:
        """Add keys of classes, and of all above them: how many waited through the ages, and `used` to those that were
        used at them.
        """
        while len(nodes):
            np.add.at(self.used, (nodes, ages), used)
            np.add.at(self.waited, (nodes, ages), waited)
            below = nodes > 0
            nodes, ages, waited = self.parent[nodes[below]], ages[below], waited[below]

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
        for table in (self.used, self.waited):
            check(int(table.min()) >= 0 and int(table.max()) < MOST_COUNT, "counts of classes")
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
            is_next = (level > 0) | (level is chain[-1])  # the root once, also above classes that are less deep
            hazard = np.where(is_next[:, None], np.minimum(shrunk, _ONE - (_ONE >> 5)), hazard)
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

    def has_alive(self, owners: _Longs) -> bool:
        """Whether these are the owners of all keys that are followed."""
        owners = owners[owners > (self.now - HORIZON) * PIECES + PIECES - 1]
        count = np.bincount(owners % (HORIZON * PIECES), minlength=HORIZON * PIECES)
        return bool((count == self.alive.ravel()).all())

    def begin(self) -> int:
        """Begin the next admission; what is unused at the end of an age bin has waited through it. Returns its
        number.
        """
        self.now += 1
        born = self.now - AGES[1:]
        bins = np.flatnonzero(born > 0)
        rows = born[bins] % HORIZON
        waited = self.alive[rows].ravel() * _UNIT
        self._hazards.add(self.node[rows].ravel(), np.repeat(bins, PIECES), 0, waited)
        self.alive[self.now % HORIZON] = 0
        return self.now

    def use(self, owners: _Longs) -> None:
        """Record uses of keys that these pieces used last."""
        numbers, pieces = owners // PIECES, owners % PIECES
        recent = numbers > self.now - HORIZON
        numbers, pieces = numbers[recent], pieces[recent]
        nodes, ages = self.node[numbers % HORIZON, pieces], _BIN[self.now - numbers]
        self._hazards.add(nodes, ages, _UNIT, np.full(len(nodes), _UNIT, np.int64))
        np.subtract.at(self.alive, (numbers % HORIZON, pieces), 1)

    def lose(self, owners: _Longs) -> None:
        """Keys that these pieces used last are not followed any more."""
        owners = owners[owners // PIECES > self.now - HORIZON]
        np.subtract.at(self.alive, (owners // PIECES % HORIZON, owners % PIECES), 1)

    def order(self, owners: _Longs, depths: _Longs, count: int) -> _Longs:
        """Return the positions of the `count` entries of least worth, the least first: of equal ones the oldest first,
        of one request the deepest first. No key is worth less than one behind it in the same request.
        """
        cells = owners % (HORIZON * PIECES)
        has = np.zeros(HORIZON * PIECES, np.bool_)
        has[cells] = True
        owns = np.zeros(HORIZON, np.bool_)
        owns[cells // PIECES] = True
        rows = np.flatnonzero(owns)
        mine = self._hazards.index[self.node[rows], _BIN[(self.now - rows) % HORIZON][:, None]]
        of_row = np.zeros((HORIZON, PIECES), np.int64)
        of_row[rows] = np.maximum.accumulate(mine * has.reshape(HORIZON, PIECES)[rows], axis=1)
        worth = of_row.ravel()[cells]
        worth[owners <= (self.now - HORIZON) * PIECES + PIECES - 1] = 0
        chosen: _Longs = np.lexsort((-depths, owners // PIECES, worth))[:count]
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
        most = max(GHOST_POOLS * self._pool, LEAST_REMEMBERED)
        self._entry: dict[int, int] = {}  # by key
        self._key = np.zeros(most, np.uint64)
        self._owner, self._depth, self._uses = (np.zeros(most, np.int64) for _ in range(3))
        self._resident = np.zeros(most, np.bool_)
        self._recency = Recency(self._pool)
        self._num_resident = 0
        self._victims, self._victim_owners = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.leads, self._gain, self._spread, self._looked_up, self._first = False, 0, 0, 0, _FIRST_POOLS * self._pool

    def admit(self, digests: Sequence[bytes], domain: str, num_tokens: int, num_hit: int = 0, hint: int = 0) -> Prompt:
        """Follow an admission; returns how its prompt is divided. `num_hit`: tokens of its hit, which were seen."""
        keys, depths = self._sampled(digests, domain)
        entries = np.array([self._entry.get(key, -1) for key in keys], np.int64)
        known = _run(entries >= 0)
        many = int(np.count_nonzero(self._uses[entries[:known]] >= MANY_USES - 1))
        many_end = int(depths[many - 1]) if many else 0
        seen_end = max(num_hit, int(depths[known - 1]) if known else 0)
        self._duel(len(keys), entries[:known])
        number = self.history.begin()
        self.history.use(self._owner[entries[entries >= 0]])
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

    def _touch(self, keys: Sequence[int], depths: _Longs, entries: _Longs, first: int, ends: tuple[int, int]) -> None:
        if not len(entries):
            return
        new = np.flatnonzero(entries < 0)
        self._recency.hold(entries[entries >= 0].tolist())
        entries[new] = self._new_entries([keys[at] for at in new.tolist()])
        at, (many, known) = np.arange(len(entries)), ends
        pieces = np.where(at < many, MANY, np.where(at < known, SEEN, NEW))
        self.history.alive[first // PIECES % HORIZON] = np.bincount(pieces, minlength=PIECES)
        self._owner[entries], self._depth[entries] = first + pieces, depths
        self._uses[entries] += 1
        self._num_resident += len(entries) - int(np.count_nonzero(self._resident[entries]))
        self._resident[entries] = True
        self._recency.use(entries[::-1].tolist())

    def _new_entries(self, keys: Sequence[int]) -> _Longs:
        """Return an entry for each key; those of the keys that were used longest ago where all are taken."""
        free = min(len(keys), len(self._key) - len(self._entry))
        entries = np.arange(len(self._entry), len(self._entry) + free)
        if free < len(keys):
            oldest = self._recency.take_oldest(len(keys) - free)
            for key in self._key[oldest].tolist():
                del self._entry[key]
            self.history.lose(self._owner[oldest])
            self._num_resident -= int(np.count_nonzero(self._resident[oldest]))
            self._resident[oldest], self._uses[oldest] = False, 0
            entries = np.concatenate([entries, oldest])
        self._entry.update(zip(keys, entries.tolist(), strict=True))
        self._key[entries] = keys
        return entries

    def _shrink(self) -> None:
        """Evict from the ghost of HAZARD what does not fit."""
        while (missing := self._num_resident - self._pool) > 0:
            if not len(self._victims):
                now = self.history.now
                at = np.flatnonzero(self._resident & (self._owner < now * PIECES))  # a request holds its blocks
                if not len(at):
                    return  # it is longer than the pool
                count = max(missing, self._pool // BATCHES, 1)
                self._victims = at[self.history.order(self._owner[at], self._depth[at], count)]
                self._victim_owners = self._owner[self._victims]
            stay = self._resident[self._victims] & (self._owner[self._victims] == self._victim_owners)
            rows = np.flatnonzero(stay)[:missing]
            self._resident[self._victims[rows]] = False
            self._num_resident -= len(rows)
            end = int(rows[-1]) + 1 if len(rows) == missing else len(self._victims)
            self._victims, self._victim_owners = self._victims[end:], self._victim_owners[end:]

    def _duel(self, num_keys: int, entries: _Longs) -> None:
        """Compare what the ghosts hit of a prompt. `entries`: of its known beginning.

        The ghosts differ only once both are full, and by whole prompts. A difference that few look-ups show, or that
        other prompts balance, is no reason to lead: the pool loses while it changes from one policy to the other.
        """
        difference = _run(self._resident[entries]) - _run(self._recency.are_recent(entries))
        remembered = _DUEL_POOLS * self._pool
        forgotten = min(num_keys, remembered)
        self._gain += difference * _UNIT - self._gain * forgotten // remembered
        self._looked_up += num_keys * _UNIT - self._looked_up * forgotten // remembered
        for _ in range(2):  # as the square of the gain
            self._spread -= self._spread * forgotten // remembered
        self._spread += difference * difference * _UNIT
        self._first = max(0, self._first - num_keys)
        times, variances = _SPREAD
        is_clear = self._gain > 0 and times * self._gain * self._gain > variances * self._spread * _UNIT
        if not self._first and is_clear and self._gain * _WINS > self._looked_up:
            self.leads = True
        elif self._gain < 0:
            self.leads = False

    def _sampled(self, digests: Sequence[bytes], domain: str) -> tuple[list[int], _Longs]:
        """Return the sampled keys of a chain of digests, each once, and how many tokens end with each: an engine that
        sends hashes may repeat one, and choose them so that all are sampled.
        """
        if not digests:
            return [], np.zeros(0, np.int64)
        salt = _FNV_BASIS if domain else 0
        for byte in domain.encode():
            salt = (salt ^ byte) * _FNV_PRIME & _WORD
        rows = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
        heads = np.ascontiguousarray(rows[:, :8]).view("<u8").ravel()
        at = np.flatnonzero(heads & np.uint64((1 << self._shift) - 1) == 0)[: len(self._key) // 2]
        keys = (heads[at] ^ np.uint64(salt)).tolist()
        first = dict(zip(reversed(keys), reversed(at.tolist()), strict=True))
        if len(first) < len(keys):
            keys = list(dict.fromkeys(keys))
            at = np.array([first[key] for key in keys], np.int64)
        return keys, (at + 1) * self._size

    def state(self) -> list[Any]:
        """Return the state, which `load` takes. Entries are numbered by the last use of their keys."""
        entries = self._recency.order()
        number_of = np.zeros(len(self._key), np.int64)
        number_of[entries] = np.arange(len(entries))
        stay = self._resident[self._victims] & (self._owner[self._victims] == self._victim_owners)
        victims = [_words(number_of[self._victims[stay]]), _words(self._victim_owners[stay])]
        columns = [_words(column[entries]) for column in (self._owner, self._depth, self._uses, self._resident)]
        ghosts = [array("Q", self._key[entries].tobytes()), columns, len(self._recency.recent), victims]
        duel = [self.leads, self._gain, self._spread, self._looked_up, self._first]
        return [self._hazards.state(), self.history.state(), ghosts, duel]

    def load(self, state: list[Any]) -> None:
        """Continue from a state. Raises ValueError if it does not fit this pool."""
        hazards, history, (keys, columns, num_recent, victims), duel = state
        leads, self._gain, self._spread, self._looked_up, self._first = duel
        self.leads = bool(leads)
        limits = zip(duel[1:], (1 << 30, 1 << 44, 1 << 30, _FIRST_POOLS * self._pool + 1), strict=True)
        check(all(abs(one) < limit for one, limit in limits) and min(duel[2:]) >= 0, "duel")
        count = len(keys)
        check(count <= len(self._key), "keys")
        check(0 <= num_recent <= min(count, self._pool), "number of keys of the LRU ghost")
        self._hazards.load(hazards)
        self.history.load(history)
        self._entry = dict(zip(keys, range(count), strict=True))
        check(len(self._entry) == count, "repeated keys")
        self._key[:count] = np.frombuffer(keys, np.uint64)
        for column, words in zip((self._owner, self._depth, self._uses, self._resident), columns, strict=True):
            column[:] = 0
            column[:count] = _longs(words)
        end = (self.history.now + 1) * PIECES
        check(int(self._owner.min()) >= 0 and int(self._owner.max()) < end, "owners of keys")
        for column in (self._depth, self._uses):
            check(int(column.min()) >= 0 and int(column.max()) < MOST_COUNT, "depths and uses of keys")
        check(self.history.has_alive(self._owner[:count]), "unused keys of admissions")
        self._num_resident = int(np.count_nonzero(self._resident))
        self._recency.load(count, num_recent)
        self._victims, self._victim_owners = map(_longs, victims)
        check(len(self._victims) == len(self._victim_owners), "owners of victims")
        check(bool(((self._victims >= 0) & (self._victims < count)).all()), "victims")


def _run(flags: npt.NDArray[np.bool_]) -> int:
    """Return how many entries at the beginning are true."""
    return len(flags) if flags.all() else int(flags.argmin())


def check(holds: bool, what: str) -> None:
    """Raise ValueError unless a loaded state fits; a mirrored engine can send any."""
    if not holds:
        raise ValueError(f"{what} of the policy's state")


def _words(values: npt.NDArray[Any]) -> array[int]:
    return array("Q", values.astype(np.int64).tobytes())


def _longs(words: array[int]) -> _Longs:
    return np.frombuffer(words, np.int64).copy()
