"""Which rows a hit on a tier loads, in bytes, for models of the catalogue: only what each kind of attention reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.groups import NULL_BLOCK, TierKind, TierSpec
from kvplane.base.step import Admit, News, Part, RowFlag, Step
from kvplane.v1.allocation_pb2 import RegisterReplicaRequest
from kvplane.v1.replica_pb2 import ModelSource
from kvplane_service.core.replica import Replica
from kvplane_service.core.setup import is_cached
from kvplane_service.rpc.sources import plan_source
from tests.core.builders import fake_digest

MIB = 1 << 20
LENGTHS = (4096, 16384, 32768, 131072)
# MiB that every block of every group has, and that the hit loads, by length of the hit.
BYTES: dict[str, list[tuple[float, float]]] = {
    "gpt-oss-20b": [(192, 99), (768, 387), (1536, 771), (6144, 3075)],
    "gpt-oss-120b": [(288, 148.5), (1152, 580.5), (2304, 1156.5), (9216, 4612.5)],
    "gemma-3-27b": [(1984, 736), (7936, 1696), (15872, 2976), (63488, 10656)],
    "llama-4-scout": [(768, 768), (3072, 768), (6144, 1536), (24576, 6144)],
    "qwen3-next-80b": [(357, 127.5), (1530, 420.75), (3060, 803.25), (12240, 3098.25)],
    "jamba-v0.1": [(510, 72.5), (2040, 263.75), (4090, 520), (16380, 2056.25)],
}


def loaded(model, length, on_device=()):
    """MiB of all blocks, and of the rows that an admission loads, with a hit of about `length` tokens in the host tier.

    `on_device`: kinds of groups whose blocks the device has.
    """
    source = ModelSource(model=model, num_blocks=60_000, max_model_len=1 << 18)
    spec = plan_source(RegisterReplicaRequest(model=source)).spec
    spec = replace(spec, tiers=(TierSpec(TierKind.HOST, 200_000),), events=False)
    replica = Replica(spec)
    pool, tiers, unit = replica.coordinator.pool, replica.coordinator.tiers, spec.hash_block_size
    tiers.most_loading = spec.num_blocks
    digests = [fake_digest(number) for number in range(length // unit)]
    everything = 0
    for number, group in enumerate(spec.groups):
        if not is_cached(group):
            continue
        size = group.block_size // unit
        for index in range(size - 1, len(digests), size):
            everything += group.page_bytes
            key, num_tokens = ("", number, digests[index]), (index + 1) * unit
            if group.kind.value in on_device:
                (block,) = pool.take(1)
                pool.register(block, key, num_tokens)
                pool.release([block])
            else:
                slot = tiers.each[0].take_slot()
                assert slot is not None
                tiers.each[0].store(key, slot, tiers.next_job())
    news = News([0], [length + 1], num_hashes=[len(digests)], hashes=b"".join(digests))
    part = Part(news=news, admit=Admit([0], flags=[int(RowFlag.LOAD)]))
    (result,) = replica.apply(Step(0, 1, [part])).parts
    orders = result.orders
    assert NULL_BLOCK not in orders.load_block
    assert length - spec.scheduler_block_size < result.admit_hit[0] <= length
    return everything / MIB, sum(spec.groups[group].page_bytes for group in orders.load_group) / MIB


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("model", BYTES)
def test_a_hit_loads_the_rows_that_it_needs(model, length):
    assert loaded(model, length) == BYTES[model][LENGTHS.index(length)]


def test_a_chunk_that_is_not_full_is_loaded():
    everything, some = loaded("llama-4-scout", 24_560)
    assert everything / some == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("model", "mib"), [("gpt-oss-20b", 3), ("gpt-oss-120b", 4.5), ("gemma-3-27b", 416)])
def test_where_only_windows_left_the_device_only_windows_are_loaded(model, mib):
    assert loaded(model, 131_072, on_device=("full_attention",))[1] == mib


def test_where_only_states_left_the_device_only_one_per_group_is_loaded():
    assert loaded("qwen3-next-80b", 131_072, on_device=("full_attention",))[1] == 38.25
