"""`kvplane retain` lets the blocks of a prefix be evicted after all others."""

from __future__ import annotations

from kvplane import connect
from kvplane_service.config import Config
from tests.service.hosts import spec_of
from tests.service.rig import running
from tests.service.test_retain_call import Serving


def test_retain_says_what_is_retained(kvplane, tmp_path):
    file = tmp_path / "tokens"
    file.write_text(" ".join(["3"] * 65))
    words = ("retain", "r", "--tokens", str(file))
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        at = ("--service", service.address)
        client.register_replica("r", spec_of(41))
        with client.session("r") as session:
            engine = Serving(session)
            engine.serve(3)
            with engine.idling():
                code, out, _ = kvplane(*words, *at, "--ttl", "60")
                assert (code, "64 tokens, 4 blocks retained for 60 s" in out) == (0, True), out
                assert "1 prefix, 4 blocks" in kvplane("describe", "r", *at)[1]
                code, out, _ = kvplane(*words, *at, "--ttl", "0")
                assert (code, "released" in out) == (0, True), out
        code, _, err = kvplane("retain", "r", *at)
        assert (code, "--tokens" in err) == (2, True)
        code, out, _ = kvplane(*words, "--grpcurl")
        assert "Allocation/Retain" in out
