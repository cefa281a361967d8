"""Write what this version writes, for later versions to read:

    python -m tests.versions.write COMMIT         (from a clean checkout of it)

The folder of a commit is never written again. What it has must be readable as long as a service or an engine of that
version may run next to this one.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from kvplane.base.groups import ReplicaSpec, TierKind, TierSpec
from kvplane.base.job_table import JobTable, job_table_bytes, record_of
from kvplane.base.key_records import KeyRecord, KeyRecords, records_bytes
from kvplane.base.session import CORE_VERSION, MirrorTerms, OpenRequest
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.stamps import Stamp
from kvplane.base.step import Orders, Part
from kvplane.blocking.session import Session
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.mirror_log import MirrorLog
from kvplane.wire import encode_spec, stream
from kvplane.wire.mirror import Mirrored, answer_digest, mirrored_message, slice_message
from kvplane_core.face.setup import states_for_drafts
from kvplane_core.face.state import export_state
from kvplane_service.decisions.log import Decision, Entry, Life
from kvplane_service.decisions.recording import MAGIC, header_of, message_of, write_frame
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.sqlite import SqliteStore
from kvplane_worker.tiers.kept import Kept, write_index
from tests.client.lasting import HYBRID, INCARNATION, ONE_GROUP, STATE, LastingEngine
from tests.client.mini_engine import FULL, WINDOW, spec_of
from tests.core.builders import replica_spec
from tests.core.core_version import RecordedEngine
from tests.core.specification import specification_of
from tests.core.test_page_contents import ALL_MIXES
from tests.core.tier_engine import TierEngine, small_pools
from tests.service.inprocess import InProcessTransport
from tests.store.test_restart import Life as ServiceLife
from tests.versions.kept import HERE, KEY, Sent, write_messages
from tests.versions.served import NAME, Served, Transport, registration_of

STEPS_BEFORE, STEPS = 25, 30
RECORDED = ("split pages", "split pages, drafts and windows")  # of other mixes tests/core/core_versions has recordings
ENGINES = ("window and full", "checkpoints and drafts", "seven groups", "what is learnt", *RECORDED)
TIERS = ("window and full", "states and full")
SPLIT = replace(
    spec_of(FULL, replace(STATE.groups[1], block_size=64), num_blocks=160),
    align=replace(STATE.align, block_size=64),
    scheduler_block_size=64,
    partial_hits=True,
    blocks_per_state=4,
)
TIERED = replace(HYBRID, tiers=(TierSpec(TierKind.HOST, 24), TierSpec(TierKind.DISK, 60)))
SERVED = {
    "one-group": ONE_GROUP,
    "hybrid": HYBRID,
    "states": STATE,
    "split-pages": SPLIT,
    "tiers": TIERED,
    "classes-left-out": spec_of(FULL, WINDOW),  # `lookup_class` is 0 of both
}


class TieredEngine(LastingEngine):
    """Its saves and moves are done at once, and are reported by the next step."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self._done: list[int] = []
        self._first: list[int] = []
        super().__init__(*given, **options)

    def step(self) -> None:
        super().step()
        spec = self.session.spec
        firsts = list(itertools.accumulate((tier.num_blocks for tier in spec.tiers), initial=spec.num_blocks))
        orders = self.log[-1].orders
        saves = zip(orders.save_job, orders.save_tier, orders.save_slot, strict=True)
        moves = zip(orders.move_job, orders.move_to_tier, orders.move_to_slot, strict=True)
        for job, tier, slot in (*saves, *moves):
            self.memory.stamps[firsts[tier] + slot] = job
            self._done.append(job)

    def _part(self) -> Part:
        part = super()._part()
        part.cache.jobs_done, self._done = self._done, []
        return part


def slots_of(spec: ReplicaSpec) -> int:
    """Return the number of blocks and slots."""
    return spec.num_blocks + sum(tier.num_blocks for tier in spec.tiers)


# -- stores ------------------------------------------------------------------------------------------------------------


def write_stores(folder: Path) -> None:
    """Write a store as SQLite, as records and logs, and sealed; and what its replicas' memory shows."""
    with tempfile.TemporaryDirectory() as scratch:
        key = Path(scratch) / "key"
        key.touch(0o600)
        key.write_text(base64.b64encode(KEY).decode())
        sqlite, plain, sealed = SqliteStore(folder / "store.db"), MemoryStore(), MemoryStore()
        memories = [_fill(sqlite), _fill(plain), _fill(sealed, store_key_file=str(key))]
    sqlite.close()
    assert memories[0] == memories[1] == memories[2]
    (folder / "memory.json").write_text(_json(memories[0]))
    (folder / "store.json").write_text(_json(content_of(plain)))
    (folder / "sealed.json").write_text(_json(content_of(sealed)))


