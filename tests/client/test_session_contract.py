"""The contract of sessions, on each transport that exists."""

from __future__ import annotations

import pytest

from tests.client.session_contract import SessionContract
from tests.client.worlds import InProcessWorld


class TestInProcess(SessionContract):
    @pytest.fixture
    def world(self):
        return InProcessWorld()
