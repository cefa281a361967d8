"""The wall clock of a service jumps, and tokens are valid as docs/operating/access.md says."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from kvplane.base.errors import Unauthenticated
from kvplane.rpc.access import Access
from kvplane.rpc.channel import open_channel
from kvplane.v1 import admin_pb2
from kvplane.v1.admin_pb2_grpc import AdminStub
from tests.cli.test_serve import serving, session
from tests.fleet.clocks import HOUR_S, WallClock, library
from tests.service.auth.test_web_tokens import AUDIENCE, ISSUER, RSA_KEY, public, token
from tests.service.guarded import Guard
from tests.service.rig import refusal

STATUS = admin_pb2.StatusRequest()


@pytest.fixture
def clock(tmp_path):
    if library() is None:
        pytest.skip("there is no libfaketime")
    return WallClock(tmp_path / "clock")


@pytest.fixture
def service(tmp_path, clock):
    """Address of a guarded service with that clock."""
    guard = Guard(tmp_path)
    (tmp_path / "jwks").write_text(json.dumps({"keys": [public(RSA_KEY, "rsa")]}))
    settings = {
        "auth_owners": guard.owners_file,
        "auth_tokens": guard.tokens_file,
        "auth_jwks": tmp_path / "jwks",
        "auth_jwt_issuer": ISSUER,
        "auth_jwt_audience": AUDIENCE,
        "lease_ms": 2000,
    }
    flags = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    with serving(*flags, **clock.variables) as (_, address):
        yield address


def test_tokens_that_expire_follow_the_wall_clock_and_others_do_not(service, clock):
    with (
        open_channel(service, Access(None, token())) as web,  # for an hour from now on
        open_channel(service, Access(None, "token-acme")) as static,
    ):
        stream = session(web)
        for ahead_s, is_valid in ((0, True), (HOUR_S // 2, True), (-HOUR_S, True), (2 * HOUR_S, False)):
            clock.set(ahead_s)
            with nullcontext() if is_valid else refusal(Unauthenticated):
                AdminStub(web).Status(STATUS)
            if is_valid:
                stream.step()
            AdminStub(static).Status(STATUS)
        assert isinstance(stream.end(), Unauthenticated)
        clock.set(0)
        AdminStub(web).Status(STATUS)
