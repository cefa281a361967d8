"""No content of a file that operators write raises anything but a KvplaneError, at the start or when it changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvplane.base.errors import KvplaneError
from kvplane_plan.models.hf_config import read_model
from kvplane_service import config_loading
from kvplane_service.auth.files import Reloaded
from kvplane_service.auth.owners import read_owners
from kvplane_service.auth.tokens import read_tokens
from kvplane_service.auth.web_tokens import read_web_tokens

DEEP = 200_000
TEXTS = (
    b"a: {2024-99-99: 1}",
    b"a: " + b"9" * 5000,
    b"[" * DEEP,
    b'{"a": ' * DEEP,
    b"- " * 4000,
    b"&a [*a]",
    b"a: &b {c: *b}",
    b"? [a]\n: b",
    b"a: !!python/object/apply:os.system [x]",
    b"\xff\xfe\x00",
    b"a: .inf\nb: .nan",
    b'{"keys": [{"kid": "a", "kty": "RSA", "n": "!", "e": "AQAB"}]}',
    b'{"keys": [{"kid": "a", "kty": "EC", "crv": "P-256", "x": 1, "y": {}}]}',
    b'{"num_hidden_layers": 1' + b"0" * 5000 + b"}",
)
OWNERS = b"acme: {scopes: [read], limits: {blocks: 5}, replicas: ['a/*'], domains: ['']}\nrival: {}\n"
MODEL = json.dumps(
    {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
).encode()
READERS: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "owners": (lambda path: read_owners(str(path)), OWNERS),
    "keys": (lambda path: read_web_tokens(str(path), "i", "a"), b'{"keys": [{"kid": "a", "kty": "oct", "k": "AA"}]}'),
    "tokens": (lambda path: read_tokens(str(path)), b"sha256:" + b"0" * 64 + b" acme\n"),
    "model": (read_model, MODEL),
    "config": (lambda path: config_loading.load({}, {}, path), b"listen: 127.0.0.1:0\nlease_ms: 500\n"),
}
MUTATIONS = 150


def mutated(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(damaged) + 1)
        patch = rng.choice([b"", rng.randbytes(2), b"[", b"{", b":", b"*", b"&", b"-9", b"~"])
        damaged[at : at + rng.randint(0, 3)] = patch
    return bytes(damaged)


@pytest.mark.parametrize("kind", READERS)
def test_whatever_a_file_contains_is_read_or_refused(tmp_path, kind):
    read, valid = READERS[kind]
    rng = random.Random(kind)
    path = tmp_path / "file"
    for text in (*TEXTS, *(mutated(valid, rng) for _ in range(MUTATIONS))):
        path.write_bytes(text)
        with suppress(KvplaneError):
            read(path)


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), MemoryError()])
def test_a_changed_file_that_cannot_be_read_leaves_the_old_content(tmp_path, caplog, error):
    path = tmp_path / "file"
    path.write_text("old")

    def read() -> str:
        if path.read_text() == "new":
            raise error
        return path.read_text()

    content = Reloaded([str(path)], read)
    path.with_name("next").write_text("new")
    path.with_name("next").rename(path)
    assert [content.get(), content.get()] == ["old", "old"]
    assert len([record for record in caplog.records if "the old content stays in use" in record.message]) == 1
    path.with_name("next").write_text("newer")
    path.with_name("next").rename(path)
    assert content.get() == "newer"
