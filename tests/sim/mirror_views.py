"""What the services show of mirrored replicas: records for the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplane.base.step import EventKind
from kvplane_core.face.state import digest as state_digest
from kvplane_service.decisions import log as decisions
from tests.core.specification import specification_of
from tests.sim import history

if TYPE_CHECKING:
    from tests.sim.service import Seen, Service


def watch(service: Service, seen: Seen) -> None:
    """Record what the service shows after each message of the engine."""
    mirror = seen.host.mirror
    apply, add_piece = mirror.apply, mirror.add_piece

    async def applied(steps, newest, age_ms, offload):
        seen.age_ms = age_ms
        try:
            return await apply(steps, newest, age_ms, offload)
        finally:
            view(service, seen)

    async def added(data, first, last, offload):
        seen.age_ms = 0
        try:
            return await add_piece(data, first, last, offload)
        finally:
            view(service, seen)

    mirror.apply, mirror.add_piece = applied, added  # type: ignore[method-assign]


def view(service: Service, seen: Seen, is_message: bool = True) -> None:
    """Record what a subscriber sees of the replica now."""
    host = seen.host
    if host.is_retired or not service.process.alive:
        return
    service.read_events(seen)
    shows = bool(seen.follower.view) and not seen.follower.withdrawn
    attached = host.mirror.attached
    status, life = host.state.value, attached.life_nonce if attached else host._life_nonce
    state = state_digest(host.replica) if is_message else ""
    place = service.number, host.name, life, host.seq
    service.world.record(history.Viewed(*place, is_message, status, shows, seen.age_ms, state))


def follow(service: Service, seen: Seen, entry: decisions.Entry) -> None:
    """Record an image, or a step, that the service publishes."""
    host, world = seen.host, service.world
    if isinstance(entry, decisions.Life):
        _imaged(service, seen, entry)
        return
    step, result = entry.step, entry.result
    answer = history.fingerprint(result.parts)
    if host._life_nonce:  # else of a caller, such as a reset while no engine is there
        world.record(history.Mirrored(service.number, host.name, host._life_nonce, step.seq, answer))
    for event in [event for events in entry.events for event in events if event.kind is EventKind.STORED]:
        seen.last_stored = step.seq
        for digest, block in zip(event.hashes, event.blocks, strict=True):
            place = service.number, host.name, step.epoch, step.seq
            world.record(history.Stored(*place, event.group, block, digest))


def _imaged(service: Service, seen: Seen, life: decisions.Life) -> None:
    host, pool = seen.host, specification_of(seen.host.replica).coordinator.pool
    keyed = [block for block, key in enumerate(pool.key) if key is not None]
    kept = tuple((block, pool.stamp[block]) for block in keyed if pool.key_step[block] <= pool.executed_through)
    place = service.number, host.name
    service.world.record(history.Imaged(*place, host._life_nonce, life.epoch, host.replica.seq, kept))
    for step, event in host.replica.stored_events():
        for digest, block in zip(event.hashes, event.blocks, strict=True):
            if step:
                service.world.record(history.Stored(*place, life.epoch, step, event.group, block, digest))
    seen.last_stored = host.replica.seq
