"""The public names of `import kvplane`, and the modules that it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvplane
import kvplane.api

HEAVY = ("torch", "typer", "redis", "pydantic", "rich", "yaml", "opentelemetry", "grpc_status", "kvplane_service")


def loaded_after(code):
    """The modules that a fresh interpreter has loaded when it has run the code."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_every_public_name_can_be_imported():
    for name in kvplane.api.__all__:
        assert getattr(kvplane, name) is getattr(kvplane.api, name)


def test_no_public_name_hides_a_module():
    namespace: dict[str, object] = {}
    exec("from kvplane import *", namespace)
    assert set(kvplane.api.__all__) <= set(namespace)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        getattr(kvplane, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match="_private"):
        getattr(kvplane, "_private")  # noqa: B009


def test_importing_the_types_does_not_load_grpc():
    loaded = loaded_after("import kvplane, kvplane.base.step, kvplane.base.hashing")
    assert not loaded & {"grpc", "google.protobuf", "asyncio", "kvplane.api", *HEAVY}


def test_importing_the_session_machine_loads_neither_grpc_nor_protobuf():
    loaded = loaded_after("import kvplane.session.machine, kvplane.session.rows, kvplane.session.tables, kvplane.rank")
    assert not loaded & {"grpc", "google.protobuf", "kvplane.api", *HEAVY}


def test_the_client_loads_only_its_three_dependencies():
    loaded = loaded_after("import kvplane\nkvplane.connect, kvplane.aio")
    assert {"grpc", "google.protobuf"} <= loaded
    assert not loaded & set(HEAVY)
