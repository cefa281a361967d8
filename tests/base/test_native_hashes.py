"""The compiled block hashes equal those in Python, byte for byte, and Python takes over where they are not."""

from __future__ import annotations

import importlib.util
import threading
from array import array
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import native_build
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, block_digest, native, pack_tokens
from kvplane.base.hashing import tokens as tokens_of
from kvplane.base.hashing.algorithms import FORMS, WITHOUT_SHA256, NativeDigest, python_digest
from kvplane.base.step import ExtraKeys
from kvplane.v1.allocation_pb2 import RequestContent

EDGES = [0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
tokens = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)
parents = st.binary(min_size=32, max_size=32)
algorithms = pytest.mark.parametrize("algorithm", FORMS)


def parent_of(algorithm: HashAlgorithm, given: bytes = bytes(32)) -> bytes:
    """A digest of the algorithm: the first of these 32 bytes."""
    return given[: python_digest(algorithm).size]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> ModuleType:
    """The module, compiled from the source in this tree."""
    path = tmp_path_factory.mktemp("native") / "_native.abi3.so"
    try:
        native_build.compile_library(native_build.HASHES, path, flags=native_build.WARNINGS)
    except native_build.CannotCompile as reason:
        if "there is no" not in str(reason):
            raise
        pytest.skip(f"{reason}: the compiled hashes are not tried")
    return load(path)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def native_of(algorithm: HashAlgorithm, compiled: ModuleType) -> NativeDigest:
    return NativeDigest(python_digest(algorithm), FORMS[algorithm], compiled.hash_run, compiled.MAX_BLOCK)


@algorithms
@given(blocks=st.lists(tokens, max_size=130), block_size=st.integers(1, 40), parent=parents)
def test_runs_equal_pythons(compiled, algorithm, blocks, block_size, parent):
    parent = parent_of(algorithm, parent)
    packed = pack_tokens(blocks[: len(blocks) // block_size * block_size])
    expected = python_digest(algorithm).hash_run(parent, packed, block_size)
    assert native_of(algorithm, compiled).hash_run(parent, packed, block_size) == expected
    for portable in (False, True):
        assert compiled.hash_run(FORMS[algorithm], parent, packed, block_size, portable) == expected


@given(ids=st.lists(tokens | st.sampled_from([True, -1, 2**32, 2**64, 1.0, None]), max_size=20))
def test_ids_of_a_list_are_packed_as_an_array_packs_them_or_are_left_to_python(compiled, ids):
    try:
        expected = array("I", ids).tobytes()
    except (OverflowError, TypeError):
        expected = None
    if all(type(one) is int for one in ids):
        assert compiled.pack_ids(ids) == expected
    else:
        assert compiled.pack_ids(ids) is None
    assert compiled.pack_ids(tuple(ids)) is compiled.pack_ids(range(3)) is None


@pytest.mark.parametrize("choice", ["on", "off"])
def test_token_ids_are_packed_with_and_without_the_compiled_module(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice if native._COMPILED is not None else "off")
    tokens_of._compiled.cache_clear()
    try:
        for ids in (EDGES, tuple(EDGES), [], [True, 5], array("I", EDGES), range(9)):
            assert pack_tokens(ids) == array("I", ids).tobytes()
        for wrong in (-1, 2**32, 2**70, 1.5, "5"):
            with pytest.raises(InvalidArgument, match="not a token id") as caught:
                pack_tokens([7, wrong])  # type: ignore[list-item]
            assert caught.value.field == "tokens[1]"
    finally:
        tokens_of._compiled.cache_clear()


@given(numbers=st.lists(st.integers(0, 2**32 - 1)))
def test_varints_are_those_of_protobuf(compiled, numbers):
    packed = RequestContent(token_ids=numbers).SerializeToString()
    begin = 1 + next(at for at, byte in enumerate(packed[1:], 1) if byte < 0x80) if packed else 0  # tag and length
    assert compiled.unpack_varints(memoryview(packed)[begin:]) == pack_tokens(numbers)


@pytest.mark.parametrize("wrong", [b"\x80", b"\x01\xff", b"\xff\xff\xff\xff\x10", b"\x80" * 9 + b"\x01", b"\x80" * 5])
def test_bytes_that_are_no_varints_of_32_bits_are_refused(compiled, wrong):
    with pytest.raises(ValueError, match="varints"):
        compiled.unpack_varints(b"\x05" + wrong)


@algorithms
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 23, 24, 255, 256, 512, 8191, 8192, 8193, 20_000])
def test_runs_equal_pythons_at_the_limits_of_a_form(compiled, algorithm, block_size):
    python = python_digest(algorithm)
    for token in (0, 2**31, 2**32 - 1):
        packed = pack_tokens([token] * (2 * block_size))
        expected = python.hash_run(parent_of(algorithm), packed, block_size)
        assert native_of(algorithm, compiled).hash_run(parent_of(algorithm), packed, block_size) == expected


@pytest.mark.parametrize("algorithm", WITHOUT_SHA256)
def test_xxh3_equals_the_package_for_every_length_of_a_message(compiled, algorithm):
    """Its steps differ for messages up to 128, up to 240 and of more bytes, and at multiples of 16, 64 and 1024."""
    for block_size in range(1, 420):
        packed = pack_tokens(range(1 << 16, (1 << 16) + block_size))
        expected = python_digest(algorithm).hash_run(bytes(range(16)), packed, block_size)
        assert compiled.hash_run(FORMS[algorithm], bytes(range(16)), packed, block_size) == expected, block_size


