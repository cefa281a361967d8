"""The machinery of the live run, with the core in the reference's place: what differs is found, shrunk and kept."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tests.conformance.divergence import Divergence
from tests.conformance.header import read_records
from tests.conformance.live import session
from tests.conformance.live.driver import AnswerEach, Driver
from tests.conformance.live.generator import Generator
from tests.conformance.live.intents import Admit, Look
from tests.conformance.live.kinds import KINDS, Habits, draw_header
from tests.conformance.live.shrink import shrink
from tests.conformance.operations import OPERATIONS
from tests.conformance.replay import replay_file

TRACES = Path(__file__).parents[1] / "traces"
HABITS = Habits(in_flight=1, drafts=2, lookahead=2, external=0.2)
LEFT_OUT_WHEN_EMPTY = {"ev", "copies", "retained", "zero"}


class OutputRecorder(AnswerEach):
    """Records the outputs of the core instead of comparing them."""

    def _compare(self, pending, results):
        outputs = json.loads(json.dumps(self._outputs(pending, results)))
        kept = {name: value for name, value in outputs.items() if value or name not in LEFT_OUT_WHEN_EMPTY}
        self.answer = pending.op | kept


class Mirror:
    """A peer that answers as the core does, except for the planted fault."""

    def __init__(self, plant=lambda record: record):
        self._plant = plant
        self._core: OutputRecorder

    def ask(self, record):
        if "op" not in record:
            self._core = OutputRecorder(record)
            return record
        unanswered = dict.fromkeys(OPERATIONS[record["op"]].outputs)
        self._core.replay(0, record | unanswered)
        return self._plant(self._core.answer)


def recorded_header(name):
    return next(read_records(TRACES / f"{name}.jsonl.gz"))


def drive(peer, header, operations=300):
    """The driver, the intents, and how it ended."""
    driver, done = Driver(peer.ask(header), peer), []
    for intent in Generator(Random("a seed"), driver, HABITS).intents():
        done.append(intent)
        try:
            driver.perform(intent)
        except Divergence as error:
            return driver, done, error
        if len(driver.records) >= operations:
            break
    return driver, done, None


HEADERS = ["gpt-oss-b90-s21", "mamba64-align-fine16-b300-s67", "llama-full-spec-b150-s4"]


@pytest.mark.parametrize("name", HEADERS)
def test_live_run_of_equal_sides_has_no_difference(name):
    driver, _, error = drive(Mirror(), recorded_header(name))
    assert error is None
    assert driver.replayer.values > 700
    assert {record["op"] for record in driver.records} >= {"step", "new", "lookup", "alloc", "tok", "cache", "free"}


def one_free_block_too_few(record):
    """The fault: the reference seems to have one free block less after a preemption."""
    return record | {"free": record["free"] - 1} if record["op"] == "preempt" else record


def test_live_run_finds_shrinks_and_saves_a_difference(tmp_path):
    peer, header = Mirror(one_free_block_too_few), recorded_header("gpt-oss-b90-s21")
    _, done, error = drive(peer, header)
    assert error is not None
    assert (error.op["op"], error.name) == ("preempt", "free")
    shortest, driver, again = shrink(peer, header, done, error)
    assert (again.op["op"], again.name) == ("preempt", "free")
    assert len(done) > 20 > len(shortest)
    assert sum(isinstance(one, Admit) for one in shortest) <= 2
    path = tmp_path / "kept.jsonl.gz"
    session.write_scenario(path, driver)
    with pytest.raises(Divergence) as caught:
        replay_file(path)
    assert (caught.value.op, caught.value.name) == (again.op, "free")


def test_live_run_without_a_difference_is_saved_and_replays_equal(tmp_path, monkeypatch):
    header = recorded_header(HEADERS[0])
    monkeypatch.setattr(session, "draw_header", lambda kind, seed: (header, HABITS))
    tally = session.run_seed(Mirror(), "a-kind", 3, 60, tmp_path / "kept")
    assert tally.sound
    assert replay_file(tmp_path / "kept" / "a-kind-s3.jsonl.gz").values == tally.values


def test_live_run_reports_a_crash_of_the_core_as_a_difference(monkeypatch):
    driver, _, _ = drive(Mirror(), recorded_header(HEADERS[0]), operations=10)

    def crash(number, op):
        raise AssertionError("references")

    monkeypatch.setattr(driver.replayer, "replay", crash)
    with pytest.raises(Divergence, match="references"):
        driver.perform(Look())


@pytest.mark.parametrize("kind", KINDS)
def test_live_run_draws_equal_configurations_from_equal_seeds(kind):
    assert draw_header(kind, 3) == draw_header(kind, 3)
    assert draw_header(kind, 3) != draw_header(kind, 4)


@pytest.mark.parametrize(
    ("hit", "row", "name", "named"),
    [
        (16, [0, 0, 0, 0], "hit", True),  # token 16 attends to 12 to 15, which are in block 3
        (16, [0, 0, 0, 0], "blk", True),
        (16, [0, 0, 0, 9], "hit", False),
        (12, [0, 0, 0], "hit", False),  # it begins a chunk
        (16, [0, 0, 0, 0], "free", False),
    ],
)
def test_only_hits_that_lack_blocks_of_their_chunk_are_a_named_difference(hit, row, name, named):
    full, uneven, even = ({"block_size": 4, "attention_chunk_size": chunk} for chunk in (None, 6, 8))
    found = Divergence(1, {"op": "lookup", "hit": hit, "blk": [[1, 2, 3, 4], row]}, name, hit, 0)
    assert session.lacks_its_chunk({"groups": [full, uneven]}, found) is named
    assert not session.lacks_its_chunk({"groups": [full, even]}, found)
