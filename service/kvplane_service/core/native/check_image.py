"""Checks the requests that an engine resumes before the state of the compiled core is copied for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplane.base.hashing import HashScheme
from kvplane.base.step import Step
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.requests import Requests
from kvplane_service.core.resume import ImagePool, Resumption
from kvplane_service.core.setup import smallest
from kvplane_service.core.state import read_entries
from kvplane_service.core.state_entries import load_requests

if TYPE_CHECKING:
    from kvplane_service.core.native import NativeReplica


def check_image(core: NativeReplica, step: Step) -> None:
    """Raise InvalidArgument for requests that a `Replica` with this state would not resume, unless for the keys of
    other blocks.
    """
    entries: dict[str, list[Any]] = {}
    for name, value in read_entries(b"".join(core.image(with_statistics=False))):
        entries.setdefault(name, []).append(value)
    requests, (state,) = Requests(), entries["pool"]
    load_requests(requests, entries, HashScheme.of(core.spec))
    used = {block for block, count in enumerate(entries["pool.references"][0]) if count and block}
    reserved, busy = state["reserved"], state["busy"]
    pool = ImagePool(core.spec.num_blocks, core.epoch, reserved, busy, not used - {*reserved, *busy})
    Resumption(Coordinator(smallest(core.spec), requests), core._shown, pool).check_requests(step)
