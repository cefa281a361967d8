"""A name that another owner has is not looked up at other services."""

from __future__ import annotations

import contextvars

import pytest

from kvplane.base.errors import NotFound
from kvplane_service.auth.gate import CALL, Call
from kvplane_service.auth.owners import Owner
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.config import Config
from kvplane_service.registry import Registry, UnknownReplica

ASKED: list[str] = []


async def ensure_local(name: str) -> None:
    ASKED.append(name)
    raise UnknownReplica(name)


@pytest.mark.parametrize(("name", "is_asked"), [("acme/r", True), ("rival/r", False), ("acme", False)])
async def test_a_name_of_another_owner_is_not_looked_up_at_other_services(name, is_asked):
    """Nor can the caller make this service adopt a replica of another owner."""
    visible = VisibleReplicas(Registry(Config(), lambda: 0), ensure_local)
    ASKED.clear()
    CALL.set(Call("m", "p", Owner(name="acme")))
    with pytest.raises(NotFound) as caught:
        await visible.ensure_local(name)
    assert caught.value.message == f"there is no replica {name!r}"
    assert bool(ASKED) is is_asked
    assert contextvars.copy_context()[CALL].is_hidden is not is_asked
