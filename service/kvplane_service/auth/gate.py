"""The gate that encloses every call: authentication, authorization, limits per owner and the audit log.

    credentials -> Identities -> owner -> scope that the method requires -> limits -> the call

The call reads the context variable `CALL` to learn its owner, and so which replicas it may see.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvplane.base.errors import KvplaneError, PermissionDenied, Unauthenticated
from kvplane_service.auth.audit import AuditLog
from kvplane_service.auth.identity import Identities, Identity, Proof
from kvplane_service.auth.owners import ANYONE, Owner
from kvplane_service.auth.quotas import Quotas
from kvplane_service.auth.scopes import METHODS, Rule, Scope
from kvplane_service.config import Config, check_together
from kvplane_service.registry import Registry
from kvplane_service.runtime.rota import OWNER

_LOCAL = ("unix:", "127.0.0.1:", "localhost:", "[::1]:")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """A call that is being served.

    Attributes:
        method: full name of the gRPC method, without the leading slash.
        peer: address of the client.
        owner: identity that the credentials prove.
        replica: the last valid replica name that the call has named, "" if none.
        is_hidden: the call named a replica that its owner may not see, and was answered NOT_FOUND.
        ended: the reason why the gate ended the call, None if it did not.
        record: writes an event and its outcome to the audit log.
        quotas: counts the bytes of its messages; None inside the process, and without a gate.
    """

    method: str = ""
    peer: str = ""
    owner: Owner = ANYONE
    replica: str = ""
    is_hidden: bool = False
    ended: KvplaneError | None = None
    record: Callable[[str, str], None] = field(default=lambda *_: None)
    quotas: Quotas | None = None

    def name(self, replica: str) -> None:
        """Record the replica that the call names, for the audit log. An invalid name is ignored."""
        if self is not ANONYMOUS and Registry.is_name(replica):
            self.replica = replica

    def reading(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which the request is read (see Quotas.reading)."""
        return nullcontext() if self.quotas is None else self.quotas.reading(self.owner)

    def pay(self, num_bytes: int) -> None:
        """Count the bytes of the request before it is parsed. Raises QuotaExceeded (see Quotas.pay)."""
        if self.quotas is not None:
            self.quotas.pay(self.owner, num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count what a call that is being served turns out to cost; negative to give back (see Quotas.count)."""
        if self.quotas is not None:
            self.quotas.count(self.owner, num_bytes)

    def owe(self, num_bytes: int) -> int:
        """Count the bytes of a message of a session. Returns the milliseconds for which the message has to wait."""
        return 0 if self.quotas is None else self.quotas.owe(self.owner, num_bytes)

    def check_operator(self, what: str) -> None:
        """Raise PermissionDenied unless the owner has the scope `admin`, which `what` requires."""
        if Scope.ADMIN not in self.owner.scopes:
            raise PermissionDenied(
                f"owner {self.owner.name} lacks the scope `{Scope.ADMIN.value}`, which {what} requires",
                field="authorization",
                remedy="end the engine's session first, or ask an operator",
            )

    def check_domain(self, domain: str, field: str) -> None:
        """Raise PermissionDenied if the owner may not use this cache domain (requests share cached blocks only inside
        one). The error names the request field `field`.
        """
        if not self.owner.may_use_domain(domain):
            raise PermissionDenied(
                f"owner {self.owner.name} may not use the domain {domain[:140]!r}",
                field=field,
                remedy="ask an operator to add it to the owner's domains",
            )


ANONYMOUS = Call()  # for calls from inside the process, and for services without authentication
CALL: ContextVar[Call] = ContextVar("call", default=ANONYMOUS)


@dataclass(frozen=True, slots=True)
class Incoming:
    """An incoming call as gRPC reports it: method, client address and credentials."""

    method: str
    peer: str
    proof: Proof


class Gate:
    """Authenticates calls if there are `identities`, limits them per owner, and records them if there is an `audit`
    log.
    """

    def __init__(
        self,
        identities: Identities | None,
        audit: AuditLog | None,
        clock: Callable[[], int],
        rules: Mapping[str, Rule] = METHODS,
    ) -> None:
        """`clock` is a function that returns the monotonic time in nanoseconds; `rules` has every method served."""
        self._rules = rules
        self._identities = identities
        self._audit = audit
        self._quotas = Quotas(clock)
        self._open: dict[Call, _Stay] = {}

    @contextmanager
    def passing(self, incoming: Incoming) -> Iterator[Call]:
        """Enclose a call: check it on entry; on exit release its quota and record its outcome. The call must run in its
        own asyncio task, because `recheck` cancels that task if the credentials become invalid.

        Raises:
            Unauthenticated: the credentials are missing or invalid.
            PermissionDenied: the owner lacks the scope of the method.
            QuotaExceeded: the owner has reached its rate or concurrency limit.
        """
        call = Call(incoming.method, incoming.peer)
        call.record = lambda event, outcome: self._record(event, call, outcome)
        try:
            identity = self._admit(call, incoming.proof)
        except KvplaneError as error:
            self._record("refused", call, error.reason)
            raise
        call.quotas = self._quotas
        self._open[call] = _Stay(incoming.proof, identity, asyncio.current_task())
        CALL.set(call)
        OWNER.set(call.owner.name)
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
        """Cancel the calls whose credentials are no longer valid. The service calls it periodically."""
        if self._identities is None:
            return
        for call, stay in list(self._open.items()):
            if stay.identity is None or self._identities.still_holds(stay.proof, stay.identity):
                continue
            call.ended = Unauthenticated(
                "the credentials expired or were revoked during the call",
                field="authorization",
                remedy="call again with a new token",
            )
            if stay.task is not None:
                stay.task.cancel()

    def close(self) -> None:
        """Write the waiting lines of the audit log and close it."""
        if self._audit is not None:
            self._audit.close()

    def _admit(self, call: Call, proof: Proof) -> Identity | None:
        rule = self._rules[call.method]
        identity = self._identities.identify(proof) if self._identities else None
        owner = call.owner = identity.owner if identity else ANYONE
        if rule.scope is not None and rule.scope not in owner.scopes:
            raise PermissionDenied(
                f"owner {owner.name} lacks the scope `{rule.scope.value}`, which {call.method} requires",
                field="authorization",
                remedy="ask an operator to add the scope to the owner in auth_owners",
            )
        if rule.is_for_all and not owner.every_replica:
            raise PermissionDenied(
                f"{call.method} affects the replicas of all owners, and owner {owner.name} lacks `every_replica`",
                field="authorization",
                remedy="call as an owner with `every_replica: true` in auth_owners",
            )
        self._quotas.enter(owner)
        return identity

    def _record_end(self, call: Call, outcome: str) -> None:
        if call.ended is not None or call.is_hidden or outcome == PermissionDenied.reason:
            self._record("refused", call, outcome)
        elif self._rules[call.method].is_audited:
            self._record("call", call, outcome)

    def _record(self, event: str, call: Call, outcome: str = "") -> None:
        if self._audit is not None:
            facts = {"peer": call.peer, "owner": call.owner.name, "method": call.method, "replica": call.replica}
            self._audit.record(event, **facts, outcome=outcome)


@dataclass(frozen=True, slots=True)
class _Stay:
    """The credentials and the identity with which a running call was admitted, and the task that runs the call."""

    proof: Proof
    identity: Identity | None
    task: asyncio.Task[object] | None


def open_gate(config: Config, clock: Callable[[], int], rules: Mapping[str, Rule] = METHODS) -> Gate | None:
    """Return the gate that the configuration asks for, or None if it has neither authentication nor an audit log.
    `rules` has every method served.

    Raises:
        InvalidArgument: configuration values contradict each other, or a file of owners, tokens or keys is invalid.
        NotFound: a file cannot be read, or the audit log cannot be written.
    """
    check_together(config)
    if not config.auth_owners and not config.audit_log:
        return None
    identities = Identities(config) if config.auth_owners else None
    if identities and not config.tls_cert and not config.listen.startswith(_LOCAL):
        _log.warning("clients send their tokens to %s in plain text: set tls_cert and tls_key", config.listen)
    audit = AuditLog(config.audit_log, lambda: time.time_ns() // 1_000_000) if config.audit_log else None
    return Gate(identities, audit, clock, rules)
