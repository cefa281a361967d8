"""Types -> message -> bytes -> message -> types is the identity, and invalid values are refused by field."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane import wire
from kvplane.base import errors
from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError
from kvplane.base.events import EventBatch
from kvplane.base.groups import (
    AlignSpec,
    CommitRule,
    GroupKind,
    GroupSpec,
    HashAlgorithm,
    MambaMode,
    Medium,
    ReplicaSpec,
)
from kvplane.base.requests import Content
from kvplane.base.sections import Prefetch, Prefetched, Retain, Retained
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import (
    STEP_VERSION,
    UNLIMITED,
    Admit,
    Blocks,
    Budget,
    Cache,
    CacheEvent,
    EventKind,
    ExtraKeys,
    Facts,
    Multimodal,
    News,
    OnRefusal,
    Orders,
    Part,
    PartResult,
    Peek,
    RemoveReason,
    Resume,
    Run,
    Step,
    StepResult,
)
from kvplane.v1 import allocation_pb2, replica_pb2, step_pb2
from kvplane.wire import columns
from kvplane.wire.parsing import parse

DIGEST = 32

u32 = st.integers(0, 2**32 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
digests = st.binary(min_size=DIGEST, max_size=DIGEST)
names = st.text(max_size=8)


def column(rows, element):
    """A column of a section: nothing, or one entry per row."""
    full = st.lists(element, min_size=rows, max_size=rows)
    return st.just([]) | full


def flat(element=u32):
    return st.lists(element, max_size=6)


@st.composite
def contents(draw, rows):
    """Counts, tokens, num_hashes and hashes that agree."""
    counts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    tokens = draw(st.lists(u32, min_size=sum(counts), max_size=sum(counts)))
    num_hashes = draw(column(rows, st.integers(0, 2)))
    hashes = b"".join(draw(st.lists(digests, min_size=sum(num_hashes), max_size=sum(num_hashes))))
    return counts, tokens, num_hashes, hashes


@st.composite
def facts(draw):
    rows = draw(st.integers(0, 4))
    appended, tokens, num_hashes, hashes = draw(contents(rows))
    return Facts(
        slot=draw(st.lists(u32, min_size=rows, max_size=rows)),
        computed=draw(column(rows, i32)),
        appended=appended,
        tokens=tokens,
        num_hashes=num_hashes,
        hashes=hashes,
        commit=draw(column(rows, i32)),
        end=draw(column(rows, st.integers(0, 3))),
        fence=draw(column(rows, u64)),
        release_skipped=draw(column(rows, i32)),
    )


extra_keys = st.builds(
    ExtraKeys,
    lora=st.none() | st.tuples(st.text(min_size=1, max_size=4), names),
    salt=names,
    multimodal=st.lists(st.builds(Multimodal, names, u32, u32), max_size=2).map(tuple),
    prompt_embeds=st.lists(digests, max_size=2).map(tuple),
)


@st.composite
def news(draw):
    rows = draw(st.integers(0, 4))
    num_tokens, tokens, num_hashes, hashes = draw(contents(rows))
    return News(
        slot=draw(st.lists(u32, min_size=rows, max_size=rows)),
        num_tokens=num_tokens,
        tokens=tokens,
        num_hashes=num_hashes,
        hashes=hashes,
        request_id=draw(column(rows, names)),
        domain=draw(column(rows, names)),
        extra_keys=draw(column(rows, extra_keys)),
        skip_reading=draw(column(rows, st.integers(0, 1))),
        max_tokens=draw(column(rows, u32)),
    )


@st.composite
def resumes(draw):
    rows = draw(st.integers(0, 3))
    names_of_rows = ("computed", "launch_end", "num_prompt", "single_group_hit")
    names_of_lists = ("num_cached_blocks", "num_blocks", "blocks", "held_slot", "held_count", "held_blocks")
    return Resume(
        slot=draw(st.lists(u32, min_size=rows, max_size=rows)),
        loading=draw(column(rows, st.integers(0, 2))),
        held_loading=draw(st.lists(st.integers(0, 1), max_size=3)),
        **{name: draw(column(rows, u32)) for name in names_of_rows},
        **{name: draw(flat()) for name in names_of_lists},
    )


@st.composite
def runs(draw):
    rows = draw(st.integers(0, 4))
    return Run(
        slot=draw(st.lists(u32, min_size=rows, max_size=rows)),
        extra=draw(column(rows, i32)),
        cap=draw(column(rows, u32)),
        lookahead=draw(column(rows, u32)),
        in_flight=draw(column(rows, i32)),
        flags=draw(column(rows, st.integers(0, 3))),
        victims=draw(flat()),
        reserved=draw(column(rows, u32)),
        on_refusal=draw(st.sampled_from(OnRefusal)),
    )


@st.composite
def admits(draw):
    rows = draw(st.integers(0, 4))
    return Admit(
        slot=draw(st.lists(u32, min_size=rows, max_size=rows)),
        extra=draw(column(rows, i32)),
        cap=draw(column(rows, u32)),
        lookahead=draw(column(rows, u32)),
        external=draw(column(rows, u32)),
        expected_hit=draw(column(rows, i32)),
        encoder_tokens=draw(column(rows, u32)),
        reserved=draw(column(rows, u32)),
        watermark=draw(column(rows, st.integers(0, 2))),
        flags=draw(column(rows, st.integers(0, 15))),
        max_running=draw(u32),
        on_refusal=draw(st.sampled_from([OnRefusal.STOP, OnRefusal.SKIP])),
        only_if_no_preemption=draw(st.booleans()),
        hit_limit=draw(column(rows, u32)),
        skip_zero_groups=draw(column(rows, u64)),
        single_group_hit=draw(column(rows, u32)),
        min_new=draw(column(rows, u32)),
    )


@st.composite
def peeks(draw):
    slots = draw(flat())
    return Peek(slots, with_blocks=draw(st.booleans()), limit=draw(column(len(slots), u32)))


@st.composite
def prefetches(draw):
    rows = draw(st.integers(0, 3))
    _, _, num_hashes, hashes = draw(contents(rows))
    return Prefetch(
        slot=draw(st.lists(u32, min_size=rows, max_size=rows)),
        num_hashes=num_hashes,
        hashes=hashes,
        domain=draw(column(rows, names)),
        within_ns=draw(column(rows, u64)),
    )


@st.composite
def retains(draw):
    rows = draw(st.integers(0, 3))
    _, _, num_hashes, hashes = draw(contents(rows))
    return Retain(
        num_hashes=num_hashes,
        hashes=hashes,
        now_ns=draw(st.lists(u64, max_size=1)),
        **{name: draw(column(len(num_hashes), names)) for name in ("domain", "owner")},
        **{name: draw(column(len(num_hashes), u32)) for name in ("priority", "percent")},
        until_ns=draw(column(len(num_hashes), u64)),
    )


parts = st.builds(
    Part,
    facts=facts(),
    cache=st.builds(
        Cache, failed_steps=flat(u64), evicted=flat(), released=flat(), reset=st.booleans(), loads_over=flat()
    ),
    news=news(),
    resume=st.none() | resumes(),
    run=runs(),
    admit=admits(),
    peek=peeks(),
    prefetch=prefetches(),
    retain=retains(),
    budget=st.builds(Budget, tokens=u32, input=u32, overhead=u32),
    with_tables=st.booleans(),
)
steps = st.builds(
    Step,
    epoch=u64,
    seq=u64,
    parts=st.lists(parts, min_size=1, max_size=2),
    part=u32,
    last=st.booleans(),
    executed_through=u64,
)


@st.composite
def blocks(draw):
    out = Blocks()
    for _ in range(draw(st.integers(0, 3))):
        out.add(draw(u32), draw(u32), draw(flat()))
    return out


@st.composite
def orders(draw):
    stamps, copies, zeroes = (draw(st.integers(0, 3)) for _ in range(3))

    def exactly(rows, element=u32):
        return draw(st.lists(element, min_size=rows, max_size=rows))

    return Orders(
        stamp_block=exactly(stamps),
        stamp=exactly(stamps, u64),
        copy_src=exactly(copies),
        copy_dst=exactly(copies),
        copy_group=exactly(copies),
        zero_block=exactly(zeroes),
        zero_group=exactly(zeroes),
    )


events = st.builds(
    CacheEvent,
    kind=st.sampled_from(EventKind),
    group=u32,
    hashes=st.lists(digests, max_size=2).map(tuple),
    blocks=flat().map(tuple),
    domain=names,
    parent=digests | st.just(b""),
    block_size=u32,
    slot=u32,
    start=u32,
    end=u32,
    block_starts=flat().map(tuple),
    reason=st.sampled_from(RemoveReason),
)
of_tiers = st.builds(replace, events, tier=st.sampled_from([Medium.HOST, Medium.DISK]))


@st.composite
def part_results(draw):
    rows = draw(st.integers(0, 3))

    def per_row(element=u32):
        return draw(st.lists(element, min_size=rows, max_size=rows))

    return PartResult(
        granted=draw(flat()),
        preempted=draw(flat()),
        admit_status=per_row(st.integers(0, 7)),
        admit_hit=per_row(),
        admit_granted=per_row(),
        admit_single_group_hit=per_row(),
        admit_load_after=per_row(u64),
        new_blocks=draw(blocks()),
        tables=draw(blocks()),
        peek_hit=draw(flat()),
        peek_single_group_hit=draw(flat()),
        peek_blocks=draw(blocks()),
        num_hashes=draw(flat()),
        last_hash=draw(st.lists(digests | st.just(b""), max_size=3)),
        reset_done=draw(st.booleans()),
        orders=draw(orders()),
        free_blocks=draw(u32),
        prefetched=Prefetched(*([draw(u32), draw(u32)] for _ in range(3))),
        retained=Retained(*([draw(u32), draw(u32)] for _ in range(4))),
        events=draw(st.lists(events, max_size=2)),
        tier_events=draw(st.lists(of_tiers, max_size=2)),
    )


results = st.builds(StepResult, seq=u64, part=u32, parts=st.lists(part_results(), max_size=2), published_through=u64)

small = st.integers(0, 1000)
groups = st.one_of(
    st.builds(
        GroupSpec,
        kind=st.just(GroupKind.FULL_ATTENTION),
        block_size=st.integers(1, 1024),
        is_draft=st.booleans(),
        drops_last_block=st.booleans(),
        admission_cap_blocks=small,
        zero_new_blocks=st.booleans(),
        lookup_class=small,
        layer_names=st.lists(names, max_size=2).map(tuple),
        page_bytes=u64,
        extra_retained_tokens=small,
    ),
    st.builds(
        GroupSpec,
        kind=st.sampled_from([GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.R_SWA]),
        block_size=st.integers(1, 64),
        window=st.integers(1, 4096),
    ),
    st.builds(GroupSpec, kind=st.just(GroupKind.CHUNKED_LOCAL), block_size=st.just(16), chunk=st.integers(1, 8192)),
    st.builds(
        GroupSpec,
        kind=st.just(GroupKind.MAMBA),
        block_size=st.just(16),
        mamba_mode=st.sampled_from(MambaMode),
        speculative_blocks=small,
    ),
    st.builds(
        GroupSpec,
        kind=st.just(GroupKind.MAMBA),
        block_size=st.just(16),
        mamba_mode=st.just(MambaMode.ALIGN),
        checkpoint_alignment=small,
        checkpoints_single_group_hits=st.booleans(),
    ),
    st.builds(GroupSpec, kind=st.just(GroupKind.SINK_FULL), block_size=st.just(16), sink_tokens=st.just(32)),
    st.builds(
        GroupSpec,
        kind=st.sampled_from([GroupKind.MLA, GroupKind.CROSS, GroupKind.RING]),
        block_size=small.map(lambda n: n + 1),
    ),
)
specs = st.builds(
    ReplicaSpec,
    groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
    num_blocks=st.integers(1001, 1 << 28),
    max_model_len=st.integers(1, 1 << 30),
    hash_block_size=st.just(16),
    scheduler_block_size=st.integers(1, 64).map(lambda n: 16 * n),
    max_in_flight_tokens=st.integers(1, 1 << 30),
    hash_algorithm=st.sampled_from(HashAlgorithm),
    hash_seed=names,
    enable_caching=st.booleans(),
    retention_interval=st.integers(-1, 1 << 20),
    partial_hits=st.booleans(),
    watermark_blocks=small,
    commit=st.sampled_from(CommitRule),
    hash_lookahead_tokens=small,
    prefill_lookahead=small,
    keep_divergence_boundary=st.booleans(),
    align=st.builds(AlignSpec, block_size=small, chunk_limit=small, stop_at_tail=st.booleans()),
    events=st.booleans(),
)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(steps)
def test_steps_round_trip(step):
    assert wire.decode_step(over_the_wire(wire.encode_step(step)), DIGEST) == step


@given(results)
def test_answers_round_trip(result):
    assert wire.decode_result(over_the_wire(wire.encode_result(result))) == result


@given(specs)
def test_specs_round_trip(spec):
    assert wire.decode_spec(over_the_wire(wire.encode_spec(spec))) == spec


OPENED_WITH = (names, u64, u64, st.booleans(), names, flat(u64).map(tuple), u64, flat().map(tuple))


@given(st.builds(OpenRequest, *OPENED_WITH, owner_epoch=u64, life_nonce=u64))
def test_open_requests_round_trip(request):
    decoded = wire.decode_open(over_the_wire(wire.encode_open(request)))
    assert replace(decoded, stamp_table=tuple(decoded.stamp_table)) == request


@given(st.builds(Opened, u64, u64, u32, u32, u32, u32, specs, u32, u32, flat().map(tuple)))
def test_answers_to_open_round_trip(opened):
    assert wire.decode_opened(over_the_wire(wire.encode_opened(opened))) == opened


def test_an_open_request_without_step_version_has_the_current_one():
    assert wire.decode_open(allocation_pb2.SessionOpen(replica="r")).step_version == STEP_VERSION


@pytest.mark.parametrize(("said", "version"), [(0, 1), (3, 3)])
def test_a_service_with_another_step_version_is_refused(said, version):
    with pytest.raises(FailedPrecondition, match=f"accepts steps of version {version}") as caught:
        wire.decode_opened(allocation_pb2.SessionOpened(step_version=said))
    assert caught.value.field == "step_version"


@given(st.builds(EventBatch, u64, u64, st.lists(events, max_size=2).map(tuple), st.booleans()))
def test_event_batches_round_trip(batch):
    assert wire.decode_batch(over_the_wire(wire.encode_batch(batch))) == batch


def every_error():
    found = [KvplaneError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found[1:] if cls.__module__ == KvplaneError.__module__]


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_refusals_of_steps_round_trip(cls):
    error = cls("too much", field="parts[0].run.cap", remedy="ask for less", metadata={"epoch": "7"})
    message = over_the_wire(wire.encode_step_error(3, 1, error))
    back = wire.decode_step_error(message)
    assert (message.seq, message.part) == (3, 1)
    assert type(back) is cls
    assert vars(back) == vars(error)


def test_a_refusal_with_an_unknown_reason_keeps_it():
    back = wire.decode_step_error(step_pb2.StepError(reason="NEW_REASON", message="no"))
    assert type(back) is errors.KvplaneError
    assert back.metadata == {"reason": "NEW_REASON"}


u32s = lambda *values: b"".join(value.to_bytes(4, "little") for value in values)  # noqa: E731


def test_columns_are_little_endian_on_the_wire():
    step = Step(1, 1, [Part(run=Run(slot=[1, 258], extra=[-1, 2]))])
    message = wire.encode_step(step)
    assert message.parts[0].run.slot == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert message.parts[0].run.extra == bytes([255, 255, 255, 255, 2, 0, 0, 0])


def test_columns_are_little_endian_on_big_endian_hosts(monkeypatch):
    """On this host, swapping turns the bytes of a little-endian one into those of the other kind."""
    monkeypatch.setattr(columns, "_SWAP", sys.byteorder == "little")
    assert columns.pack([1, 258], columns.U32, "", "") == bytes([0, 0, 0, 1, 0, 0, 1, 2])
    assert columns.unpack(bytes([0, 0, 0, 1, 0, 0, 1, 2]), columns.U32, "", "") == [1, 258]
    assert columns.pack([-2], columns.I32, "", "") == bytes([254, 255, 255, 255])


def test_defaults_take_no_bytes():
    assert wire.encode_step(Step(0, 0, [Part()])).ByteSize() == 2
    assert wire.encode_result(StepResult(0, 0, [PartResult()])).ByteSize() == 2


BAD_PARTS = {
    "slot of three bytes": ({"run": {"slot": b"abc"}}, "parts[0].run.slot"),
    "cap for one of two rows": ({"run": {"slot": u32s(1, 2), "cap": u32s(4)}}, "parts[0].run.cap"),
    "cap without rows": ({"run": {"cap": u32s(4)}}, "parts[0].run.cap"),
    "unknown on_refusal": ({"run": {"slot": u32s(1), "on_refusal": 9}}, "parts[0].run.on_refusal"),
    "admission cannot preempt": ({"admit": {"slot": u32s(1), "on_refusal": 3}}, "parts[0].admit.on_refusal"),
    "unknown watermark": ({"admit": {"slot": u32s(1), "watermark": u32s(3)}}, "parts[0].admit.watermark"),
    "unknown end": ({"facts": {"slot": u32s(1), "end": u32s(4)}}, "parts[0].facts.end"),
    "half a fence": ({"facts": {"slot": u32s(1), "fence": u32s(4)}}, "parts[0].facts.fence"),
    "too few tokens": (
        {"facts": {"slot": u32s(1), "appended": u32s(2), "tokens": u32s(7)}},
        "parts[0].facts.tokens",
    ),
    "short digest": (
        {"facts": {"slot": u32s(1), "num_hashes": u32s(1), "hashes": b"x" * 31}},
        "parts[0].facts.hashes",
    ),
    "hashes without a row": (
        {"news": {"slot": u32s(1), "num_tokens": u32s(1), "hashes": b"x" * 32}},
        "parts[0].news.hashes",
    ),
    "tokens without a row": ({"news": {"slot": u32s(1), "tokens": u32s(1)}}, "parts[0].news.tokens"),
    "names for one of two": ({"news": {"slot": u32s(1, 2), "request_id": ["a"]}}, "parts[0].news.request_id"),
    "skip_reading of 2": ({"news": {"slot": u32s(1), "skip_reading": u32s(2)}}, "parts[0].news.skip_reading"),
    "evicted of five bytes": ({"cache": {"evicted": b"12345"}}, "parts[0].cache.evicted"),
    "peek of one byte": ({"peek": {"slot": b"1"}}, "parts[0].peek.slot"),
}


@pytest.mark.parametrize(("part", "field"), BAD_PARTS.values(), ids=BAD_PARTS.keys())
def test_a_malformed_part_is_refused_by_field(part, field):
    message = step_pb2.Step(epoch=1, seq=1, parts=[part])
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_step(message, DIGEST)
    assert caught.value.field == field
    assert caught.value.remedy


def test_the_refusal_names_the_index_of_the_part():
    message = step_pb2.Step(parts=[{}, {"peek": {"slot": b"1"}}])
    with pytest.raises(InvalidArgument, match=r"parts\[1\]\.peek\.slot"):
        wire.decode_step(message, DIGEST)


def test_a_step_without_parts_is_refused():
    with pytest.raises(InvalidArgument, match="parts"):
        wire.decode_step(step_pb2.Step(seq=1), DIGEST)


@pytest.mark.parametrize("value", [-1, 2**32, "7", 1.5, None])
def test_a_token_id_above_u32_is_refused_and_not_truncated(value):
    step = Step(1, 1, [Part(news=News(slot=[0], num_tokens=[2], tokens=[5, value]))])
    with pytest.raises(InvalidArgument, match=r"entry 1 is .* no valid u32") as caught:
        wire.encode_step(step)
    assert caught.value.field == "parts[0].news.tokens"


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (Multimodal("a", -1, 1), "extra_keys.multimodal[1]"),
        (Multimodal("a", 2**70, 1), "extra_keys.multimodal[1]"),
        (Multimodal("a", 0, 2**32), "extra_keys.multimodal[1]"),
        (Multimodal("\ud800", 0, 1), "extra_keys.multimodal[1]"),
    ],
)
def test_an_item_out_of_range_is_refused_by_field(item, field):
    keys = ExtraKeys(multimodal=(Multimodal("b", 0, 1), item))
    with pytest.raises(InvalidArgument) as caught:
        wire.encode_content(Content([1], extra_keys=keys))
    assert caught.value.field == field


@pytest.mark.parametrize("keys", [ExtraKeys(salt="\ud800"), ExtraKeys(lora=("a", "\ud800"))])
def test_extra_keys_that_are_not_utf_8_are_refused_by_field(keys):
    with pytest.raises(InvalidArgument) as caught:
        wire.encode_content(Content([1], extra_keys=keys))
    assert caught.value.field == "extra_keys"


def test_a_scalar_out_of_range_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        wire.encode_step(Step(1, 1, [Part(budget=Budget(tokens=-1))]))
    assert caught.value.field == "parts[0].budget.tokens"
    with pytest.raises(InvalidArgument, match="step"):
        wire.encode_step(Step(-1, 1, [Part()]))


def test_unlimited_is_encoded_as_an_absent_field():
    message = wire.encode_step(Step(1, 1, [Part(budget=Budget(tokens=9), admit=Admit(slot=[1]))]))
    assert not message.parts[0].budget.HasField("input")
    assert not message.parts[0].admit.HasField("max_running")
    assert wire.decode_step(message, DIGEST).parts[0].admit.max_running == UNLIMITED


BAD_RESULTS = {
    "ids without a count": ({"new_blocks": {"ids": u32s(1)}}, "parts[0].new_blocks.ids"),
    "a stamp without a block": ({"orders": {"stamp": b"x" * 8}}, "parts[0].orders.stamp"),
    "a copy without a target": (
        {"orders": {"copy_src": u32s(1), "copy_dst": u32s(1, 2)}},
        "parts[0].orders.copy_dst",
    ),
    "an unknown status": ({"admit_status": u32s(8)}, "parts[0].admit_status"),
    "an event of no kind": ({"events": [{}]}, "parts[0].events[0].kind"),
}


@pytest.mark.parametrize(("part", "field"), BAD_RESULTS.values(), ids=BAD_RESULTS.keys())
def test_a_malformed_answer_is_refused_by_field(part, field):
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_result(step_pb2.StepResult(parts=[part]))
    assert caught.value.field == field


def test_a_group_without_a_kind_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_spec(replica_pb2.ReplicaSpec(groups=[{"block_size": 16}]))
    assert caught.value.field == "groups[0].kind"


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_spec(replica_pb2.ReplicaSpec.FromString(bytes([7 << 3, 99])))
    assert caught.value.field == "hash_algorithm"


def test_an_impossible_spec_is_refused_by_encode_and_decode():
    with pytest.raises(InvalidArgument, match="num_blocks"):
        wire.decode_spec(replica_pb2.ReplicaSpec(groups=[{"kind": 1, "block_size": 16}], max_model_len=1))
    group = GroupSpec(GroupKind.FULL_ATTENTION, block_size=16)
    with pytest.raises(InvalidArgument, match="num_blocks"):
        wire.encode_spec(ReplicaSpec((group,), 1, 1024, 16, 16, 1024))


def test_a_truncated_stamp_table_is_refused():
    with pytest.raises(InvalidArgument, match="stamp_table"):
        wire.decode_open(allocation_pb2.SessionOpen(stamp_table=b"1234"))


def opening(request):
    return allocation_pb2.SessionRequest(open=wire.encode_open(request)).SerializeToString()


def decoded(raw):
    """As the service decodes it: without a copy of the stamp table."""
    rest, stamps = wire.split_stamps(raw)
    request = wire.decode_open(parse(allocation_pb2.SessionRequest, rest).open, stamps)
    return replace(request, stamp_table=tuple(request.stamp_table)), bool(stamps)


@given(st.builds(OpenRequest, names, u64, u64, st.booleans(), names, flat(u64).map(tuple), u64))
def test_a_stamp_table_is_split_from_its_message_without_a_copy(request):
    assert decoded(opening(request)) == (request, bool(request.stamp_table))


@given(st.data())
def test_a_message_of_an_unusual_encoding_is_parsed_whole(data):
    """Cut, doubled, with bytes that were changed or put in between: split or not, it says the same."""
    raw = bytearray(opening(OpenRequest("r", 7, 3, stamp_table=(5, 6, 7), client="c")))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : data.draw(st.integers(at, len(raw)))] = data.draw(
            st.one_of(st.binary(max_size=4), st.just(bytes(raw)))
        )
    try:
        expected = wire.decode_open(parse(allocation_pb2.SessionRequest, bytes(raw)).open)
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            decoded(bytes(raw))
        return
    assert decoded(bytes(raw))[0] == replace(expected, stamp_table=tuple(expected.stamp_table))
