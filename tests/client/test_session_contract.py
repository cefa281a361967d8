"""The contract of sessions, on each transport that exists."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.client.session_contract import SessionContract
from tests.client.worlds import GrpcWorld, InProcessWorld


class TestInProcess(SessionContract):
    @pytest.fixture
    def world(self):
        return InProcessWorld()


@pytest.fixture(scope="module")
def tcp():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


@pytest.fixture(scope="module")
def unix_socket(tmp_path_factory):
    with closing(GrpcWorld(f"unix:{tmp_path_factory.mktemp('socket')}/kvplane.sock")) as world:
        yield world


class TestTcp(SessionContract):
    @pytest.fixture
    def world(self, tcp):
        tcp.reset()
        return tcp


class TestUnixSocket(SessionContract):
    @pytest.fixture
    def world(self, unix_socket):
        unix_socket.reset()
        return unix_socket
