"""An engine's loop, with the block tables that its kernels read, against a service."""

from __future__ import annotations

from contextlib import closing

import kvplane
from kvplane import AdmitRow, BlockTables, End, FactRow, ModelSource, NewsRow, RunRow, part_of
from tests.client.worlds import GrpcWorld

PROMPT = list(range(1000, 1100))


def forward(tables):
    """What a model does: compute, write the pages of these blocks, sample a token."""
    return sum(map(len, tables))


def run_engine(address):
    """Two requests with one prompt, one after the other: prefill, decode, free. Hit and tables of each."""
    hits: list[int] = []
    written = []
    with kvplane.connect(address) as client:
        client.register_replica("engine-0", ModelSource(model="llama-3.1-8b", num_blocks=4096))
        with client.session("engine-0") as session:
            tables = BlockTables(len(session.spec.groups))
            for slot in (0, 1):
                rows = [NewsRow(slot, tokens=PROMPT), AdmitRow(slot)]
                for _ in range(9):
                    part = part_of(*rows)
                    answer = session.apply(part).parts[0]
                    tables.update(part, answer)
                    hits.extend(answer.admit_hit)
                    rows = [FactRow(slot, tokens=[forward(tables[slot])]), RunRow(slot)]
                written.append(tables[slot])
                session.apply(part_of(FactRow(slot, end=End.FREE)))
    return hits, written


def test_the_second_request_hits_the_prefix_of_the_first():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        hits, (first_table, second_table) = run_engine(world.service.address)
    assert hits == [0, 96]
    assert first_table == [[1, 2, 3, 4, 5, 6, 7]]
    assert second_table[0][:6] == [1, 2, 3, 4, 5, 6]
    assert len(second_table[0]) == 7
