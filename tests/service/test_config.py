"""The sources of a configuration, their precedence, and refused values."""

from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_service.config import KEYS, Config
from kvplane_service.config_loading import load, split_setting


def write(tmp_path, text: str):
    path = tmp_path / "kvplane.yaml"
    path.write_text(text)
    return path


def test_default_limits():
    config = Config()
    assert config.max_rows_per_step == 4096
    assert config.max_message_bytes == 32 << 20
    assert config.max_replicas == 1024
    assert config.max_groups == 64
    assert config.max_steps_in_flight == 4
    assert config.lease_ms == 10_000
    assert config.events_resume == 4096
    assert config.listen == "127.0.0.1:7070"


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = write(tmp_path, "lease_ms: 1\nop_window: 1\nmax_replicas: 1\n")
    environment = {"KVPLANE_LEASE_MS": "2", "KVPLANE_OP_WINDOW": "2"}
    loaded = load({"lease_ms": "3"}, environment, file)
    assert (loaded.config.lease_ms, loaded.config.op_window, loaded.config.max_replicas) == (3, 2, 1)
    sources = loaded.sources
    assert (sources["lease_ms"], sources["op_window"]) == ("flag", "KVPLANE_OP_WINDOW")
    assert (sources["max_replicas"], sources["max_groups"]) == (str(file), "default")


def test_limits_follow_from_the_memory_where_they_are_not_set(tmp_path):
    def machine() -> tuple[int, str]:
        return 8 << 30, "half of the machine's memory"

    loaded = load({}, {}, None, machine)
    assert loaded.config.max_total_blocks == ((8 << 30) - (512 << 20)) // 450
    assert "half of the machine's memory" in loaded.sources["max_total_blocks"]
    assert loaded.config.log_bytes == 256 << 20
    given = load({"memory_bytes": 1 << 30}, {}, None, machine)
    assert given.config.log_bytes == 64 << 20
    assert given.config.max_total_blocks == ((1 << 30) - (320 << 20)) // 450
    assert "flag" in given.sources["log_bytes"]
    file = write(tmp_path, "max_total_blocks: 50\nlog_bytes: 2000000\n")
    assert load({}, {}, file, machine).config == Config(max_total_blocks=50, log_bytes=2_000_000)
    assert load({}, {}, None).config == Config(), "the memory is unknown"
    with pytest.raises(InvalidArgument) as caught:
        load({"memory_bytes": "4Gi"}, {}, None)
    assert caught.value.field == "memory_bytes"


def test_printed_configuration_loads_as_a_file(tmp_path):
    loaded = load({"listen": "unix:x.sock", "reflection": "false"}, {}, None)
    text = loaded.as_yaml()
    assert "listen: unix:x.sock  # flag" in text
    assert load({}, {}, write(tmp_path, text)).config == loaded.config
    assert set(yaml.safe_load(text)) == set(KEYS)


def test_an_empty_config_file_has_the_defaults(tmp_path):
    assert load({}, {}, write(tmp_path, "")).config == Config()


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().lease_ms = 1


@pytest.mark.parametrize("source", ["flag", "file", "environment"])
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path, source):
    flags = {"leese_ms": "1"} if source == "flag" else {}
    file = write(tmp_path, "leese_ms: 1") if source == "file" else None
    environment = {"KVPLANE_LEESE_MS": "1"} if source == "environment" else {}
    with pytest.raises(InvalidArgument, match=r"(?i)leese_ms") as caught:
        load(flags, environment, file)
    assert "lease_ms" in caught.value.remedy.lower()


def test_kubernetes_service_variables_are_ignored():
    environment = {"KVPLANE_SERVICE_HOST": "10.0.0.1", "KVPLANE_PORT": "tcp://10.0.0.1:7070", "PATH": "x"}
    assert load({}, environment, None).config == Config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen", "127.0.0.1"),
        ("listen", "127.0.0.1:70000"),
        ("listen", "localhost:http"),
        ("listen", ":7070"),
        ("listen", "unix:"),
        ("lease_ms", "0"),
        ("lease_ms", "soon"),
        ("lease_ms", "1.5"),
        ("max_groups", "65"),
        ("max_token_id", str(2**32)),
        ("reflection", "perhaps"),
        ("log_level", "LOUD"),
        ("max_message_bytes", "-1"),
    ],
)
def test_an_invalid_value_is_refused_by_key(key, value):
    with pytest.raises(InvalidArgument) as caught:
        load({}, {f"KVPLANE_{key.upper()}": value}, None)
    assert caught.value.field == key
    assert value in caught.value.message
    assert f"KVPLANE_{key.upper()}" in caught.value.message


@pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", "\x00"])
def test_a_config_file_that_is_not_a_mapping_is_refused(tmp_path, text):
    with pytest.raises(InvalidArgument, match=r"kvplane\.yaml"):
        load({}, {}, write(tmp_path, text))


def test_a_missing_config_file_is_refused_by_name(tmp_path):
    with pytest.raises(NotFound, match="nowhere"):
        load({}, {}, tmp_path / "nowhere.yaml")


def test_a_setting_needs_an_equals_sign():
    assert split_setting("lease_ms = 5") == ("lease_ms", "5")
    with pytest.raises(InvalidArgument, match="KEY=VALUE"):
        split_setting("lease_ms")


CONTRADICTIONS = [
    ({"tls_cert": "c"}, "tls_key"),
    ({"tls_key": "k"}, "tls_cert"),
    ({"store_tls_cert": "c"}, "store_tls_key"),
    ({"tls_client_auth": "require", "tls_client_ca": "a"}, "tls_client_auth"),
    ({"tls_cert": "c", "tls_key": "k", "tls_client_auth": "require"}, "tls_client_ca"),
    ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, "tls_client_auth"),
    ({"listen": "127.0.0.1:7071", "health_listen": "127.0.0.1:7071"}, "health_listen"),
    ({"metrics_listen": "127.0.0.1:7070"}, "metrics_listen"),
]


@pytest.mark.parametrize(("flags", "field"), CONTRADICTIONS)
def test_contradictory_values_are_refused_with_a_remedy(flags, field):
    with pytest.raises(InvalidArgument) as caught:
        load(flags, {}, None)
    assert caught.value.field == field
    assert caught.value.remedy


def test_an_optional_client_certificate_is_refused():
    with pytest.raises(InvalidArgument, match="none or require"):
        load({"tls_client_auth": "optional"}, {}, None)


@pytest.mark.parametrize("given", [True, "TRUE", "true"])
def test_reflection_off_is_read_as_a_word_and_not_a_boolean(given):
    assert load({"reflection": given}, {}, None).config.reflection == "true"
    assert Config().reflection == "auto"


def test_variables_of_the_client_are_accepted():
    names = ("TLS_CA", "CA_FILE", "CERT_FILE", "KEY_FILE", "TOKEN_FILE", "TOKEN", "SERVICE", "ADDRESS", "CONFIG")
    assert load({}, {f"KVPLANE_{name}": "x" for name in names}, None).config == Config()
