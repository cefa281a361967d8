"""The engine loop of the README, word for word, against a service."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.client.worlds import GrpcWorld

LOOP = """\
import kvplane
from kvplane import AdmitRow, BlockTables, End, FactRow, ModelSource, NewsRow, RunRow, part_of


def forward(tables):  # your model: computes and writes the pages of these blocks, samples a token
    return 42


prompt = list(range(1000, 1100))
with kvplane.connect("127.0.0.1:7070") as client:
    client.register_replica("engine-0", ModelSource(model="llama-3.1-8b", num_blocks=4096))
    with client.session("engine-0") as session:
        tables = BlockTables(len(session.spec.groups))
        for slot in (0, 1):  # two requests with one prompt
            rows = [NewsRow(slot, tokens=prompt), AdmitRow(slot)]
            for _ in range(8):  # prefill, then decode: what happened since the last step, what shall run now
                part = part_of(*rows)
                answer = session.apply(part).parts[0]
                tables.update(part, answer)
                for hit in answer.admit_hit:
                    print(f"slot {slot}: {hit} of {len(prompt)} tokens were cached, blocks {tables[slot]}")
                rows = [FactRow(slot, tokens=[forward(tables[slot])]), RunRow(slot)]
            session.apply(part_of(FactRow(slot, end=End.FREE)))
"""


@pytest.fixture
def address():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world.service.address


def test_the_second_request_hits_what_the_first_has_computed(address, capsys):
    exec(LOOP.replace("127.0.0.1:7070", address), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "slot 0: 0 of 100 tokens were cached, blocks [[1, 2, 3, 4, 5, 6, 7]]"
    assert second.startswith("slot 1: 96 of 100 tokens were cached, blocks [[1, 2, 3, 4, 5, 6, ")