def _fill(store: Any, **config: Any) -> dict[str, Any]:
    life, memories = ServiceLife(store, **config), {}
    for nonce, (name, spec) in enumerate(SERVED.items(), 1):
        life.registry.register(name, registration_of(spec))
        engine = _engine(InProcessTransport(lambda one: life.registry.get(one).host), name, spec, nonce)
        _run(engine)
        life.flush()
        pool = specification_of(life.registry.get(name).host.replica).coordinator
        memories[name] = {"incarnation": INCARNATION, "stamps": engine.memory.stamps, "keys": keys_of(pool)}
        engine.session.close()
        life.flush()
    return memories


def _engine(transport: Any, name: str, spec: ReplicaSpec, nonce: int, resumes: bool = False) -> TieredEngine:
    nonces = itertools.count(100 * nonce)

    def session(revive: Any) -> Session:
        first = OpenRequest(name, next(nonces), stamp_table=(0,) * slots_of(spec), incarnation=INCARNATION)
        retry = RetryPolicy(3, sleep=lambda _: None)
        return Session(transport, first, retry=retry, nonces=nonces.__next__, heartbeats=False, revive=revive)

    return TieredEngine(session, slots_of(spec), seed=nonce, resumes=resumes)


def _run(engine: TieredEngine) -> None:
    engine.run()
    for _ in range(3):  # all is executed
        engine.session.apply(Part())


def keys_of(coordinator: Any) -> list[str]:
    """Return the keys of blocks and slots, one text each."""
    pool = coordinator.pool
    keys = [(block, pool.key_of(block)) for block in range(pool.num_blocks)]
    found = [f"{block} {key[0]} {key[1]} {key[2].hex()}" for block, key in keys if key is not None]
    for tier in coordinator.tiers.each:
        found += [f"{tier.number}/{slot} {key[0]} {key[1]} {key[2].hex()}" for key, slot in tier.in_order()]
    return sorted(found)


def content_of(store: MemoryStore) -> dict[str, Any]:
    """Return what a store has: records by replica, and chunks by log."""
    logs = [
        [log.replica, log.namespace.hex(), log.incarnation, [[seq, raw.hex()] for seq, raw in sorted(chunks.items())]]
        for log, chunks in store.logs.items()
    ]
    return {"records": {name: raw.hex() for name, raw in sorted(store.records_by_name.items())}, "logs": logs}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


# -- messages and states -----------------------------------------------------------------------------------------------


def write_sessions(folder: Path) -> None:
    """Write the messages of sessions whose service restarts once; the requests that run continue."""
    for nonce, (name, spec) in enumerate(SERVED.items(), 1):
        store = MemoryStore()
        services = [Served(store, spec)]
        transport = Transport(lambda: services[-1])  # noqa: B023 - used in this turn alone
        engine = _engine(transport, NAME, spec, nonce, resumes=not spec.tiers)
        for _ in range(STEPS):
            engine.step()
        services[-1].finish()
        services.append(Served(store, spec))
        transport.messages.append(Sent("=", b"restart"))
        _run(engine)
        engine.session.close()
        services[-1].finish()
        head = [Sent("=", encode_spec(spec).SerializeToString())]
        write_messages(folder / "sessions" / f"{name}.bin", [*head, *transport.messages])


class RecordedTiers(RecordedEngine, TierEngine):
    """A random engine with tiers whose steps and results are kept."""


def write_engines(folder: Path) -> None:
    """Write states, steps and results of random engines, as messages, as those of mirrors, and as recordings."""
    for number, mix in enumerate(ENGINES):
        groups, changes = ALL_MIXES[mix]
        spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, **{"num_blocks": 24, **changes})
        _write_engine(folder, mix.replace(", ", "-").replace(" ", "-"), RecordedEngine, spec, number)
    for number, mix in enumerate(TIERS):
        groups, changes = ALL_MIXES[mix]
        tiers = (TierSpec(TierKind.HOST, 12), TierSpec(TierKind.DISK, 60))
        spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, **{**changes, "num_blocks": 60})
        with small_pools():
            name = "tiers-" + mix.replace(" ", "-")
            _write_engine(folder, name, RecordedTiers, replace(spec, tiers=tiers), 50 + number)


