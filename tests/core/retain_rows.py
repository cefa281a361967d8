"""Random rows of the section `retain`, of what live requests have."""

from __future__ import annotations

from random import Random

from kvplane.base.sections import Retain
from kvplane_core.face.interface import ReplicaCore
from tests.core.specification import specification_of

TICK_NS = 10  # between steps


def drawn(replica: ReplicaCore, rng: Random, seq: int) -> Retain:
    """Some prefixes of requests, released at once or soon; sometimes only what has ended ends."""
    requests, size = replica.requests, replica.spec.hash_block_size
    rows = Retain(now_ns=[seq * TICK_NS])
    for slot in requests.slots() if replica.spec.blocks_per_state == 1 else ():  # split pages take the time alone
        digests = list(requests.hashes(slot))
        if not digests or rng.random() < 0.5:
            continue
        count = min(rng.choice([len(digests), rng.randint(1, len(digests))]), replica.spec.max_model_len // size)
        rows.num_hashes.append(count)
        rows.hashes += b"".join(digests[:count])
        rows.domain.append(specification_of(replica).requests.domain[slot])
        rows.owner.append(rng.choice("ab"))
        rows.priority.append(rng.choice([0, 0, 50, 100]))
        rows.until_ns.append(seq * TICK_NS + TICK_NS * rng.choice([0, 1, 5, 20, 100]))
        rows.percent.append(rng.choice([10, 40, 100]))
    return rows
