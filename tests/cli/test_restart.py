"""kill -9 of a real service under a running engine: a pause, not an error, and the cache is warm."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

import kvplane
from kvplane import AdmitRow, NewsRow, Part, connect, part_of
from kvplane.base.errors import KvplaneError
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.store.sqlite import SqliteStore
from tests.cli.processes import run_kvplane
from tests.cli.test_serve import serving
from tests.client.lasting import HYBRID, LastingEngine
from tests.client.lasting import ONE_GROUP as SPEC
from tests.client.mini_engine import MiniEngine
from tests.store import servers


def wait_until_stored(client) -> None:
    def is_stored():
        status = client.describe_replica("r").store
        return status.state == pb.STORE_STATE_OK and status.lag_entries == 0

    servers.wait_until(is_stored, "everything published is stored")


def killed_under_an_engine(store: str, spec) -> None:
    address = f"127.0.0.1:{servers.free_port()}"
    settings = ("--set", f"store={store}", "--set", "store_flush_ms=5")
    with kvplane.connect(address) as client:
        with serving(*settings, listen=address) as (process, _):
            client.register_replica("r", spec)
            engine = LastingEngine(lambda revive: client.lasting_session("r", revive), spec.num_blocks)
            for _ in range(12):
                engine.step()
            wait_until_stored(client)
            process.kill()
            process.wait()
        with serving(*settings, listen=address):
            engine.run()
            status = client.describe_replica("r").store
            assert status.recovered_entries > 0
            assert not status.refused_chunks
            assert engine.revivals == 1
            assert engine.hits_since_revival > 0
            engine.session.close()


def test_an_engine_outlives_a_killed_service_on_sqlite(tmp_path):
    killed_under_an_engine(f"sqlite:{tmp_path / 'entries.db'}", SPEC)


def test_an_engine_outlives_a_killed_service_on_redis(tmp_path):
    with servers.serving(tmp_path) as server:
        killed_under_an_engine(f"redis://{server.address}", HYBRID)


def test_an_engine_without_stamps_outlives_a_killed_service(tmp_path):
    """As in README: it loses the cache, but no request."""
    address = f"127.0.0.1:{servers.free_port()}"
    settings = ("--set", f"store=sqlite:{tmp_path / 'entries.db'}", "--set", "store_flush_ms=5")
    with kvplane.connect(address) as client:
        with serving(*settings, listen=address) as (process, _):
            client.register_replica("r", SPEC)
            session = client.session("r")
            engine = MiniEngine(lambda part: session.apply(part).parts[0])
            for _ in range(12):
                engine.step()
            wait_until_stored(client)
            process.kill()
            process.wait()
        with serving(*settings, listen=address):
            epoch, running = session.epoch, len(engine.running)
            engine.step()
            assert engine.log[-1].preempted
            assert engine.num_preempted >= running > 0
            assert session.epoch > epoch
            engine.run()
            session.close()


def test_decisions_before_a_recovery_are_not_recorded(kvplane, tmp_path):
    """The decision log does not cover the time before a recovery: no cause is claimed for it."""
    address = f"127.0.0.1:{servers.free_port()}"
    settings = ("--set", f"store=sqlite:{tmp_path / 'entries.db'}", "--set", "store_flush_ms=5")
    prompt = list(range(100))

    def ask(*words: str) -> str:
        return " ".join(kvplane(*words, "--service", address)[1:])

    with connect(address) as client:
        with serving(*settings, listen=address) as (process, _):
            client.register_replica("r", SPEC)
            with client.session("r") as session:
                session.apply(part_of(NewsRow(0, tokens=prompt), AdmitRow(0)))
                session.apply(Part())
                wait_until_stored(client)
            process.kill()
            process.wait()
        with serving(*settings, listen=address):
            assert "replicas: 1 (0 live, 0 idle, 0 lapsed, 1 recovering)" in ask("status")
            assert "r recovering" in " ".join(ask("top", "--once").split())
            assert "store: ok, 0 changes pending, 0 of " in ask("describe", "r")
            (tmp_path / "prompt").write_text(str(prompt))
            question = ("explain", "r", "--tokens", str(tmp_path / "prompt"))
            assert "the engine of r has not reconnected" in ask(*question)
            with client.session("r"):
                assert "cause: not recorded: " in ask(*question)
                errors = ask("record", "r", str(tmp_path / "log"))
            assert "it was recovered from a store, which has no earlier decisions (record from now on" in errors


def letter(path):
    path.write_text("no database at all, but a letter to a friend")


def newer(path):
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(("made", "words"), [(letter, "not written by kvplane"), (newer, "run a newer kvplane")])
def test_an_unusable_store_is_one_error_line_and_unchanged(made, words, tmp_path):
    path = tmp_path / "entries.db"
    made(path)
    before = path.read_bytes()
    done = run_kvplane("serve", "--listen", "127.0.0.1:0", "--set", f"store=sqlite:{path}")
    assert done.returncode == 1
    assert done.stderr.startswith("kvplane: store: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert path.read_bytes() == before


def test_a_wrong_password_is_one_error_line(tmp_path):
    with servers.guarded(tmp_path / "guarded") as (server, authority):
        fields = {"store": f"rediss://{server.address}", "store_tls_ca": authority, "store_username": servers.USER}
        flags = [text for key, value in fields.items() for text in ("--set", f"{key}={value}")]
        done = run_kvplane("serve", "--listen", "127.0.0.1:0", *flags, "--set", "store_password=a guess")
    assert done.returncode == 1
    assert done.stderr.startswith("kvplane: store_password: ")
    assert "ACL" in done.stderr
    assert "a guess" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_clients_see_the_state_of_the_store(tmp_path):
    with servers.serving(tmp_path) as server:
        settings = ("--set", f"store=redis://{server.address}", "--set", "store_flush_ms=5")
        with serving(*settings) as (_, address), kvplane.connect(address) as client:
            client.register_replica("r", SPEC)
            wait_until_stored(client)
            server.kill()
            engine = LastingEngine(lambda revive: client.lasting_session("r", revive), SPEC.num_blocks)
            engine.run()
            servers.wait_until(
                lambda: client.describe_replica("r").store.state == pb.STORE_STATE_DEGRADED, "the loss is seen"
            )
            assert "Connection" in client.describe_replica("r").store.problem
            server.start()
            wait_until_stored(client)
            engine.session.close()


def test_a_restart_ends_a_session_without_remember(tmp_path):
    address = f"127.0.0.1:{servers.free_port()}"
    settings = ("--set", f"store=sqlite:{tmp_path / 'entries.db'}")
    with kvplane.connect(address) as client:
        with serving(*settings, listen=address) as (process, _):
            client.register_replica("r", SPEC)
            session = client.session("r", remember=False)
            process.kill()
            process.wait()
        with serving(*settings, listen=address), pytest.raises(KvplaneError, match="was restarted"):
            session.apply(kvplane.Part())
