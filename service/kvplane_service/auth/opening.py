"""The gate that a configuration asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvplane_service.auth.audit import AuditLog
from kvplane_service.auth.gate import Gate
from kvplane_service.auth.identity import Identities
from kvplane_service.config import Config, check_together

_LOCAL = ("unix:", "127.0.0.1:", "localhost:", "[::1]:")

_log = logging.getLogger(__name__)


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
