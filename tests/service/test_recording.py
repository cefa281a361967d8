"""Recordings: a replay decides the same bit for bit, and computes what another pool would have decided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import (
    Admit,
    Cache,
    CacheEvent,
    EventKind,
    Facts,
    News,
    Part,
    PartResult,
    RemoveReason,
    RowFlag,
    Run,
    StepResult,
)
from kvplane.blocking.session import Session
from kvplane.session.rows import AdmitRow, NewsRow, part_of
from kvplane.v1.admin_pb2 import RecordedLife, RecordResponse
from kvplane_service.config import Config
from kvplane_service.decisions.log import Decision
from kvplane_service.decisions.recording import MAGIC, Frames, header_of, message_of, result_digest, write_frame
from kvplane_service.decisions.text import operation_lines
from kvplane_service.explain.history import NOW
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.host import ReplicaHost
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.from_log import Outcome, replay_log
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.pools import PoolHits, curve_of, pool_hits
from kvplane_tools.replay.recorded import Recorded
from kvplane_tools.replay.workloads import ChatShape, chat_workload
from tests.core.builders import full, replica_spec
from tests.core.image import image_of
from tests.core.specification import specification_of
from tests.service.hosts import HostWorld, history_of
from tests.service.inprocess import InProcessTransport
from tests.service.replaying import BUDGET, COST, SPECS

SHAPE = ChatShape(max_model_len=1024, num_sessions=12, sessions_per_s=5.0)
FULL = replica_spec(full(), max_in_flight_tokens=64)
FIRST_VERSION = Path(__file__).parent / "recordings" / "version-1-states.log"
POOLS = {"full": 50, "sliding": 80, "seven groups": 260, "mamba": 40}


def drive(spec: ReplicaSpec) -> ReplicaHost:
    """Chats and agents by a true engine, in a pool that is too small for them; two engine lives."""
    host = new_host(spec)
    for seed in (1, 2):
        drive_more(host, seed)
    return host


def new_host(spec: ReplicaSpec) -> ReplicaHost:
    registry = Registry(Config(decision_log_steps=1 << 20, log_bytes=1 << 36), lambda: 0)
    return registry.register("r", Registration(spec)).host


def drive_more(host: ReplicaHost, seed: int, shape: ChatShape = SHAPE, count: int = 25) -> None:
    """One engine life."""
    trace = [request for request, _ in zip(chat_workload(Random(seed), shape), range(count), strict=False)]
    session = Session(InProcessTransport(lambda _: host), OpenRequest("r", nonce=seed), heartbeats=False)
    fleet = Fleet([Engine(session, EngineConfig(max_running=16, token_budget=BUDGET), COST)], trace)
    while fleet.run_step():
        pass
    session.close()


def record(host: ReplicaHost, path: Path) -> Path:
    with path.open("wb") as file:
        file.write(MAGIC)
        write_frame(file, header_of(host.name, host.replica.spec))
        for entry in host.decisions:
            write_frame(file, message_of(entry, host.scheme.digest.size))
    return path


@pytest.fixture(scope="module", params=POOLS)
def recorded(request, tmp_path_factory) -> tuple[ReplicaHost, Path]:
    spec = replace(SPECS[request.param], num_blocks=POOLS[request.param])
    host = drive(spec)
    return host, record(host, tmp_path_factory.mktemp("log") / "file")


def test_recording_replays_bit_for_bit(recorded):
    host, path = recorded
    outcome = replay_log(path)
    assert outcome.decisions > 100
    assert (outcome.identical, outcome.first_difference) == (outcome.decisions, "")
    counters = host.replica.counters
    assert counters.preempted + counters.refused > 0
    assert counters.hit_tokens > 0
    for name in ("steps", "admitted", "preempted", "queried_tokens", "hit_tokens", "granted_tokens"):
        assert outcome.counts[name] == getattr(counters, name)


def test_curve_is_what_engines_of_the_same_requests_hit_in_each_pool(recorded):
    """The engine that was recorded runs the same two traces in each size."""
    host, path = recorded
    curve = list(curve_of(path, 1000))[-1]
    assert [one.num_blocks / curve.real.num_blocks for one in curve.pools if not one.error][-3:] == [1, 2, 4]
    counters = host.replica.counters
    assert curve.real.counts["hit_tokens"] == counters.hit_tokens
    for one in curve.pools:
        if not one.error:
            other = drive(replace(host.replica.spec, num_blocks=one.num_blocks)).replica.counters
            assert one.share == pytest.approx(other.hit_tokens / other.queried_tokens, abs=0.03)


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_requests_that_waited_to_be_announced_arrive_when_they_did(name, tmp_path):
    """A queue longer than what one step announces: a larger pool admits what the recorded one let wait."""
    shape = replace(SHAPE, num_sessions=60, sessions_per_s=200.0)
    spec = replace(SPECS[name], num_blocks=POOLS[name])
    larger = replace(spec, num_blocks=4 * spec.num_blocks)

    def host_of(spec: ReplicaSpec) -> ReplicaHost:
        host = new_host(spec)
        drive_more(host, 5, shape, 80)
        return host

    path = record(host_of(spec), tmp_path / "file")
    counters = host_of(larger).replica.counters
    share = counters.hit_tokens / counters.queried_tokens
    assert in_pool(path, larger.num_blocks).share == pytest.approx(share, abs=0.01)
    frames = list(Frames(path))
    for frame in frames:
        for part in frame.decision.step.parts if frame.HasField("decision") else ():
            part.news.ClearField("waited")
    without = in_pool(write(tmp_path / "other", frames), larger.num_blocks).share
    assert without != pytest.approx(share, abs=0.02), "the fault is not found"


def test_curve_of_the_last_requests_fills_the_pools_with_the_first_half(recorded):
    host, path = recorded
    curve = list(curve_of(path, 20))[-1]
    assert curve.num_requests == 10
    assert 0 < curve.real.counts["queried_tokens"] < host.replica.counters.queried_tokens


def test_requests_of_a_recording_in_another_pool(recorded):
    host, path = recorded
    small, large = replay_log(path), in_pool(path, host.replica.spec.num_blocks * 20)
    assert large.counts["preempted"] == large.counts["refused"] == large.never_fits == 0
    assert large.share > share(small)


def in_pool(path: Path, num_blocks: int) -> PoolHits:
    """Run the requests of a recording in a pool of this size."""
    recorded = Recorded(CostModel())
    spec = replay_log(path, recorded).spec
    return pool_hits(replace(spec, num_blocks=num_blocks), recorded)


def test_recording_from_now_counts_what_is_in_it(tmp_path):
    """A recording that begins with the state of a replica in use: totals of the recording, and a curve."""
    host = drive(replace(SPECS["full"], num_blocks=60))
    before = host.replica.counters.queried_tokens
    state = b"".join(host.replica.image())
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(MAGIC)
        write_frame(file, header_of("r", host.replica.spec))
        life = RecordedLife(epoch=host.epoch, state=state)
        write_frame(file, RecordResponse(life=life))
        first = len(list(host.decisions))
        drive_more(host, 3)
        for entry in list(host.decisions)[first:]:
            write_frame(file, message_of(entry, host.scheme.digest.size))
    outcome = replay_log(path)
    assert outcome.from_now
    assert outcome.identical == outcome.decisions > 0
    assert outcome.counts["queried_tokens"] == host.replica.counters.queried_tokens - before
    curve = list(curve_of(path, 1000))[-1]
    assert 0 < curve.real.share < 1
    at_size = next(one for one in curve.pools if one.num_blocks == 60)
    assert at_size.share == pytest.approx(curve.real.share, abs=0.1)


def test_resumed_requests_are_replayed_and_readmitted_in_another_pool(tmp_path):
    world = HostWorld(Config(), replace(FULL, num_blocks=40))
    news = News(slot=[0], num_tokens=[9], tokens=[7] * 9, request_id=["a"])
    engine = world.open()
    engine.step(Part(news=news, admit=Admit(slot=[0])))
    engine.step()
    resume = image_of(specification_of(world.host.replica)).resume
    engine = world.open(stamp_table=tuple(specification_of(world.host.replica).coordinator.pool.stamp))
    engine.step(Part(news=news))
    engine.step(Part(resume=resume))
    engine.step(Part(facts=Facts(slot=[0], appended=[1], tokens=[8]), run=Run(slot=[0])))
    path = record(world.host, tmp_path / "file")
    again, larger = replay_log(path), in_pool(path, 80)
    assert again.identical == again.decisions == 5
    assert again.counts["admitted"] == 1
    assert larger.counts["admitted"] == 2  # it was announced twice
    history = history_of(world.host)
    assert [(one.name, one.computed_at(NOW)) for one in history.admitted(NOW)] == [("a", 9), ("a", 9)]
    (resumed,) = [entry for entry in world.host.decisions if isinstance(entry, Decision) and entry.step.parts[0].resume]
    assert "resumed slot 0: 9 tokens computed" in list(operation_lines(resumed.step, resumed.result))


def test_recording_replays_busy_blocks_of_earlier_engine_lives(tmp_path):
    """Those that the core knows of, those that were named, and that new memory has none."""
    world = HostWorld(Config(), replace(FULL, num_blocks=40))
    late = part_of(NewsRow(0, range(9)), AdmitRow(0, cap=0, external=8, flags=RowFlag.DELAY_CACHING))
    world.open(incarnation=5).step(late)
    engine = world.open(incarnation=5, busy_blocks=(9, 17))
    assert engine.opened.busy_blocks == (1, 2, 9, 17)
    engine.step(late)
    engine.step(Part(cache=Cache(loads_over=[2, 9])))
    engine = world.open(incarnation=6, busy_blocks=(20,))
    assert engine.opened.busy_blocks == (20,)
    engine.step(late)
    engine.step(Part(cache=Cache(loads_over=[20])))
    path = record(world.host, tmp_path / "file")
    again = replay_log(path)
    assert (again.decisions, again.identical) == (5, 5)
    assert in_pool(path, 80).counts["admitted"] == 3


def test_recording_reports_a_request_too_large_for_the_pool_once(tmp_path):
    path = record(drive(replace(SPECS["full"], num_blocks=60)), tmp_path / "file")
    was, tiny, some = replay_log(path), in_pool(path, 2), in_pool(path, 30)
    assert was.counts["never_fits"] == 0
    assert tiny.counts["admitted"] == 0 < some.counts["admitted"]
    assert 0 < some.never_fits < tiny.never_fits <= was.counts["ended"]


def share(outcome: Outcome) -> float:
    return outcome.counts["hit_tokens"] / outcome.counts["queried_tokens"]


def test_recording_replay_names_a_difference(recorded, tmp_path):
    _, path = recorded
    frames = list(Frames(path))
    at = next(i for i, frame in enumerate(frames) if frame.HasField("decision") and frame.decision.step.seq == 7)
    frames[at].decision.result_digest = bytes(32)
    outcome = replay_log(write(tmp_path / "other", frames))
    assert outcome.identical == outcome.decisions - 1
    assert outcome.first_difference == "2/7"


def write(path: Path, frames: list[RecordResponse]) -> Path:
    with path.open("wb") as file:
        file.write(MAGIC)
        for frame in frames:
            write_frame(file, frame)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return record(drive(replace(SPECS["full"], num_blocks=60)), tmp_path / "file")


def test_truncated_recording_ends_with_its_last_whole_frame(path):
    whole = replay_log(path)
    path.write_bytes(path.read_bytes()[:-5])
    cut = replay_log(path)
    assert (cut.decisions, cut.identical) == (whole.decisions - 1, whole.decisions - 1)
    assert (whole.is_cut, cut.is_cut) == (False, True)


def test_damaged_recording_is_refused(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(InvalidArgument, match="damaged at byte") as caught:
        replay_log(path)
    assert caught.value.field == "--log"


@pytest.mark.parametrize(
    ("raw", "match", "remedy"),
    [
        (b"kvplane decisions 9\n", "a recording of version 9", "this kvplane reads versions up to 2"),
        (b'{"a": "trace"}', "is not a recording", "kvplane record"),
        (b"", "is not a recording", "kvplane record"),
        (MAGIC, "does not begin with the header", "record it again"),
    ],
)
def test_recording_file_of_another_kind_is_refused(tmp_path, raw, match, remedy):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(InvalidArgument, match=match) as caught:
        replay_log(tmp_path / "file")
    assert remedy in caught.value.remedy


def test_recording_of_version_1_replays_bit_for_bit():
    """Its rows are aligned by bit 1 of their flags alone, which was drawn at random by an engine of that time."""
    outcome = replay_log(FIRST_VERSION)
    assert (outcome.decisions, outcome.identical) == (53, 53)


def test_recording_of_version_1_read_as_version_2_differs(monkeypatch):
    monkeypatch.setattr("kvplane_service.decisions.recording._ALIGNED_BY_DEFAULT", 0)
    assert replay_log(FIRST_VERSION).identical < 53


def test_recording_digest_excludes_moves():
    """Recordings of versions without moves decide the same."""
    stored = CacheEvent(EventKind.STORED, 0, (b"a" * 16,), (1,))
    gone = CacheEvent(EventKind.REMOVED, 0, (b"a" * 16,), (1,), reason=RemoveReason.MOVED)
    moved = [gone, replace(stored, blocks=(2,))]
    result = StepResult(1, 0, [PartResult()])
    assert result_digest(result, ([stored, *moved, stored],)) == result_digest(result, ([stored, stored],))
    assert result_digest(result, ([stored, *moved],)) != result_digest(result, ([moved[1], *moved],))


def test_missing_recording_is_refused_by_name(tmp_path):
    with pytest.raises(NotFound, match="No such file"):
        replay_log(tmp_path / "nowhere")
