"""Sizes and durations with units in every file and option of an operator; keys that stand twice; words of libraries."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.settings_file import in_named_unit, parse_yaml
from kvplane.base.units import parse_bytes, parse_duration
from kvplane_fleet.settings import load as load_fleet
from kvplane_service.auth.owners import read_owners
from kvplane_service.config import Config
from kvplane_service.config_loading import load

TIMES = [key for key in Config.model_fields if key.endswith("_ms")]
SIZES = [key for key in Config.model_fields if key.endswith("_bytes")]


def test_units_are_exact_and_numbers_keep_their_unit():
    assert [parse_duration(text, "f", "ms") for text in ("10", "10s", "0.3 s", "2m", "1h", "1500us")] == [
        10, 10_000, 300, 120_000, 3_600_000, 1.5,
    ]  # fmt: skip
    assert [parse_bytes(text) for text in ("7", "8GiB", "64 MB", "0.5KiB")] == [7, 8 << 30, 64_000_000, 512]
    assert parse_bytes("16", unit="MiB") == parse_bytes("16MiB") == 16 << 20
    for wrong in ("", "s", "-1s", "1e3s", "10 parsecs", "1s2s", "١s", "nan", "10" * 20):
        for parse in (parse_duration, parse_bytes):
            with pytest.raises(InvalidArgument) as refused:
                parse(wrong, "f")
            assert (refused.value.field, bool(refused.value.remedy)) == ("f", True)


@pytest.mark.parametrize("key", TIMES)
def test_every_time_of_the_service_takes_a_unit(key, tmp_path):
    file = tmp_path / "k.yaml"
    file.write_text(f"{key}: 3s\n")
    assert getattr(load({}, {}, file).config, key) == 3000
    assert getattr(load({key: "3s"}, {}, None).config, key) == 3000
    assert getattr(load({}, {f"KVPLANE_{key.upper()}": "3000"}, None).config, key) == 3000
    with pytest.raises(InvalidArgument) as refused:
        load({key: "3 moons"}, {}, None)
    assert refused.value.field == key


@pytest.mark.parametrize("key", SIZES)
def test_every_size_of_the_service_takes_a_unit(key):
    assert getattr(load({key: "64MiB"}, {}, None).config, key) == 64 << 20
    assert getattr(load({key: str(64 << 20)}, {}, None).config, key) == 64 << 20


def test_a_part_of_a_unit_is_refused():
    with pytest.raises(InvalidArgument) as refused:
        load({"lease_ms": "1500us"}, {}, None)
    assert refused.value.field == "lease_ms"


def test_words_and_counts_are_no_quantities():
    assert in_named_unit("store_prefix", "10s") == "10s"
    assert in_named_unit("host_tokens_per_s", "5s") == "5s"
    assert in_named_unit("bytes_per_second", "8MiB") == 8 << 20


def test_limits_of_owners_and_settings_of_a_router_take_units(tmp_path):
    owners = tmp_path / "owners.yaml"
    owners.write_text("acme: {limits: {bytes_per_second: 8MiB}}\n")
    acme = read_owners(str(owners)).get("acme")
    assert acme is not None
    assert acme.limits.bytes_per_second == 8 << 20
    places = tmp_path / "places.yaml"
    places.write_text("places: []\nrouter: {forget_after_s: 5m, decode_s: 20ms, max_body_bytes: 32MiB}\n")
    router = load_fleet(places).router
    assert (router.forget_after_s, router.decode_s, router.max_body_bytes) == (300, 0.02, 32 << 20)


TWICE = {
    "config": "lease_ms: 5\nlog_level: INFO\nlease_ms: 6\n",
    "owners": "acme: {}\nrival: {}\nacme: {}\n",
    "fleet": "places: []\nrouter: {decode_s: 1,\n decode_s: 2}\n",
}


@pytest.mark.parametrize(("what", "text"), TWICE.items(), ids=list(TWICE))
def test_a_key_that_stands_twice_is_refused_by_name(what, text, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    read = {
        "config": lambda: load({}, {}, path),
        "owners": lambda: read_owners(str(path)),
        "fleet": lambda: load_fleet(path),
    }
    with pytest.raises(KvplaneError) as refused:
        read[what]()
    key = {"config": "lease_ms", "owners": "acme", "fleet": "decode_s"}[what]
    assert f"the key '{key}' stands twice, in lines " in str(refused.value)


def test_merged_and_equal_keys_of_two_mappings_are_no_repetition():
    text = b"a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [{x: 1}, {x: 2}]\n"
    assert parse_yaml(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": [{"x": 1}, {"x": 2}]}
    for odd in (b"? [a]\n: 1\n", b"a: [", b"\xff", b"x: 2001-99-99"):
        with pytest.raises(ValueError, match=r"\w"):
            parse_yaml(odd)


@pytest.mark.parametrize("key", ["listen", "session_socket", "metrics_listen", "log_level", "tls_client_auth"])
def test_no_word_of_the_validator_is_shown(key):
    value = {"session_socket": "unix:x", "tls_client_auth": "optional"}.get(key, "nonsense")
    with pytest.raises(InvalidArgument) as refused:
        load({key: value}, {}, None)
    assert "Value error" not in str(refused.value)


def test_no_word_of_the_validator_is_shown_of_owners(tmp_path):
    path = tmp_path / "owners.yaml"
    path.write_text("acme: {domains: ['a*b']}\n")
    with pytest.raises(InvalidArgument) as refused:
        read_owners(str(path))
    assert "Value error" not in str(refused.value)
