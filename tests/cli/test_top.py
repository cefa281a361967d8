"""`kvplane top`: the table of all replicas, its order and filter, and the screen of one replica."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import cast

import pytest
from rich.text import Text
from textual.widgets import DataTable, Input, Static

from kvplane import AdmitRow, Allocate, Budget, Commit, Content, NewsRow, RunRow, connect, part_of
from kvplane.sansio.retry import RetryPolicy
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.allocation_pb2 import ReplicaState
from kvplane_service.config import Config
from kvplane_tools.cli.views.fleet import COLUMNS, MAX_DESCRIBED, TITLES, Fleet, Order, order_of
from kvplane_tools.cli.views.samples import Trend
from kvplane_tools.cli.views.top_app import ReplicaScreen, Top
from kvplane_tools.cli.views.top_panels import panel
from tests.cli.test_view import drawn
from tests.core.test_split import split_spec
from tests.service.hosts import spec_of
from tests.service.rig import SPEC, running

NUM_REPLICAS = 500


@pytest.fixture(scope="module")
def service():
    """500 replicas; r007 has a live session with a request."""
    with running(Config(listen="127.0.0.1:0", max_replicas=600)) as service, connect(service.address) as client:
        for number in range(NUM_REPLICAS):
            service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica=f"r{number:03}", spec=SPEC))
        with client.session("r007") as session:
            session.apply(part_of(NewsRow(0, tokens=[11] * 40, request_id="first"), AdmitRow(0)))
            yield service


def names(app: Top) -> list[str]:
    return [str(row.key.value) for row in app.screen.query_one(DataTable).ordered_rows]


async def until(pilot, condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await pilot.pause(0.02)


def test_top_once_prints_a_sorted_and_filtered_table(service, kvplane):
    def table(*words: str) -> list[list[str]]:
        code, out, errors = kvplane("top", "--once", "--service", service.address, *words)
        assert (code, errors) == (0, "")
        return [line.split() for line in out.splitlines()]

    lines = table()
    assert len(lines) == NUM_REPLICAS + 1
    assert lines[0] == [column.title for column in COLUMNS]
    assert {line[TITLES.index("steps/s")] for line in lines[1:]} == {"0"}, "a rate is known from two samples"
    assert [line[0] for line in lines[1:4]] == ["r000", "r001", "r002"]
    assert table("--sort", "running")[1][:2] == ["r007", "live"]
    assert table("--sort", "-held")[-1][0] == "r007"
    assert [line[0] for line in table("--filter", "LIVE")[1:]] == ["r007"]
    assert [line[0] for line in table("--filter", "r49")[1:]] == [f"r49{digit}" for digit in range(10)]
    code, _, errors = kvplane("top", "--once", "--sort", "size", "--service", service.address)
    assert code == 2
    assert "--sort: 'size' is no column (use one of replica, state, " in errors


def test_top_without_a_terminal_names_once(service, kvplane):
    code, out, errors = kvplane("top", "--service", service.address)
    assert (code, out) == (2, "")
    assert errors == "kvplane: kvplane top: there is no terminal to draw on (give --once, which prints the table)\n"


def test_top_of_a_service_without_replicas(kvplane):
    with running() as service:
        assert kvplane("top", "--once", "--service", service.address)[1] == "no replica is registered\n"


def test_a_sample_describes_what_is_on_the_screen_and_the_others_in_turn(service):
    with connect(service.address) as client:
        fleet = Fleet(client)
        first = ["r490", "r007"]
        rows = fleet.sample(1.0, first)
        known = {row.summary.replica for row in rows if row.details is not None}
        assert len(known) == MAX_DESCRIBED
        assert known >= set(first)
        samples = 1
        while any(row.details is None for row in rows):
            rows = fleet.sample(1.0 + samples, first)
            samples += 1
        assert samples <= -(-NUM_REPLICAS // (MAX_DESCRIBED - len(first))) + 1
        ordered = order_of("running", "").apply(rows)
        assert ordered[0].summary.replica == "r007"
        assert ordered[0].hit_share == 0.0


def test_once_has_rates_also_as_json(service, kvplane):
    once = ("top", "--once", "--interval", "100ms", "--service", service.address)
    code, out, _ = kvplane(*once, "-o", "json")
    assert code == 0
    rows = json.loads(out)["replicas"]
    assert rows
    assert all(row["steps/s"] == 0 for row in rows)
    assert kvplane(*once, "-o", "name")[1].split() == [row["replica"] for row in rows]


def test_rows_without_a_value_are_last_in_both_directions(service):
    with connect(service.address) as client:
        rows = Fleet(client).sample(1.0, ["r007", "r008"], most=2)
    for descending in (False, True):
        ordered = Order(order_of("preempted", "").column, descending).apply(rows)
        assert {row.summary.replica for row in ordered[:2]} == {"r007", "r008"}


def test_describe_and_top_show_the_blocks_that_no_state_can_take(kvplane):
    with running() as service, connect(service.address) as client:
        client.register_replica("split", split_spec(6))
        with client.session("split") as session:
            session.apply(part_of(NewsRow(0, tokens=[11] * 10), AdmitRow(0), budget=Budget(8)))
            session.apply(part_of(RunRow(0), budget=Budget(8)))
            code, out, _ = kvplane("describe", "split", "--service", service.address)
            shown = drawn(panel(client.describe_replica("split"), Trend()))
    slack = "slack: 3 free blocks (15.0%) of superblocks in use, where no state fits"
    assert code == 0
    assert "pool: 13 of 20 blocks held by 1 running request" in out
    assert slack in out
    assert slack.replace(":", "") in shown


def test_describe_and_top_show_what_is_retained(kvplane):
    with running() as service, connect(service.address) as client:
        client.register_replica("r", spec_of(41))
        prompt = Content(token_ids=[11] * 65)
        client.allocate_slots("r", Allocate("one", prompt))
        client.commit_blocks("r", Commit("one"))
        before = drawn(panel(client.describe_replica("r"), Trend()))
        kept = client.retain("r", prompt, ttl_s=60)
        code, out, _ = kvplane("describe", "r", "--service", service.address)
        shown = drawn(panel(client.describe_replica("r"), Trend()))
    line = f"1 prefix, {kept.retained_blocks} blocks"
    assert kept.retained_blocks > 0
    assert code == 0
    assert f"retained: {line}; 1 retained" in out
    assert f"retained {line}" in shown
    assert "retained" not in before


async def test_top_sorts_filters_and_shows_one_of_500_replicas(service):
    with connect(service.address) as client:
        app = Top(client, service.address, 0.2)
        async with app.run_test(size=(110, 30)) as pilot:
            await until(pilot, lambda: len(names(app)) == NUM_REPLICAS)
            assert names(app)[:2] == ["r000", "r001"]
            await pilot.press("down", "down", "s", "r")  # by state, live after idle; then the other way round
            await until(pilot, lambda: names(app)[0] == "r007")
            assert names(app)[app.query_one(DataTable).cursor_row] == "r002"
            await pilot.press("slash", *"r00")
            await until(pilot, lambda: len(names(app)) == 10)
            assert "10 of 500 replicas shown: 499 idle, 1 live" in str(app.query_one("#error", Static).render())
            await pilot.press("enter", "ctrl+home", "enter")
            await until(pilot, lambda: isinstance(app.screen, ReplicaScreen))
            await until(pilot, lambda: "first" in app.picture())
            shown = app.picture()
            assert "sliding_window" in shown
            assert "@font-face" not in shown  # which a viewer would load from the network
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, ReplicaScreen))
            await pilot.press("escape")
            await until(pilot, lambda: len(names(app)) == NUM_REPLICAS)
            assert app.query_one("#filter", Input).value == ""
            before = app.num_samples
            await until(pilot, lambda: app.num_samples > before + 1)
            assert "kvplane&#160;top" in app.picture()
            await pilot.press("p", "q")


def test_panel_shows_a_replica_in_every_state(service):
    answer = service.describe("r007")
    for number in ReplicaState.values():
        answer.state = cast(ReplicaState, number)
        text, state = drawn(panel(answer, Trend())), ReplicaState.Name(answer.state)
        assert f"r007 {state.removeprefix('REPLICA_STATE_').lower()} " in text


def test_top_picture_needs_no_terminal(service, kvplane, monkeypatch, tmp_path):
    monkeypatch.setattr("kvplane_tools.cli.views.top_app.PICTURE_SAMPLES", 2)
    words = ("--interval", "0.1", "--svg", str(tmp_path / "top.svg"), "--service", service.address)
    assert kvplane("top", *words)[0] == 0
    assert "r000" in (tmp_path / "top.svg").read_text()


async def test_top_shows_an_unreachable_service():
    with connect("127.0.0.1:1", retry=RetryPolicy(attempts=1)) as client:
        app = Top(client, "127.0.0.1:1", 0.1)
        async with app.run_test() as pilot:
            error = app.query_one("#error", Static)
            await until(pilot, lambda: "127.0.0.1:1" in str(error.render()))
            app._show_error("errors resolving [field:x][/y]")  # is text, not markup
            assert str(error.render()) == "errors resolving [field:x][/y]"


class Slow(Top):
    """Its samples end when `go` is set."""

    def __init__(self, client, service):
        super().__init__(client, service, 0.05)
        self.begun, self.go = threading.Event(), threading.Event()
        sample = self._fleet.sample

        def slow(*args):
            self.begun.set()
            assert self.go.wait(60)
            return sample(*args)

        self._fleet.sample = slow  # type: ignore[method-assign]


async def test_a_sample_that_ends_behind_another_screen_is_shown(service):
    with connect(service.address) as client:
        app = Slow(client, service.address)
        async with app.run_test(size=(110, 30)) as pilot:
            app.go.set()
            await until(pilot, lambda: len(names(app)) == NUM_REPLICAS)
            app.go.clear()
            app.begun.clear()
            await until(pilot, app.begun.is_set)
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, ReplicaScreen))
            before = app.num_samples
            app.go.set()
            await until(pilot, lambda: app.num_samples > before)


@pytest.mark.parametrize("is_failed", [False, True])
async def test_a_sample_that_ends_after_the_program_is_left(service, is_failed):
    address = "127.0.0.1:1" if is_failed else service.address
    with connect(address, retry=RetryPolicy(attempts=1)) as client:
        app = Slow(client, address)
        async with app.run_test() as pilot:
            await until(pilot, app.begun.is_set)
            screens = app._close_all

            async def close():
                await screens()
                app.go.set()
                await asyncio.sleep(0.5)

            app._close_all = close  # type: ignore[method-assign]


async def test_a_sample_that_ends_after_its_screen_is_left(service):
    with connect(service.address) as client:
        app = Top(client, service.address, 0.05)
        async with app.run_test() as pilot:
            await until(pilot, lambda: len(names(app)) == NUM_REPLICAS)
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, ReplicaScreen))
            screen = cast(ReplicaScreen, app.screen)
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is not screen)
            screen._show(Text("late"))
