"""The status page on the metrics port: its API by HTTP, and the page in a real Chromium."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import socket
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvplane import AdmitRow, Content, FactRow, NewsRow, connect, part_of
from kvplane.base.requests import Allocate
from kvplane.base.step import End
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.gate import Call
from kvplane_service.config import Config
from kvplane_service.replicas import recent
from kvplane_service.rpc import prices, status_page
from kvplane_service.telemetry import http as metrics_http
from tests.service.auth.test_audit import lines_of
from tests.service.browser import Browser, browsing
from tests.service.guarded import guarded
from tests.service.rig import SPEC, running

LOCAL: dict[str, Any] = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
PAGE = Path(__file__).parents[2] / "service" / "kvplane_service" / "rpc" / "page"
PROMPT = list(range(100, 140))
MARKUP = "<img src=x onerror=alert(1)>"


def send(
    address: str, path: str, body: object = None, method: str = "", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection(address, timeout=30)
    raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method or ("GET" if raw is None else "POST"), path, raw, sent)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def api(address: str, method: str, body: object, **headers: str) -> tuple[int, Any]:
    status, _, raw = send(address, f"/api/{method}", body, **headers)
    return status, json.loads(raw or b"{}")


@pytest.fixture(scope="module")
def service():
    with running(Config(**LOCAL)) as service:
        service.register()
        service.register("idle")
        yield service


# ---- the API


def test_files_have_a_policy_without_inline_scripts(service):
    for path, kind in (
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/draw.js", "text/javascript"),
        ("/page.css", "text/css"),
    ):
        status, headers, body = send(service.app.metrics_address, path)
        assert status == 200
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert len(body) > 1000
    script = (PAGE / "page.js").read_text() + (PAGE / "draw.js").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "location."):
        assert way not in script
    assert not re.search(r"<[^>]*\s(on\w+|style)=", (PAGE / "index.html").read_text())


def test_the_api_answers_as_grpc_does(service):
    address = service.app.metrics_address
    status, listed = api(address, "Allocation/ListReplicas", {})
    assert status == 200
    assert [one["replica"] for one in listed["replicas"]] == ["idle", "r"]
    status, described = api(address, "Allocation/DescribeReplica", {"replica": "r"})
    assert described["spec"]["num_blocks"] == service.describe().spec.num_blocks
    status, answer = api(address, "Allocation/DescribeReplica", {"replica": "none"})
    assert (status, answer["reason"]) == (404, "NOT_FOUND")
    assert answer["field"] == "replica"
    for wrong in (b"", b"[", b'{"nothing": 1}', b"\xff", b'{"replica": 5}'):
        status, answer = api(address, "Allocation/DescribeReplica", wrong)
        assert (status, answer["reason"]) == (400, "INVALID_ARGUMENT")


def test_only_reads_are_served(service):
    address, before = service.app.metrics_address, service.digest()
    for method in ("Allocation/DeregisterReplica", "Admin/Drain", "Admin/Snapshot", "Allocation/FindCacheHit", "", "x"):
        assert send(address, f"/api/{method}", {"replica": "r"})[0] == 404
    assert send(address, "/api/Admin/Status")[0] == 404  # GET
    assert send(address, "/../config.py")[0] == 404
    assert send(address, "/page/page.js")[0] == 404
    assert send(address, "/", {}, method="DELETE")[0] in (200, 405)
    assert service.digest() == before


def test_what_other_sites_can_send_is_refused(service):
    address = service.app.metrics_address
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert api(address, "Admin/Status", {}, Content_Type=kind)[0] == 400
    for host in ("attacker.example", "attacker.example:9464", "127.0.0.1.attacker.example"):
        assert api(address, "Admin/Status", {}, Host=host)[0] == 403
    assert "Access-Control-Allow-Origin" not in send(address, "/api/Admin/Status", {})[1]
    assert send(address, "/api/Admin/Status", b"", method="OPTIONS", Origin="http://attacker.example")[0] == 404


def test_a_body_above_the_limit_is_refused(service):
    for length in ((16 << 10) + 1, 10**12, -1):  # refused by its head, before the body is sent
        assert send(service.app.metrics_address, "/api/Admin/Explain", b"", Content_Length=str(length))[0] == 413


def test_a_body_without_a_token_is_not_parsed_and_is_audited(tmp_path, monkeypatch):
    monkeypatch.setattr(status_page, "Parse", lambda *_: pytest.fail("it was parsed"))
    with guarded(tmp_path, metrics_listen="127.0.0.1:0") as world:
        body = b'{"replica": ' + b"[" * 8000
        status, answer = api(world.service.app.metrics_address, "Admin/Explain", body, Authorization="Bearer wrong")
        assert (status, answer["reason"]) == (401, "UNAUTHENTICATED")
    assert [line["outcome"] for line in lines_of(world.guard.audit_file) if line["event"] == "refused"] == [
        "UNAUTHENTICATED"
    ]


def test_a_body_that_is_no_request_is_paid_by_its_owner(tmp_path):
    # A clock that stands: a machine that sends more slowly than the owner may would earn what each request costs.
    with guarded(tmp_path, clock=lambda: 1, metrics_listen="127.0.0.1:0") as world:
        address, body = world.service.app.metrics_address, b'{"replica": [' + b"1," * 8000
        owner = {"Authorization": "Bearer token-acme"}
        asked = [api(address, "Admin/Explain", body, **owner)[1]["reason"] for _ in range(1000)]
        assert asked[0] == "INVALID_ARGUMENT"
        assert "QUOTA_EXCEEDED" in asked


def test_connections_to_the_metrics_port_are_limited(service, monkeypatch):
    monkeypatch.setattr(metrics_http, "_MAX_CONNECTIONS", 4)
    host, _, port = service.app.metrics_address.rpartition(":")
    with ExitStack() as held:
        for _ in range(4):
            one = held.enter_context(socket.create_connection((host, int(port))))
            one.sendall(b"POST /api/Admin/Explain HTTP/1.1\r\n")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            send(service.app.metrics_address, "/")
    while True:
        with suppress(OSError):
            assert send(service.app.metrics_address, "/")[0] == 200
            return


def test_owners_see_their_replicas_with_their_tokens(tmp_path):
    with guarded(tmp_path, metrics_listen="127.0.0.1:0") as world:
        world.acme.register("acme/r")
        world.rival.register("rival/r")
        address = world.service.app.metrics_address
        for bad in ("", "Bearer wrong", "Basic dG9rZW4="):
            status, answer = api(address, "Allocation/ListReplicas", {}, Authorization=bad)
            assert (status, answer["reason"]) == (401, "UNAUTHENTICATED")
        assert send(address, "/")[0] == 200  # the page itself has no data
        seen = {
            name: [one["replica"] for one in
                   api(address, "Allocation/ListReplicas", {}, Authorization=f"Bearer token-{name}")[1]["replicas"]]
            for name in ("acme", "rival", "operator")
        }  # fmt: skip
        assert seen == {"acme": ["acme/r"], "rival": ["rival/r"], "operator": ["acme/r", "rival/r"]}
        for method in ("Allocation/DescribeReplica", "Admin/ListRequests", "Admin/Explain"):
            body = {"replica": "acme/r", **({"request_id": "x"} if method == "Admin/Explain" else {})}
            assert api(address, method, body, Authorization="Bearer token-rival")[0] == 404
    refused = [line for line in lines_of(world.guard.audit_file) if line["event"] == "refused"]
    assert {line["outcome"] for line in refused} == {"UNAUTHENTICATED", "NOT_FOUND"}
    assert {line.get("owner") for line in refused if line["outcome"] == "NOT_FOUND"} == {"rival"}


def test_without_owners_an_open_port_shows_nothing(tmp_path):
    with running(Config(listen="127.0.0.1:0", metrics_listen="0.0.0.0:0")) as service:
        port = service.app.metrics_address.rpartition(":")[2]
        status, answer = api(f"127.0.0.1:{port}", "Admin/Status", {})
        assert (status, answer["field"]) == (403, "metrics_listen")
    token = tmp_path / "token"
    token.write_text("a-secret-of-16-characters")
    config = Config(listen="127.0.0.1:0", metrics_listen="0.0.0.0:0", metrics_token_file=str(token))
    with running(config) as service:
        address = f"127.0.0.1:{service.app.metrics_address.rpartition(':')[2]}"
        assert api(address, "Admin/Status", {})[0] == 401
        assert api(address, "Admin/Status", {}, Authorization="Bearer a-secret-of-16-characters")[0] == 200


# ---- the page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return tmp_path_factory.mktemp("pictures")


def names(browser: Browser) -> list[str]:
    return list(browser.value("[...document.querySelectorAll('td button')].map(one => one.innerText)"))


@pytest.fixture(scope="module")
def busy(service):
    """Replica "r" with a live session whose request has markup as its name."""
    with connect(service.address) as client, client.session("r") as session:
        session.apply(part_of(NewsRow(0, tokens=PROMPT, request_id="first"), AdmitRow(0)))
        second = NewsRow(1, tokens=[*PROMPT, *range(60)], request_id=MARKUP)
        session.apply(part_of(FactRow(0, end=End.FREE), second, AdmitRow(1)))
        client.allocate_slots("idle", Allocate("b", Content(token_ids=[5] * 600)))
        yield service


@pytest.mark.parametrize("dark", [False, True])
def test_page_shows_fleet_pool_requests_and_causes(browser, busy, pictures, dark):
    browser.open(f"http://{busy.app.metrics_address}/", dark=dark)
    browser.wait(lambda: names(browser) == ["r", "idle"])
    assert "serving for" in browser.text("#service")
    browser.value("document.querySelector('button[data-replica=r]').click()")
    browser.wait(lambda: browser.text("#detail-title") == "r")
    facts = browser.text("#facts")
    assert "live, epoch 2, step 2" in facts
    assert "32 of 140 tokens looked up (23 %)" in facts
    requests = browser.text("#requests")
    assert MARKUP in requests
    assert browser.value("document.querySelectorAll('#requests img').length") == 0
    assert "full attention" in browser.text("#groups")
    assert browser.value("document.querySelector('#groups .held').getBoundingClientRect().width") > 5
    browser.value("document.querySelector('#prompt').focus()")
    browser.type(" ".join(map(str, PROMPT)))
    browser.value("document.querySelector('#explain button').click()")
    explanation = browser.wait(lambda: browser.text("#explanation"))
    assert "32 of 40 tokens hit; longest possible hit: 32" in explanation
    assert "Cause: " in explanation
    browser.value("document.querySelector('#prompt').value = 'first'")
    browser.value("document.querySelector('#explain button').click()")
    browser.wait(lambda: "0 of 40 tokens hit" in browser.text("#explanation"))
    assert browser.complaints() == []
    picture = browser.picture(pictures / f"page-{'dark' if dark else 'light'}.png")
    assert len(picture) > 10_000
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_page_is_usable_by_keyboard(browser, busy):
    browser.open(f"http://{busy.app.metrics_address}/")
    browser.wait(lambda: names(browser) == ["r", "idle"])
    browser.press("/")
    assert browser.value("document.activeElement.id") == "filter"
    browser.type("live")
    browser.wait(lambda: names(browser) == ["r"])
    assert browser.text("#count") == "1 of 2"
    for _ in range(20):
        browser.press("Tab")
        if browser.value("document.activeElement.dataset.replica ?? ''") == "r":
            break
    browser.press("Enter")
    browser.wait(lambda: browser.value("document.activeElement.id") == "detail")
    outline = browser.value(
        "(document.querySelector('#pause').focus({focusVisible: true}),"
        "getComputedStyle(document.querySelector('#pause')).outlineStyle)"
    )
    assert outline == "solid"


def test_fleet_is_sorted_by_column(browser, busy):
    browser.open(f"http://{busy.app.metrics_address}/")
    browser.wait(lambda: names(browser) == ["r", "idle"])
    held = "document.querySelectorAll('#fleet th button')[7].click()"
    browser.value(held)
    by_held = names(browser)
    browser.value(held)
    assert names(browser) == by_held[::-1]
    assert browser.value("document.querySelectorAll('#fleet th')[7].ariaSort") == "ascending"


# ---- the picture of the pool, and the last hour


def words(text: str) -> list[int]:
    return array("I", base64.b64decode(text)).tolist()


def test_the_map_has_every_block_that_is_held_or_cached(busy):
    address = busy.app.metrics_address
    for cells in (1, 7, 4096):
        _, answer = api(address, "Allocation/DescribeReplica", {"replica": "r", "map_cells": cells})
        found, groups = answer["pool_map"], answer["counters"]["groups"]
        assert found["cells"] == min(cells, answer["spec"]["num_blocks"])
        held = [sum(words(group["held"])) for group in found["groups"]]
        assert held == [int(group["used_blocks"]) for group in groups]
        both = sum(held) + sum(sum(words(group["cached"])) for group in found["groups"]) + sum(words(found["other"]))
        assert both <= answer["spec"]["num_blocks"] - 1
    _, answer = api(address, "Allocation/DescribeReplica", {"replica": "r"})
    assert (answer.get("pool_map"), answer.get("history")) == (None, None)
    status, answer = api(address, "Allocation/DescribeReplica", {"replica": "r", "map_cells": 4097})
    assert (status, answer["field"]) == (400, "map_cells")


def test_the_map_of_many_blocks_and_groups_is_bounded():
    groups = [SPEC.groups[0]] * 40
    spec = type(SPEC)()
    spec.CopyFrom(SPEC)
    del spec.groups[:]
    spec.groups.extend(groups)
    spec.num_blocks = 1_000_000
    with running(Config(**LOCAL)) as service:
        service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica="large", spec=spec))
        answer = service.allocation.DescribeReplica(pb.DescribeReplicaRequest(replica="large", map_cells=4096))
        assert answer.pool_map.cells == (1 << 16) // 81
        assert answer.ByteSize() < 400_000


def test_a_map_counts_the_blocks_of_the_pool(tmp_path):
    with guarded(tmp_path, metrics_listen="127.0.0.1:0") as world:
        world.acme.register("acme/r")
        body, owner = {"replica": "acme/r", "map_cells": 9}, {"Authorization": "Bearer token-acme"}
        with charges(prices.BLOCK_BYTES * SPEC.num_blocks) as counted:
            assert api(world.service.app.metrics_address, "Allocation/DescribeReplica", body, **owner)[0] == 200
        assert counted
        with charges(prices.BLOCK_BYTES * SPEC.num_blocks) as counted:
            assert (
                api(world.service.app.metrics_address, "Allocation/DescribeReplica", {"replica": "acme/r"}, **owner)[0]
                == 200
            )
        assert not counted


@contextmanager
def charges(num_bytes: int) -> Iterator[list[int]]:
    """Collects the counts of exactly this number of bytes."""
    found: list[int] = []
    before = Call.count

    def count(call: Call, counted: int) -> None:
        found.extend([counted] * (counted == num_bytes))
        before(call, counted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "count", count)
        yield found


def test_samples_are_bounded_and_show_what_is_unknown(service):
    host, taken = service.app.registry.get("idle").host, recent.Recent()
    for at in range(recent.MAX_SAMPLES + 5):
        taken.note(host, 1 + at * recent.INTERVAL_MS * 1_000_000)
    assert {len(column) for column in taken.columns} == {recent.MAX_SAMPLES}
    assert set(taken.waiting) == set(taken.hit) == {recent.UNKNOWN}
    assert set(taken.steps_per_s) == {0.0}


def test_samples_of_every_replica_are_taken_and_none_is_kept_alive():
    async def run() -> list[float]:
        pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) > 5:
                raise asyncio.CancelledError

        with suppress(asyncio.CancelledError):
            await recent.sample_in_background(lambda: iter([]), lambda: 1, sleep)
        return pauses

    assert asyncio.run(run()) == [recent.INTERVAL_MS / 1000] * 6


# ---- the page, further


def test_live_replicas_are_first_with_hits_and_requests(browser, busy):
    browser.open(f"http://{busy.app.metrics_address}/")
    browser.wait(lambda: names(browser) == ["r", "idle"])
    row = browser.value("[...document.querySelectorAll('#fleet tbody tr')[0].cells].map(one => one.innerText)")
    assert row[1:5] == ["live", "23 %", "1", "-"]


def test_the_address_has_the_selection_and_goes_back(browser, busy):
    address = f"http://{busy.app.metrics_address}/"
    browser.open(f"{address}#replica=r&filter=l&sort=held&order=descending")
    browser.wait(lambda: browser.text("#detail-title") == "r")
    assert browser.value("document.querySelector('#filter').value") == "l"
    assert browser.value("document.querySelectorAll('#fleet th')[7].ariaSort") == "descending"
    browser.value("document.querySelector('button[data-replica=idle]').click()")
    browser.wait(lambda: browser.text("#detail-title") == "idle")
    assert "replica=idle" in browser.value("location.hash")
    browser.value("history.back()")
    browser.wait(lambda: browser.text("#detail-title") == "r")
    browser.value("document.querySelector('#close').click()")
    browser.wait(lambda: browser.value("document.querySelector('#detail').hidden"))
    assert "replica" not in browser.value("location.hash")


def test_an_error_of_explain_stays_until_the_next_question(browser, busy):
    browser.open(f"http://{busy.app.metrics_address}/#replica=r")
    browser.wait(lambda: browser.text("#detail-title") == "r")
    browser.value("document.querySelector('#prompt').value = 'no such request'")
    browser.value("document.querySelector('#explain button').click()")
    browser.wait(lambda: "no such request" in browser.text("#explain-problem"))
    refreshes = browser.value("state.refreshes")
    browser.wait(lambda: browser.value("state.refreshes") > refreshes + 1)
    assert "no such request" in browser.text("#explain-problem")
    place = "(one => [one.top, one.bottom])(document.querySelector('#explain-problem').getBoundingClientRect())"
    top, bottom = browser.value(place)
    assert 0 <= top < bottom <= browser.value("innerHeight") + 1, (top, bottom)
    browser.value("document.querySelector('#prompt').value = '1 2 3'")
    browser.value("document.querySelector('#explain button').click()")
    browser.wait(lambda: "Cause: " in browser.text("#explanation"))
    assert browser.value("document.querySelector('#explain-problem').hidden")


def test_a_replica_that_does_not_exist_is_a_problem_that_stays(browser, busy):
    browser.open(f"http://{busy.app.metrics_address}/#replica=gone")
    browser.wait(lambda: "gone" in browser.text("#problem"))
    refreshes = browser.value("state.refreshes")
    browser.wait(lambda: browser.value("state.refreshes") > refreshes)
    assert "gone" in browser.text("#problem")
    assert names(browser) == ["r", "idle"], "the list continues"
    browser.value("document.querySelector('button[data-replica=r]').click()")
    browser.wait(lambda: browser.value("document.querySelector('#problem').hidden"))


def test_busy_is_shown_while_the_service_is_asked(browser, busy):
    browser.open(f"http://{busy.app.metrics_address}/")
    browser.wait(lambda: names(browser))
    browser.value("window.fetch = () => new Promise(() => 0)")
    browser.value("void tick()")
    browser.wait(lambda: browser.text("#busy") == "reading")
    assert browser.value("document.body.getAttribute('aria-busy')") == "true"


def test_plots_and_the_map_are_drawn(browser, busy):
    entry = busy.app.registry.get("r")
    for at in range(1, 4):
        entry.recent.note(entry.host, at * 10**10)
    browser.open(f"http://{busy.app.metrics_address}/#replica=r")
    browser.wait(lambda: browser.text("#detail-title") == "r" and browser.text("#map-legend"))
    assert browser.value("document.querySelectorAll('#plots svg path').length") == 5
    assert "Held: now" in browser.value("document.querySelector('#plots svg').getAttribute('aria-label')")
    label = browser.value("document.querySelector('#map').getAttribute('aria-label')")
    assert label.startswith("41 blocks, one in a cell: ")
    assert "group 0 (full attention), held" in label
    map_of = "(one => one.getContext('2d').getImageData(0, 0, one.width, one.height))(document.querySelector('#map'))"
    pixels = f"Array.from(new Uint32Array({map_of}.data.buffer))"
    colors = browser.value(f"new Set({pixels}).size")
    assert colors >= 3


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 500, 900, 1400])
def test_no_width_cuts_a_column(browser, busy, pictures, width, dark):
    browser.open(f"http://{busy.app.metrics_address}/#replica=r", dark=dark, size=(width, 900))
    browser.wait(lambda: browser.text("#detail-title") == "r" and browser.text("#map-legend"))
    wide = browser.value(
        "[document.documentElement, ...document.querySelectorAll('.scroll, section, figure, dd, canvas')]"
        ".filter(one => one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth + 1)"
        ".map(one => one.id || one.className || one.tagName)"
    )
    assert wide == []
    assert len(browser.picture(pictures / f"{width}-{dark}.png")) > 10_000


def test_page_asks_for_a_token_and_keeps_it_out_of_addresses(browser, tmp_path, pictures):
    with guarded(tmp_path, metrics_listen="127.0.0.1:0") as world:
        world.acme.register("acme/r")
        world.rival.register("rival/r")
        browser.open(f"http://{world.service.app.metrics_address}/")
        browser.wait(lambda: "asks for a token" in browser.text("#problem"))
        assert names(browser) == []
        assert browser.value("document.querySelector('#content').hidden")
        browser.picture(pictures / "token.png")
        browser.value("document.querySelector('#token').focus()")
        browser.type("token-wrong")
        browser.press("Enter")
        browser.wait(lambda: "token" in browser.text("#problem") and "asks" not in browser.text("#problem"))
        browser.value("document.querySelector('#token').focus()")
        browser.type("token-acme")
        browser.press("Enter")
        browser.wait(lambda: names(browser) == ["acme/r"])
        assert browser.value("document.querySelector('#access').hidden")
        assert all("token-acme" not in request["url"] for request in browser.requests())
        assert any(request["headers"].get("Authorization") == "Bearer token-acme" for request in browser.requests())
        stored = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert "token-acme" not in browser.value(stored)


def test_page_shows_five_hundred_replicas(browser, pictures):
    with running(Config(**LOCAL, max_replicas=600)) as service:
        for number in range(500):
            service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica=f"r{number:03}", spec=SPEC))
        browser.open(f"http://{service.app.metrics_address}/")
        browser.wait(lambda: browser.text("#count") == "500 of 500")
        browser.picture(pictures / "fleet.png")
        browser.press("/")
        browser.type("r49")
        browser.wait(lambda: len(names(browser)) == 10)


def test_the_policy_refuses_an_inline_script(browser, service):
    browser.open(f"http://{service.app.metrics_address}/")
    browser.wait(lambda: names(browser))
    browser.value(
        "(() => { const made = document.createElement('script'); made.textContent = 'window.planted = 1';"
        "document.body.append(made); })()"
    )
    assert browser.value("window.planted ?? 0") == 0
    browser.wait(lambda: browser.value("1") and any("Content Security Policy" in one for one in browser.complaints()))
