"""Random prompts that move between engines of one namespace, whose peers give wrong bytes, die, come back and forget.

Each answer is compared with the dense model, each copy with the ledger of what was really written. At the end nothing
may be left: jobs, pins, blocks, descriptors.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from random import Random
from threading import Timer
from typing import Any
from unittest import mock

from kvplane.base.hashing import split_hashes
from kvplane.base.sections import Peers
from kvplane.base.step import NO_EXTRA_KEYS
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.replicas import peers as board
from kvplane_service.replicas.lenders import Member
from kvplane_service.unary.hashing import hash_tokens
from kvplane_worker.nixl.messages import PACKAGES
from kvplane_worker.tiers import Movers, PeerSlots
from kvplane_worker.tiers.arena import PeerMemory
from tests.engine.faults import Fault
from tests.engine.reference.config import BOS, AttentionLayer, LayerConfig
from tests.engine.reference.request import Request
from tests.engine.stress import DENSE, FULL, STATE, Report, compare
from tests.engine.world import World
from tests.peers.ledger import LEDGER, CheckedOps, CheckedPeers, Ledger, NotedSlots
from tests.peers.memories import MEMORIES, READERS, Memory, ScattersFirst, Skips, SkipsSecond
from tests.peers.site import CONFIG, NAMESPACE, Site, pool_of

KINDS = (*MEMORIES, "confused", "killed", "restarted")
# Groups other than full attention, whose bytes peers load too: for these kinds, as "KIND of GROUPS".
GROUPS: dict[str, tuple[LayerConfig, ...]] = {
    "windows": (AttentionLayer(kv_heads=2, block_size=16, window=40), FULL),
    "states": (STATE, FULL),
}
OVER_NIXL = " over NIXL"
# With the engines on two services, which follow each other; "cut": the connection between them breaks periodically.
OF_TWO = " of two services"
KINDS_OF_TWO = ("sound", "wrong bytes", "another slot", "killed", "restarted", "cut")
HAS_NIXL = any(find_spec(name) for name in PACKAGES)
KINDS_OF_GROUPS = ("sound", "wrong bytes", "another slot", "torn reads", "killed")
# Slots of a host tier that forgets what peers are just reading, what they were sent of, or nothing.
FEW_SLOTS, CHURN_SLOTS, FULL_SLOTS, MANY_SLOTS = 14, 30, 60, 400
FULL_HOST = "sound, full host"  # host tiers that evict while peers read what is newest in them
MOST_OPEN = 3
BLOCK, IDLE_SHARE, STRIKES, CUTS, REPORTS = 16, 0.5, 0.02, 0.05, 0.5
READ_S, SHORT_READ_S, STOPPED_S, STOPS = (
    20.0,
    0.05,
    0.15,
    0.1,
)  # limits of a read over NIXL, and for how long a peer is stopped


@dataclass
class Outcome:
    """What a run found.

    Attributes:
        kind: of the run.
        only_peers: tokens, in whole blocks, of prompts that another engine had served, and this one had not.
        loaded: of these, tokens that were loaded instead of computed.
        held: of these, tokens that host tiers of peers held when the prompt was asked; counted for full attention.
        loaded_held: of these, tokens that were loaded.
        wrong: copies that were accepted, and are not what the index names.
        leaks: what is left.
        of_groups: accepted copies by group.
        late: reads over NIXL that took too long.
    """

    kind: str
    report: Report = field(default_factory=Report)
    only_peers: int = 0
    loaded: int = 0
    held: int = 0
    loaded_held: int = 0
    loads: int = 0
    accepted: int = 0
    refused: int = 0
    torn: int = 0
    late: int = 0
    of_groups: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def differing(self) -> int:
        return self.report.differing + self.report.off

    @property
    def held_share(self) -> float:
        return self.loaded_held / self.held if self.held else 1.0

    @property
    def is_good(self) -> bool:
        return not self.differing and not self.wrong and not self.leaks

    def line(self) -> str:
        share = f"{self.loaded / self.only_peers:6.1%}" if self.only_peers else "     -"
        held = f" ({self.held_share:.1%} of {self.held} held)" if self.held else ""
        return (
            f"{self.kind:27} {self.report.requests:5} requests, {self.loads:4} loads, {share} of"
            f" {self.only_peers:6} tokens{held}, {self.accepted:5} copies, {self.refused:4} refused,"
            f" {self.torn:3} torn, {self.late:2} late, {self.differing} tokens differ, {len(self.wrong)} wrong copies,"
            f" {len(self.leaks)} leaks"
        )


class Confused(board.Namespace):
    """A service that confuses two keys of a group periodically: its rows name slots that hold something else."""

    rng = Random(3)

    def _rows(self, me: Member) -> Peers:
        rows = super()._rows(me)
        size = len(rows.hashes) // max(1, len(rows.slot))
        parts = [rows.hashes[at * size : (at + 1) * size] for at in range(len(rows.slot))]
        for at in range(1, len(parts)):
            if rows.group[at] == rows.group[at - 1] and self.rng.random() < 0.3:
                parts[at - 1], parts[at] = parts[at], parts[at - 1]
        return replace(rows, hashes=b"".join(parts))


@contextmanager
def confused(is_so: bool) -> Any:
    """Let registries make namespaces that are confused."""
    from kvplane_service import registry

    before, registry.Namespace = registry.Namespace, Confused if is_so else board.Namespace  # type: ignore[attr-defined]
    try:
        yield
    finally:
        registry.Namespace = before  # type: ignore[attr-defined]


class Run:
    """One run of the campaign."""

    def __init__(
        self, kind: str, seed: int, reader: type[PeerSlots] = CheckedPeers, movers: type[Movers] = Movers
    ) -> None:
        vars(LEDGER).update(vars(Ledger()))
        self.outcome, self._rng = Outcome(kind), Random(seed)
        kind, over_nixl, _ = kind.partition(OVER_NIXL)
        kind, of_two, _ = kind.partition(OF_TWO)
        self._kind, _, groups = kind.partition(" of ")
        kind, layers = self._kind, GROUPS.get(groups, (FULL,))
        fault = Fault(kind, "", slots=NotedSlots, peers=reader, ops=CheckedOps, movers=movers)
        slots = {"sound": MANY_SLOTS, FULL_HOST: FULL_SLOTS, "late": FEW_SLOTS, "torn reads": FEW_SLOTS}.get(
            kind, CHURN_SLOTS
        )
        config = replace(CONFIG, load_deadline_s=0.1 if kind == "slow" else 30.0)
        sizes = {"num_blocks": 30 * len(layers) ** 2, "max_model_len": 200}
        pool = pool_of(3, layers, slots * len(layers), **sizes, **(DENSE if groups else {}))
        read_s = (SHORT_READ_S if kind == "stopped" else READ_S) * bool(over_nixl)
        first, *more = self._registries(2 if of_two else 1)
        self.site = Site(3, pool, config, fault, self._memory, registry=first, nixl_s=read_s, more=more)
        self._open: dict[str, tuple[Request, int, int]] = {}
        self._seen: list[set[int]] = [set() for _ in self.site.worlds]  # prompts that each engine knows
        self._number, self._lives = 0, len(self.site.worlds)
        self._asked: dict[str, int] = {}  # the engine of each request
        self._held: dict[str, int] = {}  # by request: tokens that only peers held
        self._prompts = [self._text(self._rng.randrange(60, 160)) for _ in range(12)]

    def _registries(self, count: int) -> Sequence[Registry]:
        """Return those of the services."""
        return [Registry(Config(), lambda: 0) for _ in range(count)]

    def _memory(self, arena: PeerMemory, incarnation: bytes) -> PeerMemory:
        return MEMORIES.get(self._kind, Memory)(arena, NAMESPACE, incarnation, Random(self._rng.random()))

    def _text(self, count: int) -> list[int]:
        return [BOS, *(self._rng.randrange(256) for _ in range(count))]

    def serve(self, num_requests: int) -> Outcome:
        """Serve requests, then look for what is left."""
        self.play(num_requests)
        return self.end()

    def play(self, num_requests: int) -> None:
        """Serve requests."""
        left = num_requests
        while left or self._open:
            while left and len(self._open) < MOST_OPEN:
                self._ask()
                left -= 1
            if self.site.links:
                self._report()
            for number, world in enumerate(self.site.worlds):
                if world.engine.has_work or self._rng.random() < IDLE_SHARE:  # an idle engine reports what it saved
                    for request in world.engine.step():
                        self._finish(number, request)
            self._round()
            if self._kind in ("killed", "restarted") and self._rng.random() < STRIKES:
                self._strike()
            if self._kind == "stopped" and self._rng.random() < STOPS:
                self._stop()

    def end(self) -> Outcome:
        """End all engines, and look for what is left."""
        for world in self.site.worlds:
            for _ in range(20):
                world.engine.step()
            self._count(world)
            self.outcome.leaks += leaks_of(world)
        self.outcome.leaks += leaks_of_agents(self.site)
        self.outcome.late = sum(agent.late_reads for agent in self.site.agents.values())
        self.site.close()
        found = self.outcome
        found.wrong, found.accepted, found.refused, found.torn, found.of_groups = (
            LEDGER.wrong, LEDGER.accepted, LEDGER.refused, LEDGER.torn, LEDGER.of_groups
        )  # fmt: skip
        return found

    def _round(self) -> None:
        """End a round of steps of all engines."""

    def _report(self) -> None:
        """Let the services report to each other what is new, sometimes late, or break the connection between them."""
        if self._kind == "cut" and self._rng.random() < CUTS:
            self._rng.choice(self.site.links).cut()
            self.site.connect()  # renewals without what was forgotten, then with it
            self.site.connect()
        elif self._rng.random() < REPORTS:
            self.site.report()

    def _ask(self) -> None:
        """Ask an engine for a known prompt, mostly one that it does not know, or for a new one."""
        rng = self._rng
        number, which = rng.randrange(len(self.site.worlds)), rng.randrange(len(self._prompts))
        if self._kind != "sound" and rng.random() < 0.2:
            self._prompts[which] = self._text(rng.randrange(60, 160))
            for seen in self._seen:
                seen.discard(which)
        self._number += 1
        prompt = [*self._prompts[which], *(rng.randrange(256) for _ in range(rng.randrange(1, 9)))]
        request = Request(f"q{self._number}", prompt, rng.choice([1, 3, 9]), keep_logits=True)
        is_asked = any(which == one for _, one, _ in self._open.values())
        is_new = which not in self._seen[number] and not is_asked
        expected = len(self._prompts[which]) // BLOCK * BLOCK if any(which in one for one in self._seen) else 0
        self._open[request.request_id] = request, which, expected * is_new
        self._asked[request.request_id] = number
        self._held[request.request_id] = self._held_by_peers(self.site.worlds[number], prompt) * is_new
        self.site.worlds[number].engine.add(request)

    def _held_by_peers(self, world: World, prompt: Sequence[int]) -> int:
        """How many leading tokens of a prompt the host tiers hold that an engine may read."""
        namespace = world.registry.get(world.name).namespace
        if namespace is None or len(world.pool.model.layers) > 1:
            return 0  # of windows and states, what a hit needs is not every block
        scheme = world.host.scheme
        digests = split_hashes(hash_tokens(scheme, prompt, NO_EXTRA_KEYS, None).hashes, scheme.digest.size)
        held = [bool(namespace.holders(world.name, ("", 0, one))) for one in digests[: (len(prompt) - 1) // BLOCK]]
        return BLOCK * (*held, False).index(False)

    def _finish(self, number: int, request: Request) -> None:
        _, which, expected = self._open.pop(request.request_id)
        if self._prompts[which] == request.prompt[: len(self._prompts[which])]:
            self._seen[number].add(which)
        self.outcome.only_peers += expected
        held = self._held.pop(request.request_id, 0)
        self.outcome.held += held
        self.outcome.loaded_held += min(held, request.hits[-1]) if request.hits else 0
        self.outcome.loaded += min(expected, request.hits[-1]) if request.hits else 0
        self.outcome.report.requests += 1
        if not request.error:
            compare(self.site.worlds[number], request, self.outcome.report)

    def _strike(self) -> None:
        """Kill an engine with its worker, or let it come back with new memory under its name."""
        number = self._rng.randrange(len(self.site.worlds))
        world = self.site.worlds[number]
        self._count(world)
        world.check()
        world.registry.remove(world.name)
        self.site.kill(world)
        self._lives += 1
        name = world.name if self._kind == "restarted" else f"engine/{self._lives}"
        self.site.worlds[number] = self.site.make(name)
        self._seen[number] = set()
        self.site.connect()
        self.site.connect()
        for request_id, (request, which, _) in list(self._open.items()):
            if self._asked[request_id] == number:
                again = Request(request_id, request.prompt, request.max_new_tokens, keep_logits=True)
                self._open[request_id] = again, which, 0
                self.site.worlds[number].engine.add(again)

    def _stop(self) -> None:
        """Stop the process that lends the memory of an engine for a while: reads of it are late, and end later."""
        agent = self._rng.choice(list(self.site.agents.values()))
        os.kill(agent.pid, signal.SIGSTOP)
        Timer(STOPPED_S, os.kill, (agent.pid, signal.SIGCONT)).start()

    def _count(self, world: Any) -> None:
        counts = world.engine.counts
        self.outcome.loads += counts.loads


def leaks_of(world: Any) -> list[str]:
    """What a replica that serves nothing still holds."""
    core = world.host.replica
    jobs = {kind: count for kind, count in core.tiers.open_jobs().items() if count and kind == "load"}
    found = [f"{world.name}: {count} {kind} jobs" for kind, count in jobs.items()]
    counts = core.block_counts
    return found + [f"{world.name}: {counts.held} blocks held, {counts.busy} busy"] * bool(counts.held or counts.busy)


def leaks_of_agents(site: Site) -> list[str]:
    """What processes that have NIXL do not give back, when no read is late any more."""
    end = time.monotonic() + READ_S
    while any(agent.num_late for agent in site.agents.values()) and time.monotonic() < end:
        time.sleep(0.01)
    return [f"{name}: {agent.num_late} late lanes" for name, agent in site.agents.items() if agent.num_late]


def open_memories() -> int:
    """Descriptors of memory files that this process has open."""
    gc.collect()
    links = [os.path.join("/proc/self/fd", one) for one in os.listdir("/proc/self/fd")]
    return sum("memfd:kvplane-" in os.readlink(one) for one in links if os.path.islink(one))


def run(kind: str, num_requests: int, seed: int, **planted: Any) -> Outcome:
    """Serve requests with peers of this kind."""
    before = open_memories()
    # Between hosts UCX has no memory that both share.
    with confused(kind.startswith("confused")), mock.patch.dict(os.environ, UCX_TLS="tcp"):
        campaign = Run(kind, seed, **planted)
        outcome = campaign.serve(num_requests)
    del campaign
    left = open_memories() - before
    outcome.leaks += [f"{left} memory files"] * (left > 0)
    return outcome


def plants() -> dict[str, Callable[[int, int], Outcome]]:
    """Runs with a planted fault of the reader, by its name: they take a number of requests, and a seed."""

    def with_reader(reader: type[PeerSlots], kind: str) -> Callable[[int, int], Outcome]:
        return lambda count, seed: run(kind, count, seed, reader=reader)

    made = {name: with_reader(*one) for name, one in READERS.items()}
    if HAS_NIXL:
        made |= {name + OVER_NIXL: with_reader(reader, kind + OVER_NIXL) for name, (reader, kind) in READERS.items()}
    made["bytes are scattered before they are verified"] = lambda count, seed: run(
        "wrong bytes", count, seed, movers=ScattersFirst
    )
    for number, movers in enumerate((Skips, SkipsSecond)):
        for groups in GROUPS:
            name = f"group {number} of {groups} and full attention is not loaded"
            made[name] = lambda count, seed, of=(f"sound of {groups}", movers): run(of[0], count, seed, movers=of[1])  # type: ignore[misc]
    return made


def kinds() -> Sequence[str]:
    """All kinds of runs by shared memory."""
    of_groups = (f"{kind} of {groups}" for groups in GROUPS for kind in KINDS_OF_GROUPS)
    return (*KINDS, *of_groups, *(kind + OF_TWO for kind in KINDS_OF_TWO))


def kinds_over_nixl() -> Sequence[str]:
    """All kinds of runs over NIXL."""
    of_groups = (f"sound of {groups}" for groups in GROUPS)
    return tuple(kind + OVER_NIXL for kind in (*KINDS, "stopped", *of_groups))
