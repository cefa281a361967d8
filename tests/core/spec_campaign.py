"""Random specs (`spec_draws`) under a random engine on simulated pages: a spec is refused by name, or no hit is wrong.

`python -m tests.core.page_campaign --specs N --base S` plays them and prints the table. What each page really holds
(`page_memory`) is compared with what the hit claims; this shares no code with look-ups.
"""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import AdmitStatus, Cache, Part, PartResult, Step, StepResult
from kvplane_core.face.setup import check_spec, states_for_drafts
from tests.core.follower import Followed
from tests.core.page_engine import RandomEngine
from tests.core.page_memory import WrongPage
from tests.core.page_requests import LONGEST, OTHER
from tests.core.spec_draws import draw_spec
from tests.twins import weakened

PROMPTS = 200
MOST_STEPS = 2_000
LEAST_ACCEPTED, LEAST_HIT = 70, 30  # percent, by kind
PLANTED = ("classes as stated", "chunk of the longest hit", "retained blocks needed")


class PromptEngine(RandomEngine):
    """Prompts that repeat, continue and share the beginnings of earlier ones, with holes in the cache; counts hits."""

    retains, checks_every, comes = False, 4, 90

    def __init__(self, spec: ReplicaSpec, rng: Random, most_drafts: int = 0) -> None:
        self.prompts = self.prompt_tokens = self.hit_tokens = 0
        self.served: list[tuple[str, str, int]] = []  # text, domain, length
        super().__init__(spec, rng, most_drafts)
        self.deaths, self.loads, self.evicts = rng.choice([0, 0, 0, 1]), rng.choice([0, 0, 30]), rng.choice([3, 10, 30])
        self.decodes = self.lags = self.limits_rows = False
        self.ends, self.splits, self.launches = 60, 10, 90
        if not spec.events:
            self.followed, self.deaths = _Unfollowed(self.replica), 0

    def begin(self) -> None:
        super().begin()
        self.resets = self._chance(10)

    def _cache(self, held: list[int]) -> Cache:
        cache = super()._cache(held)
        cache.reset = cache.reset and self.resets
        return cache

    def _some(self, slots: list[int]) -> list[int]:
        """Mostly all: many prompts in few steps."""
        return self.rng.sample(slots, len(slots)) if self._chance(80) else super()._some(slots)

    def _prompt(self) -> tuple[str, str, int, int]:
        if not self.served or self._chance(5):
            text = "".join(self.rng.choices("ab", k=LONGEST))
            domain = OTHER if self._chance(15) else ""
            text, length = text.upper() if domain else text, self.rng.randint(LONGEST // 3, LONGEST - 8)
        else:
            text, domain, length = self.rng.choice(self.served[-6:])
            way = self.rng.randrange(4)
            if way == 0:  # another end
                at = self.rng.randint(LONGEST // 3, length)
                end = "".join(self.rng.choices("ab", k=LONGEST - at))
                text = text[:at] + (end.upper() if domain else end)
            elif way == 1:
                length = min(LONGEST - 4, length + self.rng.randint(1, 20))
        return text, domain, length, min(LONGEST, length + self.rng.randint(1, 4))

    def _draw_request(self) -> tuple[str, str, int, int]:
        text, domain, length, limit = self._prompt()
        self.served.append((text, domain, length))
        return text, domain, length, limit

    def apply(self, parts: list[Part]) -> list[PartResult]:
        results = super().apply(parts)
        for part, result in zip(parts, results, strict=True):
            for slot, status, hit in zip(part.admit.slot, result.admit_status, result.admit_hit, strict=True):
                if status == AdmitStatus.GRANTED:
                    self._admits(self.known[slot], hit)
        return results

    def _admits(self, length: int, hit: int) -> None:
        assert hit % self.spec.hit_alignment == 0, f"a hit of {hit} tokens is no multiple of {self.spec.hit_alignment}"
        assert hit < length or not hit, f"a hit of {hit} tokens in a prompt of {length}"
        self.prompts += 1
        self.prompt_tokens += length
        self.hit_tokens += hit


class _Unfollowed(Followed):
    """Without events there is no follower."""

    def step(self, step: Step, result: StepResult) -> None:
        return

    def begin(self, epoch: int) -> None:
        return


@dataclass
class Table:
    """What became of the specs, by kind: a spec counts for each kind that it has.

    Attributes:
        drawn, accepted: specs.
        tokens, hits: tokens of prompts, and those that were hit.
        reasons: refused specs, by field and reason.
        broken: "spec N seed S: what was wrong".
    """

    specs: int = 0
    prompts: int = 0
    short: int = 0  # specs with fewer prompts than wanted
    wrong: int = 0
    drawn: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, other: Table) -> None:
        """Take over the counts of another part of the campaign."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def play(self, seed: int, prompts: int = PROMPTS) -> None:
        """Draw the spec of this seed, and play it if it is not refused."""
        spec = draw_spec(seed)
        kinds = {kind_of(spec, number) for number in range(len(spec.groups))}
        self.specs += 1
        self.drawn.update(kinds)
        try:
            check_spec(spec)
        except KvplaneError as error:
            self.reasons[reason_of(error)] += 1
            return
        self.accepted.update(kinds)
        try:
            engine = played(spec, seed, prompts)
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            self.wrong += isinstance(error, WrongPage)
            self.broken.append(f"spec {seed}: {type(error).__name__}: {str(error)[:300]}")
            return
        self.prompts += engine.prompts
        self.short += engine.prompts < prompts
        if spec.enable_caching:
            self.tokens.update(dict.fromkeys(kinds, engine.prompt_tokens))
            self.hits.update(dict.fromkeys(kinds, engine.hit_tokens))


def played(spec: ReplicaSpec, seed: int, prompts: int = PROMPTS) -> PromptEngine:
    """Let an engine serve prompts. Raises AssertionError if a page does not hold what was claimed of it."""
    states = states_for_drafts(spec)
    drafts = 2 if states is None else min(states, 2)
    engine = PromptEngine(spec, Random(seed), drafts if seed % 2 else 0)
    steps = 0
    while engine.prompts < prompts and steps < MOST_STEPS:
        engine.step()
        steps += 1
    return engine


def kind_of(spec: ReplicaSpec, number: int) -> str:
    """The kind of a group, as the table names it."""
    group = spec.groups[number]
    return f"{group.kind.value} {group.mamba_mode.value}" if group.kind is GroupKind.MAMBA else group.kind.value


def reason_of(error: KvplaneError) -> str:
    """Field and reason, without the numbers in them."""
    text = f"{error.field}: {error.message}"
    return re.sub(r"\d+", "N", text)[:110]


def run_specs(seeds: range, prompts: int = PROMPTS) -> Table:
    """Play the specs of some seeds."""
    table = Table()
    for seed in seeds:
        table.play(seed, prompts)
    return table


def specs_until_found(twin: str, most: int, base: int = 1) -> int:
    """Specs, from seed `base` on, until one breaks a rule; 0 = none did."""
    with weakened(twin):
        for count in range(1, most + 1):
            table = Table()
            table.play(base + count - 1)
            if table.broken:
                return count
    return 0


def report(table: Table) -> bool:
    """Print the table; whether each kind was accepted and hit often enough, and nothing was wrong."""
    good = True
    print(f"{'kind':<28}{'drawn':>8}{'accepted':>10}{'hit':>8}")
    for kind in sorted(table.drawn):
        share = 100 * table.accepted[kind] / table.drawn[kind]
        hit = 100 * table.hits[kind] / max(1, table.tokens[kind])
        good &= share >= LEAST_ACCEPTED and (hit >= LEAST_HIT or not table.tokens[kind])
        print(f"{kind:<28}{table.drawn[kind]:>8}{share:>9.1f}%{f'{hit:.1f}%' if table.tokens[kind] else 'never':>8}")
    for reason, count in table.reasons.most_common():
        print(f"{count:>8}  refused: {reason}")
    refused = table.reasons.total()
    print(
        f"{table.specs} specs, {refused} refused, {table.prompts} prompts, {table.wrong} wrong hits, "
        f"{len(table.broken)} broken, {table.short} with too few prompts"
    )
    return good and not table.broken


def main(seeds: range, jobs: int) -> bool:
    """Play the specs of these seeds in some processes, and print the table; whether it is as it must be."""
    table, pieces = Table(), [range(start, min(start + 25, seeds.stop)) for start in range(seeds.start, seeds.stop, 25)]
    with multiprocessing.Pool(jobs) as pool:
        for part in pool.imap_unordered(run_specs, pieces):
            table.add(part)
            for line in part.broken:
                print(line, flush=True)
    return report(table)