@algorithms
@given(prompt=st.lists(tokens, max_size=100), cuts=st.lists(st.integers(0, 100)), lookahead=st.integers(0, 3))
def test_requests_hash_equally_with_partial_tails_and_keys(compiled, algorithm, prompt, cuts, lookahead):
    scheme = HashScheme(python_digest(algorithm), parent_of(algorithm, bytes(range(32))), 4, lookahead)
    fast = HashScheme(native_of(algorithm, compiled), scheme.none_hash, 4, lookahead)
    expected = RequestHasher(scheme, ExtraKeys(salt="s")).append(pack_tokens(prompt))
    hasher, hashes, begin = RequestHasher(fast, ExtraKeys(salt="s")), b"", 0
    for end in [*sorted(cuts), len(prompt)]:
        hashes += hasher.append(pack_tokens(prompt[begin:end]))
        begin = max(begin, end)
    assert hashes == expected


@algorithms
@given(block=st.lists(tokens, max_size=40), parent=parents, extra=st.none() | st.just((("cache_salt", "s"),)))
def test_single_blocks_equal_pythons(compiled, algorithm, block, parent, extra):
    python, parent = python_digest(algorithm), parent_of(algorithm, parent)
    packed = pack_tokens(block)
    assert native_of(algorithm, compiled).hash_block(parent, packed, extra) == python.hash_block(parent, packed, extra)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((6, bytes(32), bytes(4), 1), "form"),
        ((-1, bytes(32), bytes(4), 1), "form"),
        ((0, bytes(31), bytes(4), 1), "parent"),
        ((0, bytes(16), bytes(4), 1), "parent"),
        ((3, bytes(32), bytes(4), 1), "parent"),
        ((0, bytes(32), bytes(5), 1), "packed"),
        ((0, bytes(32), bytes(12), 2), "packed"),
        ((0, bytes(32), b"", 0), "block_size"),
        ((0, bytes(32), b"", -1), "block_size"),
        ((0, bytes(32), b"", 8193), "block_size"),
    ],
)
def test_bad_input_is_refused(compiled, arguments, fault):
    with pytest.raises(ValueError, match=f"^{fault} must"):
        compiled.hash_run(*arguments)


def test_bad_types_are_refused(compiled):
    for arguments in ((0, "x" * 32, bytes(4), 1), (0, bytes(32), [1], 1), (0, bytes(32), bytes(4), 2**70), ()):
        with pytest.raises((TypeError, OverflowError, ValueError)):
            compiled.hash_run(*arguments)


def test_long_runs_of_several_threads_at_once_equal_pythons(compiled):
    digest, results = native_of(HashAlgorithm.KVPLANE, compiled), {}
    prompts = {i: pack_tokens(range(i, i + 65_536)) for i in range(4)}

    def hash_prompt(i):
        results[i] = digest.hash_run(bytes(32), prompts[i], 16)

    threads = [threading.Thread(target=hash_prompt, args=(i,)) for i in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    python = python_digest(HashAlgorithm.KVPLANE)
    assert results == {i: python.hash_run(bytes(32), packed, 16) for i, packed in prompts.items()}


class Slow:
    """Stands for the module on a processor without SHA instructions."""

    ACCELERATED = False
    MAX_BLOCK = 8192
    hash_run = None


class Fast(Slow):
    ACCELERATED = True


@pytest.mark.parametrize(
    ("choice", "module", "used", "said"),
    [
        ("", Fast, True, "compiled"),
        ("auto", Fast, True, "compiled"),
        ("auto", Slow, False, "Python (no SHA instructions"),
        ("on", Slow, True, "compiled, without SHA instructions"),
        ("auto", None, False, "Python (the compiled hashing is not installed: install g++"),
        ("off", Fast, False, "Python (KVPLANE_NATIVE=off)"),
    ],
)
def test_the_environment_selects(monkeypatch, choice, module, used, said):
    monkeypatch.setattr(native, "_COMPILED", module)
    monkeypatch.setattr(native, "_PROBLEM", "the compiled hashing is not installed")
    monkeypatch.setenv("KVPLANE_NATIVE", choice)
    assert isinstance(block_digest(HashAlgorithm.KVPLANE), NativeDigest) is used
    needs_no_sha = module is not None and choice != "off"
    assert isinstance(block_digest(HashAlgorithm.XXHASH), NativeDigest) is needs_no_sha
    assert native.describe().startswith(said)


def test_a_compiled_algorithm_can_be_copied(compiled):
    digest = native_of(HashAlgorithm.KVPLANE, compiled)
    packed = pack_tokens(range(64))
    assert deepcopy(digest).hash_run(bytes(32), packed, 16) == digest.hash_run(bytes(32), packed, 16)


@pytest.mark.parametrize(("choice", "error"), [("yes", InvalidArgument), ("on", FailedPrecondition)])
def test_a_choice_that_cannot_be_met_names_the_remedy(monkeypatch, choice, error):
    monkeypatch.setattr(native, "_COMPILED", None)
    monkeypatch.setenv("KVPLANE_NATIVE", choice)
    with pytest.raises(error, match="auto") as caught:
        block_digest(HashAlgorithm.KVPLANE)
    assert caught.value.field == "KVPLANE_NATIVE"
