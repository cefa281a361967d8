"""`kvplane prefetch` copies what only the disk has of a prompt to the host tier."""

from __future__ import annotations

from kvplane import connect
from kvplane_service.config import Config
from tests.service.rig import running
from tests.service.test_prefetch_call import served


def test_prefetch_says_what_is_copied(kvplane, tmp_path):
    file = tmp_path / "tokens"
    file.write_text(" ".join(["3"] * 65))
    words = ("prefetch", "r", "--tokens", str(file))
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client, served(client) as engine:
        with engine.idling():
            code, out, _ = kvplane(*words, "--service", service.address)
        assert (code, "a hit of 64 tokens" in out, "4 blocks copied" in out) == (0, True, True), out
        code, _, err = kvplane("prefetch", "r", "--service", service.address)
        assert (code, "--tokens" in err) == (2, True)
        code, out, _ = kvplane(*words, "--grpcurl")
        assert "Allocation/Prefetch" in out
