"""Addresses of places: names that do not resolve, or only slowly, delay no request twice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kvplane_fleet.router.endpoints import KNOWN_S, Endpoints, resolve


class Names:
    """Resolves names; those in `hung` never, those in `wrong` not."""

    def __init__(self):
        self.hung, self.wrong, self.asked, self.now_s = set[str](), set[str](), list[str](), 0.0

    async def resolved(self, endpoint):
        self.asked.append(endpoint)
        if endpoint in self.hung:
            await asyncio.Event().wait()
        if endpoint in self.wrong:
            raise OSError("no such name")
        return f"address of {endpoint}"

    def endpoints(self, **places) -> Endpoints:
        followed = {name: SimpleNamespace(place=SimpleNamespace(settings=SimpleNamespace(endpoint=endpoint)))
                    for name, endpoint in places.items()}  # fmt: skip
        fleet: Any = SimpleNamespace(followed=followed)
        return Endpoints(fleet, lambda: self.now_s, self.resolved)


def test_a_name_that_hangs_later_keeps_its_last_address_and_delays_nothing():
    async def scenario():
        names = Names()
        endpoints = names.endpoints(a="one", b="two", c="")
        both = {"a": "address of one", "b": "address of two"}
        assert await endpoints.of("abc") == both
        assert await endpoints.of("abc") == both
        assert sorted(names.asked) == ["one", "two"]
        names.hung, names.now_s = {"one", "two"}, KNOWN_S + 1
        for _ in range(3):
            async with asyncio.timeout(5):
                assert await endpoints.of("abc") == both
            await asyncio.sleep(0)
        assert sorted(names.asked) == ["one", "one", "two", "two"]

    asyncio.run(scenario())


def test_a_name_that_does_not_resolve_is_asked_again_after_a_while():
    async def scenario():
        names = Names()
        names.wrong = {"two"}
        endpoints = names.endpoints(a="one", b="two")
        for _ in range(3):
            assert await endpoints.of("ab") == {"a": "address of one"}
        assert sorted(names.asked) == ["one", "two"]
        names.wrong, names.now_s = set(), KNOWN_S + 1
        await endpoints.of("ab")
        await asyncio.sleep(0.01)
        assert await endpoints.of("ab") == {"a": "address of one", "b": "address of two"}

    asyncio.run(scenario())


def test_addresses_and_names_are_resolved():
    async def scenario():
        assert await resolve("http://127.0.0.1:8000/v1") == "127.0.0.1:8000"
        assert await resolve("https://[::1]") == "[::1]:443"
        assert (await resolve("localhost:70")).endswith(":70")

    asyncio.run(scenario())
