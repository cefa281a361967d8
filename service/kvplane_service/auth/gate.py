"""The gate that every call passes: who calls, whether it may, within its limits; and the word to the audit log.

    Identities -> Owner -> scope of the method -> limits -> the call, which looks at CALL for what it may see
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvplane.base.errors import KvplaneError, PermissionDenied, Unauthenticated
from kvplane_service.auth.audit import AuditLog
from kvplane_service.auth.identity import Identities, Identity, Proof
from kvplane_service.auth.owners import ANYONE, Owner
from kvplane_service.auth.quotas import Quotas
from kvplane_service.auth.scopes import METHODS
from kvplane_service.config import Config, check_together
from kvplane_service.registry import Registry

_LOCAL = ("unix:", "127.0.0.1:", "localhost:", "[::1]:")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """A call under way.

    Attributes:
        method: without the leading slash.
        peer: its address.
        replica: the last one that it named, "" before, or when no replica can be called so.
        is_hidden: it named a replica that is not for it, and was told that there is none.
        ended: why the gate broke it off.
    """

    method: str = ""
    peer: str = ""
    owner: Owner = ANYONE
    replica: str = ""
    is_hidden: bool = False
    ended: KvplaneError | None = None
    record: Callable[[str, str], None] = field(default=lambda *_: None)  # event and outcome, to the audit log

    def name(self, replica: str) -> None:
        """Note which replica the call is about."""
        if self is not ANONYMOUS and Registry.is_name(replica):
            self.replica = replica

    def check_domain(self, domain: str, field: str) -> None:
        """Raise PermissionDenied, naming the field, for a domain that is not the owner's to use."""
        if not self.owner.may_use_domain(domain):
            raise PermissionDenied(
                f"{domain[:140]!r} is no domain of owner {self.owner.name}",
                field=field,
                remedy="let an operator add it to the owner's domains",
            )


ANONYMOUS = Call()  # who calls in process, or where nobody is asked
CALL: ContextVar[Call] = ContextVar("call", default=ANONYMOUS)


@dataclass(frozen=True, slots=True)
class Incoming:
    """What gRPC says of a call."""

    method: str
    peer: str
    proof: Proof


class Gate:
    """Asks who calls, where `identities` can tell; tells the audit log, where there is one."""

    def __init__(self, identities: Identities | None, audit: AuditLog | None, clock: Callable[[], int]) -> None:
        """`clock` counts nanoseconds and never goes back."""
        self._identities = identities
        self._audit = audit
        self._quotas = Quotas(clock)
        self._open: dict[Call, _Stay] = {}

    @contextmanager
    def passing(self, incoming: Incoming) -> Iterator[Call]:
        """Around a call, in a task of its own. Raises Unauthenticated, PermissionDenied, QuotaExceeded at first."""
        call = Call(incoming.method, incoming.peer)
        call.record = lambda event, outcome: self._record(event, call, outcome)
        try:
            identity = self._admit(call, incoming.proof)
        except KvplaneError as error:
            self._record("refused", call, error.reason)
            raise
        self._open[call] = _Stay(incoming.proof, identity, asyncio.current_task())
        CALL.set(call)
        outcome = "BROKEN_OFF"
        try:
            yield call
            outcome = "OK"
        except KvplaneError as error:
            outcome = error.reason
            raise
        finally:
            del self._open[call]
            self._quotas.leave(call.owner)
            self._record_end(call, call.ended.reason if call.ended else outcome)

    def recheck(self) -> None:
        """Break off calls whose proof no longer holds; call now and then."""
        if self._identities is None:
            return
        for call, stay in list(self._open.items()):
            if stay.identity is None or self._identities.still_holds(stay.proof, stay.identity):
                continue
            call.ended = Unauthenticated("what was shown no longer holds", remedy="call again with a new token")
            if stay.task is not None:
                stay.task.cancel()

    def close(self) -> None:
        """Write what waits for the audit log."""
        if self._audit is not None:
            self._audit.close()

    def _admit(self, call: Call, proof: Proof) -> Identity | None:
        rule = METHODS[call.method]
        identity = self._identities.identify(proof) if self._identities else None
        owner = call.owner = identity.owner if identity else ANYONE
        if rule.scope not in owner.scopes:
            raise PermissionDenied(
                f"owner {owner.name} may not {rule.scope.value}",
                field="authorization",
                remedy="let an operator add the scope",
            )
        if rule.is_for_all and not owner.every_replica:
            raise PermissionDenied(
                f"this concerns the replicas of all owners, not of {owner.name} alone",
                field="authorization",
                remedy="call as an owner with every_replica",
            )
        self._quotas.enter(owner)
        return identity

    def _record_end(self, call: Call, outcome: str) -> None:
        if call.ended is not None or call.is_hidden or outcome == PermissionDenied.reason:
            self._record("refused", call, outcome)
        elif METHODS[call.method].is_audited:
            self._record("call", call, outcome)

    def _record(self, event: str, call: Call, outcome: str = "") -> None:
        if self._audit is not None:
            facts = {"peer": call.peer, "owner": call.owner.name, "method": call.method, "replica": call.replica}
            self._audit.record(event, **facts, outcome=outcome)


@dataclass(frozen=True, slots=True)
class _Stay:
    """What a call was let in with."""

    proof: Proof
    identity: Identity | None
    task: asyncio.Task[object] | None


def open_gate(config: Config, clock: Callable[[], int]) -> Gate | None:
    """None when nobody is asked and nothing is told.

    Raises:
        InvalidArgument: values contradict each other, or a file says what cannot be.
        NotFound: a file cannot be read, or the audit log not written.
    """
    check_together(config)
    if not config.auth_owners and not config.audit_log:
        return None
    identities = Identities(config) if config.auth_owners else None
    if identities and not config.tls_cert and not config.listen.startswith(_LOCAL):
        _log.warning("tokens reach %s in plain text: set tls_cert and tls_key", config.listen)
    audit = AuditLog(config.audit_log, lambda: time.time_ns() // 1_000_000) if config.audit_log else None
    return Gate(identities, audit, clock)