def _write_engine(folder: Path, name: str, kind: type[RecordedEngine], spec: ReplicaSpec, seed: int) -> None:
    rng = Random(seed)
    engine = kind(spec, rng, (states_for_drafts(spec) or 2) if "drafts" in name else 0)
    engine.deaths = 0
    for _ in range(STEPS_BEFORE):
        engine.step()
    state, before = export_state(engine.replica), engine.seq
    engine.decisions.clear()
    for _ in range(STEPS):
        engine.step()
    decisions = engine.decisions
    packed = encode_spec(spec).SerializeToString()
    messages = [Sent("=", packed), Sent("=", state)]
    for one in decisions:
        messages += [Sent(">", stream.step_message(one.step, 1 << 30)), Sent("<", stream.result_message(one.result))]
    write_messages(folder / "engines" / f"{name}.bin", messages)
    write_messages(folder / "mirrors" / f"{name}.bin", [Sent("=", packed), *_mirror(state, before, engine, decisions)])
    if name.startswith(("split", "tiers")):  # tests/core/core_versions has the others
        _write_recording(folder / "recordings" / f"{name}.log", spec, state, engine)


def _write_recording(path: Path, spec: ReplicaSpec, state: bytes, engine: RecordedEngine) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(MAGIC)
        write_frame(file, header_of(path.stem, spec))
        entries: list[Entry] = [Life(engine.epoch, (), [], 0, 1, state=state), *engine.decisions]
        for entry in entries:
            write_frame(file, message_of(entry, engine.replica.digest_size))


def _mirror(state: bytes, before: int, engine: RecordedEngine, decisions: list[Decision]) -> Iterator[Sent]:
    terms = MirrorTerms(engine.spec.commit, CORE_VERSION)
    opening = OpenRequest(NAME, 1, engine.epoch, incarnation=INCARNATION, life_nonce=9, mirror=terms)
    log = MirrorLog(1 << 20, 1 << 12)
    log.begin_image(before, iter([state]))
    yield Sent(">", stream.serialized(stream.open_message(opening)))
    while (piece := log.next_message()) is not None:
        yield Sent(">", stream.serialized(slice_message(piece.data, piece.first, piece.last)))  # type: ignore[union-attr,arg-type]
    for one in decisions:
        message = mirrored_message([Mirrored(one.step, answer_digest(one.result))], one.step.seq, 0)
        yield Sent(">", stream.serialized(message))


# -- the worker --------------------------------------------------------------------------------------------------------

BLOCKS, OWNER_EPOCH, DISKS, IDENTITY = 40, 3, 77, b"a plan of ranks!"
VERSIONS = tuple(Stamp(0, OWNER_EPOCH, slot).pack() if slot % 3 else 0 for slot in range(1, 13))
ORDERS = Orders(
    load_job=[1, 1], load_tier=[0, 1], load_slot=[2, 3], load_version=[50, 60], load_block=[4, 5], load_group=[0, 1],
    load_stamp=[70, 71],
    save_job=[2], save_block=[7], save_group=[1], save_stamp=[70], save_tier=[1], save_slot=[8],
    move_job=[3], move_tier=[0], move_slot=[1], move_version=[80], move_to_tier=[1], move_to_slot=[9],
)  # fmt: skip


def write_worker(folder: Path) -> None:
    """Write the memory that a worker and its engine share, in the middle of a step, and the index of a disk tier."""
    folder.mkdir()
    stamps = bytearray(table_bytes(BLOCKS))
    table = StampTable.create(stamps, BLOCKS, INCARNATION)
    table.name_disks(DISKS)
    table.claim(OWNER_EPOCH)
    for seq in (1, 2):
        table.begin(seq, 0)
        blocks = range(seq, BLOCKS, 2)
        table.write(blocks, [Stamp(0, OWNER_EPOCH, seq * 100 + block).pack() for block in blocks])
        table.finish(moving=True)
    table.set_executed(1)
    (folder / "stamp_table").write_bytes(stamps)
    raw = bytearray(records_bytes(BLOCKS))
    records = KeyRecords.create(raw, BLOCKS, 32)
    for block in range(1, BLOCKS, 3):
        records.write(KeyRecord(block, table.read(block), bytes([block]) * 32, block % 2, 16 * block, block + 5))
    (folder / "key_records").write_bytes(raw)
    jobs = bytearray(job_table_bytes(8))
    of_jobs = JobTable.create(jobs, 8)
    of_jobs.begin_life(OWNER_EPOCH)
    of_jobs.order(record_of(ORDERS, (OWNER_EPOCH, 2, 0), {1: 1}))
    of_jobs.end(9, True, 2)
    (folder / "job_table").write_bytes(jobs)
    write_index(folder / "disk_index", IDENTITY, Kept(OWNER_EPOCH, VERSIONS))


if __name__ == "__main__":
    target = HERE / sys.argv[1]
    assert not target.exists(), f"{target} is written already"
    target.mkdir()
    write_stores(target)
    write_sessions(target)
    write_engines(target)
    write_worker(target / "worker")
