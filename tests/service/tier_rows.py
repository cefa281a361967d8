"""What a hit needs of a model of the catalogue, where a host tier has every block of the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace

from kvplane.base.groups import NULL_BLOCK, ReplicaSpec, TierKind, TierSpec
from kvplane.base.rank_plan import RankPlan
from kvplane.base.step import Admit, News, Part, RowFlag, Step
from kvplane.v1.allocation_pb2 import RegisterReplicaRequest
from kvplane.v1.replica_pb2 import ModelSource
from kvplane_core.spec.replica import Replica
from kvplane_service.rpc.sources import plan_source
from tests.core.builders import fake_digest


@dataclass(frozen=True)
class Rows:
    """Numbers of blocks by group.

    Attributes:
        everything: blocks that the prompt has in the tier.
        needed: blocks that its hit loads.
    """

    spec: ReplicaSpec
    everything: Counter[int]
    needed: Counter[int]

    def num_bytes(self, some: Counter[int]) -> int:
        return sum(self.spec.groups[group].page_bytes * count for group, count in some.items())


def rows_of_hit(model: str, length: int, on_device: Container[str] = (), tensor_parallel: int = 1) -> Rows:
    """Admit a prompt of `length` tokens and one more.

    `on_device`: kinds of groups whose blocks the device has.
    """
    source = ModelSource(model=model, num_blocks=60_000, max_model_len=1 << 18, tensor_parallel=tensor_parallel)
    spec = plan_source(RegisterReplicaRequest(model=source)).spec
    spec = replace(spec, tiers=(TierSpec(TierKind.HOST, 200_000),), events=False)
    replica = Replica(spec)
    pool, tiers, unit = replica.coordinator.pool, replica.coordinator.tiers, spec.hash_block_size
    tiers.most_loading = spec.num_blocks
    digests = [fake_digest(number) for number in range(length // unit)]
    everything = Counter[int]()
    for number, group in enumerate(spec.groups):
        if not group.is_cached:
            continue
        size = group.block_size // unit
        for index in range(size - 1, len(digests), size):
            everything[number] += 1
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
    assert NULL_BLOCK not in result.orders.load_block
    assert length - spec.scheduler_block_size < result.admit_hit[0] <= length
    return Rows(spec, everything, Counter(result.orders.load_group))


def plan_with(model: str, length: int, num_blocks: int, tensor_parallel: int = 1) -> RankPlan:
    """The memory of one rank, with this number of blocks."""
    source = ModelSource(model=model, num_blocks=num_blocks, max_model_len=length + 1, tensor_parallel=tensor_parallel)
    (plan,) = plan_source(RegisterReplicaRequest(model=source)).plans
    return plan
