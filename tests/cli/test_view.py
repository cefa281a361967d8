"""Reports and live views of replay and demo, without running them."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kvplane_tools.cli.replay import report
from kvplane_tools.cli.replay.demo import complaints
from kvplane_tools.cli.replay.engines import Pace
from kvplane_tools.cli.views import panels
from kvplane_tools.cli.views.samples import Pool, Sample, Trend
from kvplane_tools.replay.engine import TOO_LONG
from kvplane_tools.replay.fleet import Progress
from kvplane_tools.replay.plan import CostModel
from kvplane_tools.replay.summary import Refusal, ServiceCounts, Summary, Tally
from tests.service.replaying import SPECS

COUNTS = ServiceCounts(
    steps=10,
    admitted=3,
    ended=3,
    preempted=1,
    refused=2,
    queried_tokens=400,
    hit_tokens=100,
    granted_tokens=310,
    allocated_blocks=[20, 21],
    hit_blocks=[4, 5],
    evicted_blocks=[6, 7],
)
SAMPLE = Sample(
    model="gpt-oss-120b",
    pools=(Pool("sliding_window 128", 50, 40), Pool("full", 300, 290)),
    free_blocks=649,
    num_blocks=1000,
    counts=COUNTS,
    trend=Trend(deque((0.0, 0.5, 1.0)), steps_per_s=12.0),
    progress=Progress(read=6, completed=3, refused=0, running=2, waiting=1, steps=10, clock_ns=9_000_000_000),
)


def counted(counts: ServiceCounts) -> Tally:
    return Tally(num_groups=2, **asdict(counts))


def summary(**changes) -> Summary:
    whole = Summary(
        workload="made",
        model="gpt-oss-120b",
        spec=SPECS["sliding"],
        num_replicas=1,
        cost=CostModel(),
        requests=4,
        completed=3,
        refusals=[Refusal("r9", TOO_LONG, "5000 tokens")],
        counts=COUNTS,
        tally=counted(COUNTS),
        counts_evictions=True,
        virtual_ns=9_000_000_000,
        wall_s=2.0,
    )
    return replace(whole, **changes)


def drawn(renderable, width=120, height=40) -> str:
    page = StringIO()
    Console(file=page, width=width, height=height, force_terminal=True, color_system=None).print(renderable)
    return page.getvalue()


# ---- both counts


def test_equal_counts_of_engine_and_service_are_no_difference():
    assert summary().disagreements() == []


@pytest.mark.parametrize("name", ServiceCounts.__slots__)
def test_a_difference_in_any_counter_is_reported(name):
    value = getattr(COUNTS, name)
    other = [*value[:1], sum(value[1:]) + 1] if isinstance(value, list) else value + 1
    changed: dict[str, Any] = {name: other}
    (complaint,) = summary(counts=replace(COUNTS, **changed)).disagreements()
    assert complaint.startswith(f"{name}: the service counts {other}")


def test_evictions_are_compared_only_if_the_engine_counts_them():
    without_events = counted(replace(COUNTS, evicted_blocks=[0, 0]))
    assert summary(tally=without_events, counts_evictions=False).disagreements() == []
    assert len(summary(tally=without_events, counts_evictions=True).disagreements()) == 1


def test_a_lost_request_is_reported():
    assert summary(requests=5).disagreements() == ["3 completed and 1 refused are not 5 requests"]


def test_counts_of_replicas_are_summed():
    twice = replace(COUNTS).add(COUNTS)
    assert (twice.steps, twice.hit_blocks) == (20, [8, 10])
    assert summary(counts=twice, tally=counted(twice)).disagreements() == []


# ---- the outcome as text


def test_table_shows_the_counters_of_the_service():
    text = drawn(report.table(summary()))
    assert "sliding_window(64)/16, full_attention/16" in text
    assert "100 (25.0%)" in text
    assert "6 7" in text
    assert f"refused: {TOO_LONG}" in text


def test_refusal_lines_are_limited():
    many = [Refusal(f"r{number}", TOO_LONG, "5000 tokens") for number in range(9)]
    lines = report.refusal_lines(summary(refusals=many, requests=12))
    assert lines[0] == f"refused r0: {TOO_LONG} (5000 tokens)"
    assert lines[-1] == "refused 4 more; -o json lists all of them"
    assert report.refusal_lines(summary(refusals=[], requests=3)) == []


def test_demo_complains_about_effects_that_did_not_occur():
    assert complaints(summary()) == []
    nothing = replace(COUNTS, preempted=0)
    assert complaints(summary(counts=nothing, tally=counted(nothing))) == ["no preemption occurred"]
    assert "1 preemptions" in report.summary_lines([summary()])[0]


# ---- the live view


def test_view_layout_is_columns_stack_or_rows():
    four = [SAMPLE] * 4
    wide, tall, small = drawn(panels.View(four)), drawn(panels.View(four), 70, 60), drawn(panels.View(four), 70, 24)
    assert wide.count("╭") == tall.count("╭") == 4
    assert small.count("╭") == 0
    assert len(small.splitlines()) == 5 < len(wide.splitlines()) < len(tall.splitlines())


def test_panel_shows_pools_hits_and_losses():
    text = drawn(panels.panel(SAMPLE))
    for part in ("of 999 blocks", "sliding_window 128", "290", "100 25%", "evicted 13", "preempted 1", "12 steps/s"):
        assert part in text


def test_line_shows_the_counters_without_a_terminal():
    line = panels.line(SAMPLE)
    for part in ("gpt-oss-120b", "3 done", "pool  35% held", "hit  25%", "13 evicted 1 preempted", "12 steps/s"):
        assert part in line


def test_spark_line_rises_with_the_share_and_keeps_the_latest():
    assert panels.spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert panels.spark([0.0] * 50 + [1.0], cells=3) == "▁▁█"


def test_bar_fills_with_the_share():
    assert [panels.bar(share, 4).plain for share in (0.0, 0.5, 1.0, 1.5)] == ["░░░░", "██░░", "████", "████"]


def test_picture_references_no_external_resource():
    assert "url(" not in panels.picture([SAMPLE] * 2, "kvplane").replace("url(#", "")


# ---- trends of counters


def test_trend_computes_hit_shares_and_rate_between_samples():
    trend = Trend()
    trend.note(10.0, 100, 1000, 500)
    assert (trend.steps_per_s, list(trend.hit_shares)) == (0.0, [0.5])
    trend.note(12.0, 150, 1000, 500)
    trend.note(14.0, 200, 1400, 600)
    assert (trend.steps_per_s, list(trend.hit_shares)) == (25.0, [0.5, 0.25])


def test_trend_restarts_when_the_counters_restart():
    trend = Trend()
    trend.note(10.0, 100, 1000, 500)
    trend.note(12.0, 8, 40, 10)
    assert (trend.steps_per_s, list(trend.hit_shares)) == (4.0, [0.5, 0.25])


# ---- pace


def test_pace_limits_virtual_time_to_its_speed():
    slept: list[float] = []
    pace = Pace(4.0, now_s=lambda: 100.0, sleep=slept.append)
    pace.hold(8_000_000_000)
    assert slept == [2.0]


def test_pace_does_not_wait_when_late_or_without_a_speed():
    slept: list[float] = []
    clock = iter([0.0, 50.0])
    Pace(4.0, now_s=lambda: next(clock), sleep=slept.append).hold(8_000_000_000)
    assert slept == [0.0]
    Pace(0.0, now_s=lambda: 0.0, sleep=slept.append).hold(10**18)
    assert slept == [0.0]
