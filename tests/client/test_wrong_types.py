"""Arguments of any wrong type are refused with the expected type, and the session or client stays usable."""

from __future__ import annotations

import inspect
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvplane import aio
from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec, Layer
from kvplane.base.requests import Allocate, Appended, At, Commit, Content, Ending
from kvplane.base.session import OpenRequest
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.step import (
    Admit,
    Budget,
    Cache,
    End,
    ExtraKeys,
    Facts,
    Multimodal,
    News,
    OnRefusal,
    Part,
    Peek,
    Resume,
    Run,
)
from kvplane.base.typed import check
from kvplane.blocking.session import Session
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, PeekRow, RunRow, part_of
from tests.client.loop_thread import Blocking, shared_loop
from tests.client.worlds import GrpcWorld

JUNK = st.sampled_from(
    [1.5, "text", "", b"bytes", object(), {"a": 1}, {"a"}, ["text"], [1.5], [None], [[1]], ("a",), -(2**70), None, max]
)
KEYS = ExtraKeys(("name", "path"), "salt", (Multimodal("m", 0, 4),), (b"d" * 32,))
PART = Part(
    facts=Facts([0], [20], [1], [7], commit=[20], end=[0], fence=[0]),
    cache=Cache([], [1], [], reset=True),
    news=News([1], [20], list(range(20)), [0], b"", ["a"], ["d"], [KEYS], [0], [30], ["t"]),
    run=Run([0], [0], [9], [0], [0], [0], [0], OnRefusal.SKIP),
    admit=Admit([1], [0], [9], [0], [0], [-1], [0], [0], [0], [0], 5, OnRefusal.SKIP, True),
    peek=Peek([1], True),
    budget=Budget(100, 100, 1),
    with_hashes=True,
    with_tables=True,
)
ROWS = (
    NewsRow(1, [1, 2], 0, [], "a", "d", KEYS, False, 9, "t"),
    NewsRow(1, [], 16, [b"h" * 32]),
    FactRow(0, [1]),
    RunRow(0, 1, 2, 3),
    AdmitRow(1, 1),
    PeekRow(1),
)
LAYER = Layer("l", FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=DType.BFLOAT16))
CALLS: dict[str, tuple[Any, ...]] = {
    "register_replica": ("r", ModelSource(model="llama-3.1-8b", num_blocks=64)),
    "register_replica ": ("r", LayerSource(layers=(LAYER,), num_blocks=64)),
    "deregister_replica": ("r", 1),
    "describe_replica": ("r",),
    "find_cache_hit": ("r", Content([1, 2], extra_keys=KEYS)),
    "allocate_slots": ("r", Allocate("a", Content(num_tokens=16, hashes=[b"h" * 32]), 1, Appended([1]), 5), At(1, "o")),
    "commit_blocks": ("r", Commit("a", 1, Appended([1]), 2), At()),
    "free": ("r", "a", Ending.HELD),
    "evict_blocks": ("r", [1, 2], At()),
    "reset_prefix_cache": ("r", At()),
    "prefetch": ("r", Content(token_ids=[1]), 1.0, At()),
    "retain": ("r", Content(token_ids=[1]), 1.0, 3, At()),
    "snapshot": ("r",),
    "list_requests": ("r", 5),
    "explain": ("r", "a"),
    "session": ("r",),
    "lasting_session": ("r", max),
}
SHARED = [HealthCheck.function_scoped_fixture]  # one session lives through all of it
MANY = settings(max_examples=300, deadline=None, suppress_health_check=SHARED)


def other(value: Any) -> Any:
    """Of a type that is not asked for."""
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all that can be put in another's place: fields, and entries of sequences."""
    found = [path] if path else []
    if is_dataclass(value):
        for one in fields(value):
            found += places(getattr(value, one.name), (*path, one.name))
    elif isinstance(value, (list, tuple)):
        for at, entry in enumerate(value):
            found += places(entry, (*path, at))
    return found


