"""The bench of hashing counts the bytes that are hashed."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import xxhash

from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import algorithms, pack_tokens
from kvplane.base.hashing.algorithms import FORMS
from tests.bench import hashing


@pytest.mark.parametrize("algorithm", FORMS)
def test_message_bytes_is_the_length_of_what_python_hashes(monkeypatch, algorithm: HashAlgorithm):
    lengths: list[int] = []

    def counted(data: bytes) -> Any:
        lengths.append(len(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(algorithms, "sha256", counted)
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: counted(data).digest()[:16])
    packed = pack_tokens(range(240, 304))
    digest = algorithms.python_digest(algorithm)
    digest.hash_run(bytes(digest.size), packed, 16)
    assert lengths == hashing.message_bytes(algorithm, packed, 16)
