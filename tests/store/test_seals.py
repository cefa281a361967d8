"""Sealed stores: what a process without the key writes, copies or moves there is not used, and causes no wrong hit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument, LimitExceeded, Moved, NotFound
from kvplane.base.stamps import MAX_EPOCH, Stamp
from kvplane_core.face.inspect import take_snapshot
from kvplane_core.face.keys import Key
from kvplane_service.config import Config, is_store_trusted
from kvplane_service.registry import Registration
from kvplane_service.replicas.recovery import UNCLAIMED_EPOCHS, UNSTORED_EPOCHS
from kvplane_service.store.interface import StoredChunk
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import OffloadedShared
from kvplane_service.store.opening import make_store
from kvplane_service.store.record import (
    CHUNK,
    LEASE,
    MAGIC,
    NOT_PROVEN,
    REGISTRATION,
    SEAL_MAGIC,
    pack_chunk,
    unpack_chunk,
)
from kvplane_service.store.registration import pack_record, unpack_record
from kvplane_service.store.seals import SealedSharedStore, SealedStore, Seals, guarded, read_keys
from tests.client.lasting import HYBRID, PageMemory
from tests.store.contract import LOG, Blocking, SharedContract, StoreContract
from tests.store.test_ownership import Net
from tests.store.test_restart import NAME, World, inline, reopen, serve, shown
from tests.twins import weakened

OLD, NEW = b"0" * 32, b"1" * 64
A, B = list(range(100)), list(range(5000, 5100))


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    write(path, OLD)
    return str(path)


def same(store: MemoryStore) -> MemoryStore:
    return store


def write(path, *keys: bytes) -> None:
    path.write_bytes(b"\n".join(keys) + b"\n")
    path.chmod(0o600)


class TestSealedStore(SharedContract, StoreContract):
    @pytest.fixture
    def store(self, key_file):
        return Blocking(guarded(OffloadedShared(MemoryStore, inline), key_file, inline))


# -- forged content


def stored_pages(world: World) -> set[tuple[Key, int]]:
    """Each key with each page that has it."""
    replica: Any = world.life.host.replica
    return {(one.key, one.block) for one in take_snapshot(replica).keys}


def with_prompts(key_file: str, *prompts: list[int]) -> tuple[World, PageMemory]:
    """A world whose store has the keys of these prompts."""
    world, memory = World(store_key_file=key_file), PageMemory(HYBRID.num_blocks)
    session = world.session()
    for tokens in prompts:
        serve(session, memory, tokens=tokens)
    world.life.flush()
    return world, memory


def wrong_keys(world: World, memory: PageMemory, true: set[tuple[Key, int]]) -> int:
    """Restart on what the store has now, and count the keys that name a page with other content."""
    world.restart()
    reopen(world, memory)
    return len(stored_pages(world) - true)


def swap(world: World) -> None:
    """Exchange the hashes of the pages of two prompts, and seal nothing: all that a process without the key can do. The
    stamps stay true, and the checksums are right.
    """
    for log, chunks in world.store.logs.items():
        for seq, stored in chunks.items():
            entries = unpack_chunk(log, StoredChunk(seq, stored[stored.index(MAGIC) :]))
            size, digests, at = entries.digest_size, bytearray(entries.digests), 0
            for run in entries.runs:
                rows: dict[int, list[int]] = {}
                for row in range(at, at + run.count):
                    rows.setdefault(entries.num_tokens[row], []).append(row * size)
                for one, two in (pair for pair in rows.values() if len(pair) == 2):
                    digests[one : one + size], digests[two : two + size] = (
                        digests[two : two + size],
                        digests[one : one + size],
                    )
                at += run.count
            chunks[seq] = pack_chunk(log, seq, replace(entries, digests=bytes(digests))).raw


def wrong_keys_of_swapped_rows(key_file: str) -> int:
    world, memory = with_prompts(key_file, A, B)
    true = stored_pages(world)
    swap(world)
    return wrong_keys(world, memory, true)


def wrong_keys_of_copied_chunks(key_file: str) -> int:
    """Give the replica the chunks of another one of the same model, incarnation and chunk numbers, sealed with the key.
    Both memories begin with the same stamps, so these prove each row.
    """
    world, memory = with_prompts(key_file, A, B)
    true = stored_pages(world)
    other, _ = with_prompts("", B, A)
    assert set(other.store.logs) == set(world.store.logs)
    for log, chunks in other.store.logs.items():
        store = MemoryStore()
        sealed = SealedStore(OffloadedShared(partial(same, store), inline), Seals([OLD]), inline)
        asyncio.run(sealed.open())
        for seq, raw in chunks.items():
            asyncio.run(sealed.append(replace(log, replica="other"), StoredChunk(seq, raw), 0))
        (world.store.logs[log],) = store.logs.values()
    return wrong_keys(world, memory, true)


def test_rows_without_a_seal_cause_wrong_hits_in_a_trusted_store_only(key_file):
    assert wrong_keys_of_swapped_rows("") > 0
    assert wrong_keys_of_swapped_rows(key_file) == 0
    with weakened("unsealed record accepted"):
        assert wrong_keys_of_swapped_rows(key_file) > 0


def test_chunks_of_another_replica_cause_no_wrong_hit(key_file):
    assert wrong_keys_of_copied_chunks(key_file) == 0
    with weakened("record of another place accepted"):
        assert wrong_keys_of_copied_chunks(key_file) > 0


@pytest.mark.parametrize(
    "place",
    [
        (LOG, 8),
        (replace(LOG, replica="replica/1"), 7),
        (replace(LOG, namespace=b"m" * 16), 7),
        (replace(LOG, incarnation=1), 7),
    ],
    ids=["number", "replica", "namespace", "incarnation"],
)
def test_a_chunk_is_proven_in_its_place_only(place):
    seals, (log, seq) = Seals([OLD]), place
    sealed = seals.seal(CHUNK, f"{LOG} 7", b"entries")
    assert seals.prove(CHUNK, f"{LOG} 7", sealed) == b"entries"
    for kind, where in ((CHUNK, f"{log} {seq}"), (REGISTRATION, f"{LOG} 7")):
        assert seals.prove(kind, where, sealed) == NOT_PROVEN
        with weakened("record of another place accepted"):
            again = seals.seal(CHUNK, f"{LOG} 7", b"entries")
            assert (seals.prove(kind, where, again) == b"entries") == (kind == CHUNK)


def test_every_changed_bit_of_a_sealed_record_is_refused():
    seals = Seals([OLD])
    sealed = seals.seal(REGISTRATION, "r", b"body")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        assert seals.prove(REGISTRATION, "r", bytes(changed)) == NOT_PROVEN
    for length in range(len(sealed)):
        assert seals.prove(REGISTRATION, "r", sealed[:length]) == NOT_PROVEN
    assert seals.prove(REGISTRATION, "r", sealed + b"\0") == NOT_PROVEN


# -- forged epochs


def forge_row(world: World) -> None:
    """Let one row have a stamp of the last epoch."""
    (log,) = world.store.logs
    chunks = world.store.logs[log]
    for seq, stored in chunks.items():
        entries = unpack_chunk(log, StoredChunk(seq, stored))
        stamps = [Stamp(0, MAX_EPOCH, 1).pack(), *entries.stamp[1:]]
        chunks[seq] = pack_chunk(log, seq, replace(entries, stamp=stamps)).raw


def forge_record(world: World) -> None:
    record = unpack_record(world.store.records_by_name[NAME])
    world.store.records_by_name[NAME] = pack_record(replace(record, epoch=MAX_EPOCH))


@pytest.mark.parametrize("forge", [forge_row, forge_record])
def test_no_stored_epoch_uses_up_the_epochs(forge):
    world, memory = with_prompts("", A, B)
    newest = world.life.host.epoch
    forge(world)
    world.restart()
    with weakened("epoch raised by a forged row"), pytest.raises(LimitExceeded, match="epochs are used"):
        reopen(world, memory)
    opened = reopen(world, memory)
    assert newest < opened.epoch <= newest + UNCLAIMED_EPOCHS + UNSTORED_EPOCHS + 1
    assert opened.kept_keys > 0
    world.life.flush()
    world.restart()
    assert reopen(world, memory, owner_epoch=opened.epoch).epoch > opened.epoch
    assert serve(world.session(lambda: shown(memory)), memory, tokens=B) == 96
    assert unpack_record(world.store.records_by_name[NAME]).epoch < 3 * UNCLAIMED_EPOCHS


# -- forged owners


async def sealed_pair(key_file: str):
    net = Net()
    store: Any = guarded(net.awaited, key_file, inline)
    net.awaited = store
    first, second = await net.service("a:1"), await net.service("b:1")
    await first.register()
    return net, first, second


async def test_a_client_is_not_sent_to_a_forged_owner(key_file):
    net, _, second = await sealed_pair(key_file)
    with pytest.raises(Moved) as moved:
        await second.adopt()
    assert moved.value.metadata["address"] == "a:1"
    sealed = net.store.records_by_name["r"]
    forged = pack_record(replace(unpack_record(sealed[sealed.index(MAGIC) :]), owner="evil:1"))
    net.store.announce("evil:1", 60_000)
    for raw in (forged, sealed[: sealed.index(MAGIC)] + forged):
        net.store.records_by_name["r"] = raw
        with pytest.raises(NotFound):
            await second.adopt()
    net.store.records_by_name["r"] = forged
    net.store.announce("evil:1", 60_000, Seals([OLD]).seal(LEASE, "evil:1", b"alive"))
    with weakened("unsealed record accepted"), pytest.raises(Moved, match="evil:1"):
        await second.adopt()


async def test_a_forged_lease_keeps_no_dead_owner_alive(key_file):
    net, _, second = await sealed_pair(key_file)
    net.clock.now_ms += 60_000
    leases = [b"alive", Seals([NEW]).seal(LEASE, "a:1", b"alive"), Seals([OLD]).seal(LEASE, "b:1", b"alive")]
    for forged in leases:
        net.store.announce("a:1", 60_000, forged)
        assert await second.keeper.shared_store.lease("a:1") is None
    await second.adopt()
    assert second.state() is not None


async def test_the_record_of_another_replica_registers_nothing(key_file):
    net, _, second = await sealed_pair(key_file)
    net.store.records_by_name["other"] = net.store.records_by_name["r"]
    with pytest.raises(NotFound):
        await second.adopt("other")


# -- keys


def test_a_sealed_store_is_used_after_a_restart_and_has_no_record_without_a_seal(key_file):
    world, memory = with_prompts(key_file, A)
    (chunks,) = world.store.logs.values()
    stored = [*world.store.records_by_name.values(), *chunks.values()]
    assert len(stored) == 2
    assert all(raw.startswith(SEAL_MAGIC) for raw in stored)
    world.restart()
    assert serve(world.session(lambda: shown(memory)), memory, tokens=A) == 96


def test_keys_are_rotated_without_a_lost_hit(tmp_path):
    path = tmp_path / "keys"
    write(path, OLD)
    world, memory = with_prompts(str(path), A)
    for keys in ((OLD, NEW), (NEW, OLD)):
        write(path, *keys)
        world.restart()
        assert serve(world.session(lambda: shown(memory)), memory, tokens=A) == 96
        world.life.flush()
    write(path, NEW)
    assert wrong_keys(world, memory, set()) == 0, "what the old key sealed is no longer used"


def test_a_store_without_seals_is_named_and_begins_empty(key_file, caplog):
    world, memory = with_prompts("", A)
    world.config = {"store_key_file": key_file, "now_ms": 2_000_000}
    world.restart()
    assert len(world.life.registry) == 0
    assert "1 of 1 records in the store have no seal, as of a service without store_key_file: " in caplog.text
    world.life.registry.register(NAME, Registration(HYBRID))
    assert reopen(world, memory, incarnation=77).kept_keys == 0
    assert serve(world.session(lambda: shown(memory)), memory, tokens=A) == 0
    world.life.flush()
    world.restart()
    assert serve(world.session(lambda: shown(memory)), memory, tokens=A) == 96


def test_a_sealed_store_without_the_key_begins_empty(key_file, caplog):
    world, _ = with_prompts(key_file, A)
    world.restart(store_key_file="")
    assert len(world.life.registry) == 0
    assert "the record is sealed, and this service has no key: set store_key_file" in caplog.text


@pytest.mark.parametrize(
    ("keys", "mode", "words"),
    [
        ((b"0" * 31,), 0o600, "has not 1 to 15 keys of 32 to 1024 bytes"),
        ((b"0" * 1025,), 0o600, "has not 1 to 15 keys"),
        ((), 0o600, "openssl rand -hex 32 >"),
        ((OLD,) * 16, 0o600, "has not 1 to 15 keys"),
        ((b"0" * 100_000,), 0o600, "has not 1 to 15 keys"),
        ((OLD,), 0o644, "chmod 600"),
        ((OLD,), 0o660, "chmod 600"),
    ],
)
def test_unfit_keys_are_refused_with_the_remedy(keys, mode, words, tmp_path):
    path = tmp_path / "keys"
    write(path, *keys)
    path.chmod(mode)
    with pytest.raises(InvalidArgument) as refused:
        make_store(Config(store="memory", store_key_file=str(path)))
    assert refused.value.field == "store_key_file"
    assert words in str(refused.value)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(NotFound, match="cannot be read"):
        make_store(Config(store="memory", store_key_file=str(tmp_path / "none")))


def test_a_group_may_read_the_keys(tmp_path):
    """As of a Secret in a pod of Kubernetes."""
    path = tmp_path / "keys"
    write(path, OLD, b"", NEW)
    path.chmod(0o440)
    assert read_keys(path) == [OLD, NEW]
    assert isinstance(make_store(Config(store="memory", store_key_file=str(path))), SealedSharedStore)


def test_a_store_without_a_key_is_trusted():
    assert is_store_trusted(Config(store="sqlite:x"))
    assert not is_store_trusted(Config(store="sqlite:x", store_key_file="keys"))
    assert not is_store_trusted(Config(store="memory"))