def put(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """A copy with `junk` at the path."""
    if not path:
        return junk
    first, *rest = path
    if isinstance(first, str):
        return replace(value, **{first: put(getattr(value, first), tuple(rest), junk)})
    return type(value)([*value[:first], put(value[first], tuple(rest), junk), *value[first + 1 :]])


@pytest.fixture(scope="module")
def world():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


@pytest.fixture(params=["blocking", "asyncio"])
def client(request, world):
    world.reset()
    if request.param == "blocking":
        yield world.client
        return
    inner = shared_loop().make(aio.connect, world.service.address)
    yield Blocking(inner)
    shared_loop().do(inner.close)


@pytest.fixture
def session(client, world):
    opened = client.session(world.replica)
    session = opened if isinstance(opened, Session) else Blocking(opened)
    session.apply(part_of(NewsRow(0, range(20)), AdmitRow(0)))
    yield session
    session.close()


def refusal(act) -> Exception | None:
    """What it is refused by; None also where it was understood and cannot be done."""
    try:
        act()
    except (InvalidArgument, TypeError) as error:
        return error
    except KvplaneError:
        return None
    return None


def refused(act) -> bool:
    """Whether it is refused, and says what was expected."""
    error = refusal(act)
    assert not isinstance(error, KvplaneError) or (error.field and error.message)
    return error is not None


def fits(part: Part) -> bool:
    """Whether the annotations allow it after all: a string was another string."""
    try:
        check(part, Part, "")
    except InvalidArgument:
        return False
    return True


def test_a_part_of_valid_values_is_accepted(session):
    assert session.apply(PART).parts[0].peek_hit
    session.apply(part_of(FactRow(1, end=End.FREE)))


@MANY
@given(path=st.sampled_from(places(PART)), junk=JUNK)
@example(path=("news", "domain"), junk={"a": 1})  # was applied by the service, and broke the session
@example(path=("news", "request_id"), junk={"a"})
@example(path=("with_tables",), junk=1.5)
def test_a_part_with_a_wrong_type_is_refused_and_leaves_the_session_usable(session, path, junk):
    try:
        part = put(PART, path, junk)
    except (InvalidArgument, TypeError):
        return
    was_refused = refused(lambda: session.apply(part))
    if not was_refused:
        assert not junk or fits(part), (path, junk)
        session.apply(part_of(FactRow(1, end=End.FREE)))
    assert session.in_flight == 0
    assert session.apply(part_of(PeekRow(0))).parts[0].peek_hit


@MANY
@given(row=st.sampled_from(ROWS), junk=JUNK, data=st.data())
def test_a_row_with_a_wrong_type_is_refused(session, row, junk, data):
    path = data.draw(st.sampled_from(places(row)))
    refused(lambda: session.apply(part_of(put(row, path, junk))))
    assert session.in_flight == 0
    assert session.apply(part_of(PeekRow(0))).parts[0].peek_hit


@MANY
@given(junk=JUNK, name=st.sampled_from(["part", "parts", "row", "last", "executed_through", "budget", "cache"]))
def test_a_session_call_with_a_wrong_type_is_refused(session, junk, name):
    good = Part(peek=Peek([0]))
    acts = {
        "part": lambda: session.apply(junk),
        "parts": lambda: session.apply(good, junk),
        "row": lambda: part_of(PeekRow(0), junk),
        "last": lambda: session.submit(good, last=junk),
        "executed_through": lambda: session.apply(good, executed_through=junk),
        "budget": lambda: session.apply(part_of(budget=junk)),
        "cache": lambda: session.apply(part_of(cache=junk)),
    }
    default = junk is None if name == "executed_through" else not junk and name in ("budget", "cache")
    assert refused(acts[name]) or default
    assert session.in_flight == 0
    assert session.apply(good).parts[0].peek_hit


@settings(max_examples=600, deadline=None, suppress_health_check=SHARED)
@given(name=st.sampled_from(sorted(CALLS)), junk=JUNK, data=st.data())
def test_a_unary_call_with_a_wrong_type_is_refused(client, world, name, junk, data):
    arguments = CALLS[name]
    path = data.draw(st.sampled_from(places(arguments)))
    try:
        wrong = put(arguments, path, junk)
    except (InvalidArgument, TypeError):
        return
    refused(lambda: getattr(client, name.strip())(*wrong))
    assert client.describe_replica(world.replica).state


def test_every_public_call_is_covered(client):
    kind = type(client) if not isinstance(client, Blocking) else aio.Client
    public = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    assert public - {name.strip() for name in CALLS} == {"close", "list_replicas", "status", "drain", "subscribe"}


@pytest.mark.parametrize(
    ("act", "field", "says"),
    [
        (lambda: part_of(NewsRow(1, other(5))), "rows[0].tokens", "5 is not a sequence, each an integer"),
        (lambda: part_of(NewsRow(1, [1], hashes=other(["abc"]))), "rows[0].hashes[0]", "'abc' is not bytes"),
        (lambda: part_of(PeekRow(1), other("junk")), "rows[1]", "'junk' is not a FactRow or a NewsRow"),
        (lambda: ExtraKeys(lora=other("ad")), "extra_keys.lora", "'ad' is not a tuple of a string, a string or None"),
        (lambda: ExtraKeys(lora=other(("a", "b", "c"))), "extra_keys.lora", "is not a tuple of a string, a string"),
    ],
)
def test_the_refusal_of_a_row_names_the_field(act, field, says):
    with pytest.raises(InvalidArgument) as caught:
        act()
    assert caught.value.field == field
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("part", "field", "says"),
    [
        (part_of(NewsRow(1, [1], request_id=other(17))), "parts[0].news.request_id[0]", "17 is not a string"),
        (
            part_of(NewsRow(1, [1], extra_keys=other("salt"))),
            "parts[0].news.extra_keys[0]",
            "'salt' is not a ExtraKeys",
        ),
        (part_of(NewsRow(1, [1], domain=other(None))), "parts[0].news.domain[0]", "None is not a string"),
        (part_of(RunRow(other("a"))), "parts[0].run.slot", "entry 0 is 'a', which is no valid u32"),
        (part_of(RunRow(0, extra=other(1.5))), "parts[0].run.extra", "entry 0 is 1.5, which is no valid i32"),
        (part_of(budget=Budget(tokens=other(None))), "parts[0].budget.tokens", "None is not an integer"),
        (Part(facts=other(None)), "parts[0].facts", "None is not a Facts"),
        (Part(news=News([1], [1], [1], request_id=other("a"))), "parts[0].news.request_id", "'a' is not a sequence"),
        (Part(run=Run(slot=other(b"1234"))), "parts[0].run.slot", "is not a sequence, each an integer"),
        (NewsRow(1, [1]), "parts[0]", "is not a Part"),
        (Part(resume=Resume([0], other("a"))), "parts[0].resume.computed", "'a' is not a sequence"),
    ],
)
def test_the_refusal_of_a_part_names_the_field(session, part, field, says):
    with pytest.raises(InvalidArgument) as caught:
        session.apply(part)
    assert caught.value.field == field
    assert says in caught.value.message
    assert session.apply(part_of(PeekRow(0))).parts[0].peek_hit


def test_the_refusal_of_an_open_request_names_the_field(world):
    with pytest.raises(InvalidArgument) as caught:
        world.transport().open(OpenRequest(world.replica, other("nonce")))
    assert caught.value.field == "open.nonce"
