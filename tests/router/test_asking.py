"""Engines that are asked by HTTP: slow, hostile or redirecting ones delay and learn no more than their question."""

from __future__ import annotations

import ast
import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvplane_fleet.fleet import Fleet
from kvplane_fleet.router.asking import MOST_OPEN, Engines
from kvplane_fleet.router.prompts import Prompts, text_body
from kvplane_fleet.settings import PlaceSettings
from tests.router.fleets import NO_EVENTS

ROOT = Path(__file__).parents[2]
HTTP_CLIENTS = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "urllib3", "httpcore"}
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def engine(answer, drip_s=0.0, ends=True):
    """An engine that answers every connection with these bytes, each `drip_s` after the one before."""
    asked = list[bytes]()

    async def serve(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        parts = [answer] if not drip_s else [answer[at : at + 1] for at in range(len(answer))]
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(drip_s)
            if not ends:
                await reader.read()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def ask(endpoint, within_s=5.0):
    return await Engines().post(endpoint, "/tokenize", b"{}", 1000, within_s)


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 4\r\n\r\nabcd",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n3\r\nbcd\r\n0\r\n\r\n",
    ],
)
async def test_an_answer_ends_where_it_says_also_on_a_connection_that_stays_open(answer):
    async with engine(answer, ends=False) as (endpoint, asked):
        assert await ask(endpoint) == b"abcd"
    assert asked[0].startswith(b"POST /tokenize HTTP/1.1\r\n")


async def test_an_answer_without_a_length_ends_with_its_connection():
    async with engine(OK + b"\r\nabcd") as (endpoint, _):
        assert await ask(endpoint) == b"abcd"


async def test_the_deadline_is_that_of_the_whole_answer_and_not_of_each_byte():
    loop = asyncio.get_running_loop()
    for answer in (OK + b"Content-Length: 500\r\n\r\n" + b" " * 500, OK + b"x: y\r\n" * 1000):
        async with engine(answer, drip_s=0.02) as (endpoint, _):
            began_s = loop.time()
            with pytest.raises(TimeoutError):
                await ask(endpoint, within_s=0.3)
            assert loop.time() - began_s < 2


async def test_a_redirection_is_an_answer_and_nothing_else_is_asked():
    async with engine(OK + b"\r\nsecret") as (internal, asked):
        for status in (301, 302, 303, 307, 308):
            answer = f"HTTP/1.1 {status} Found\r\nLocation: http://{internal}/secret\r\nContent-Length: 0\r\n\r\n"
            async with engine(answer.encode()) as (endpoint, _):
                with pytest.raises(ValueError, match=f"status {status}"):
                    await ask(endpoint)
        assert not asked


async def test_no_proxy_of_the_environment_is_asked(monkeypatch):
    async with engine(OK + b"\r\nof the proxy") as (proxy, asked), engine(OK + b"\r\nown") as (endpoint, _):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy}")
        assert await ask(endpoint) == b"own"
        assert not asked


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001,
        OK + b"\r\n" + b"x" * 2000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"2\r\nxx\r\n" * 501 + b"0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        OK + b"Content-Length: 10\r\n\r\nx",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"x: " + b"y" * (1 << 20),
        OK + b"x: y\r\n" * 1000 + b"\r\n",
        b"\x00\xff\r\n\r\n",
        b"",
    ],
    ids=[
        "stated",
        "endless",
        "chunks",
        "negative",
        "cut off",
        "no chunk",
        "long line",
        "many lines",
        "no HTTP",
        "nothing",
    ],
)
async def test_an_answer_that_is_too_long_or_none_is_refused(answer):
    async with engine(answer) as (endpoint, _):
        with pytest.raises((ValueError, OSError)):
            await ask(endpoint, within_s=2.0)


async def test_an_engine_that_does_not_answer_holds_a_few_questions_and_no_other_engine():
    engines = Engines()
    async with engine(b"", ends=False) as (slow, asked), engine(OK + b"\r\nx") as (other, _):
        waiting = [asyncio.create_task(engines.post(slow, "/tokenize", b"", 10, 1.0)) for _ in range(3 * MOST_OPEN)]
        await asyncio.sleep(0.1)
        assert await engines.post(other, "/tokenize", b"", 10, 1.0) == b"x"
        assert len(asked) == MOST_OPEN, "others wait for one of them"
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, TimeoutError) for one in results)
        with pytest.raises(TimeoutError):  # there is room again
            await engines.post(slow, "/tokenize", b"", 10, 0.1)


async def test_a_question_is_asked_once_another_one_is_answered():
    engines = Engines()
    async with engine(OK + b"\r\nx") as (endpoint, asked):
        answers = await asyncio.gather(*[engines.post(endpoint, "/x", b"", 10, 5.0) for _ in range(3 * MOST_OPEN)])
    assert answers == [b"x"] * 3 * MOST_OPEN
    assert len(asked) == 3 * MOST_OPEN


async def test_an_answer_that_is_nested_deeply_tokenizes_nothing():
    text, fleet = b'{"other":' + b"[" * 50_000, Fleet()
    async with engine(OK + b"content-length: %d\r\n\r\n" % len(text) + text) as (endpoint, asked):
        fleet.add(PlaceSettings("a", events=NO_EVENTS, model="m", endpoint=endpoint)).source.is_connected = True
        assert await Prompts(fleet).tokenized("m", text_body("a"), ["a"]) is None
    assert asked


def test_every_http_question_of_the_product_goes_through_two_functions_that_bound_it():
    """The service is below the router; what bounds its calls is tested in tests/store/test_owner_tables.py."""
    importers = set()
    for top in ("service", "clients", "gpu_worker"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
                if any(name in HTTP_CLIENTS or name.split(".")[0] in HTTP_CLIENTS for name in names):
                    importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"service/kvplane_fleet/router/asking.py", "service/kvplane_service/store/json_api.py"}
