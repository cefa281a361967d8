"""Formats of a layer's cache: sizes, merging, growing, and refused values."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layer_spec import DType, RequestLimits
from kvplane.base.layers import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateSpec,
    MambaSpec,
    MLASpec,
    RingSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": DType.BFLOAT16}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, window=128)
STATE = MambaSpec(block_size=16, shapes=((3, 100), (4, 8, 8)), dtypes=(DType.BFLOAT16, DType.FLOAT32))


# Bytes


def test_a_page_holds_keys_and_values_of_every_head_and_token():
    assert FULL.page_bytes == 16 * 2 * (64 + 64) * 2


def test_values_may_be_narrower_than_keys():
    assert FullAttentionSpec(**HEADS, head_size_v=32).page_bytes == 16 * 2 * (64 + 32) * 2
    assert FullAttentionSpec(**HEADS, head_size_v=64) == FULL


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        (DType.BFLOAT16, 2),
        (DType.FLOAT16, 2),
        (DType.FLOAT32, 4),
        (DType.FLOAT8_E4M3FN, 1),
        (DType.FLOAT8_E5M2, 1),
        (DType.UINT8, 1),
        (DType.INT8, 1),
    ],
)
def test_element_types_have_their_sizes(dtype, num_bytes):
    assert dtype.num_bytes == num_bytes
    assert FullAttentionSpec(**{**HEADS, "dtype": dtype}).page_bytes == 4096 * num_bytes


def test_latent_rows_have_no_values():
    row = {**HEADS, "num_kv_heads": 1, "head_size": 576}
    assert MLASpec(**row).page_bytes == 16 * 576 * 2
    assert SlidingWindowMLASpec(**row, window=64).page_bytes == 16 * 576 * 2


def test_page_bytes_of_compressed_and_packed_entries():
    """64 tokens in 16 entries of 584 bytes, padded to whole multiples of 576."""
    row = {**HEADS, "block_size": 64, "num_kv_heads": 1, "dtype": DType.UINT8}
    packed = MLASpec(**row, state_bytes=584, tokens_per_state=4, page_alignment=576)
    assert (packed.content_bytes, packed.page_bytes) == (16 * 584, 17 * 576)


def test_state_bytes_do_not_depend_on_the_block_size():
    assert STATE.page_bytes == 3 * 100 * 2 + 4 * 8 * 8 * 4
    assert MambaSpec(block_size=512, shapes=STATE.shapes, dtypes=STATE.dtypes).page_bytes == STATE.page_bytes


def test_padding_makes_a_page_larger_only():
    assert FullAttentionSpec(**HEADS, padded_page_bytes=10_000).page_bytes == 10_000


# Growing to a larger page


def test_attention_pages_grow_by_tokens_or_by_padding():
    doubled = FULL.grown_to(2 * FULL.page_bytes)
    assert doubled == FullAttentionSpec(**{**HEADS, "block_size": 32})
    padded = FULL.grown_to(FULL.page_bytes + 1)
    assert padded == FullAttentionSpec(**HEADS, padded_page_bytes=FULL.page_bytes + 1)


def test_a_padded_page_that_grows_stays_padded():
    padded = FullAttentionSpec(**HEADS, padded_page_bytes=10_000)
    grown = padded.grown_to(20_000)
    assert grown is not None
    assert (grown.block_size, grown.page_bytes) == (32, 20_000)


def test_latent_rows_grow_by_tokens_only():
    latent = MLASpec(**HEADS)
    assert latent.grown_to(3 * latent.page_bytes) == MLASpec(**{**HEADS, "block_size": 48})
    assert latent.grown_to(latent.page_bytes + 1) is None


def test_an_aligned_page_is_padded_to_whole_multiples_only():
    aligned = SlidingWindowMLASpec(**{**HEADS, "num_kv_heads": 1}, window=64, page_alignment=576)
    assert aligned.page_bytes == 2304
    assert aligned.grown_to(5 * 576) == replace(aligned, padded_page_bytes=5 * 576)
    assert aligned.grown_to(5 * 500) is None


def test_a_state_grows_by_padding_only():
    grown = STATE.grown_to(2 * STATE.page_bytes)
    assert grown is not None
    assert (grown.block_size, grown.page_bytes) == (16, 2 * STATE.page_bytes)


# Sharing


def test_equal_layer_formats_merge_to_an_equal_one():
    for spec in (FULL, WINDOW, STATE):
        assert spec.merged_with(spec) == spec


def test_full_attention_formats_with_different_windows_merge():
    narrow = FullAttentionSpec(**HEADS, computes_window=128)
    assert FULL.merged_with(narrow) == narrow
    assert narrow.merged_with(FULL) == narrow


@pytest.mark.parametrize(
    "other",
    [
        FullAttentionSpec(**HEADS, computes_window=256),
        FullAttentionSpec(**HEADS, computes_chunk=128),
        FullAttentionSpec(**{**HEADS, "num_kv_heads": 4}, computes_window=128),
        MLASpec(**HEADS, computes_window=128),
        WINDOW,
    ],
)
def test_full_attention_formats_with_other_differences_do_not_merge(other):
    assert FullAttentionSpec(**HEADS, computes_window=128).merged_with(other) is None


def test_packed_layer_formats_do_not_merge():
    assert MLASpec(**HEADS, state_format="a").merged_with(MLASpec(**HEADS, state_format="b")) is None


def test_layers_of_one_uniform_type_need_the_same_token_slots():
    wide = FullAttentionSpec(**{**HEADS, "num_kv_heads": 8})
    assert FULL.uniform_key == wide.uniform_key == MLASpec(**HEADS).uniform_key
    others = [
        FullAttentionSpec(**{**HEADS, "block_size": 32}),
        FullAttentionSpec(**HEADS, dcp_sharded=False),
        WINDOW,
        SlidingWindowSpec(**HEADS, window=256),
        ChunkedLocalSpec(**HEADS, chunk=128),
        RSWASpec(**HEADS, window=128),
        SinkFullAttentionSpec(**HEADS, sink_tokens=16),
        CrossAttentionSpec(**HEADS),
        RingSpec(**HEADS),
        STATE,
    ]
    keys = {spec.uniform_key for spec in (FULL, *others)}
    assert len(keys) == 1 + len(others)


def test_local_layers_can_keep_every_token():
    wide = {**HEADS, "block_size": 32}
    assert WINDOW.as_full_attention(32) == FullAttentionSpec(**wide, computes_window=128)
    chunk = ChunkedLocalSpec(**HEADS, chunk=64)
    assert chunk.as_full_attention(16) == FullAttentionSpec(**HEADS, computes_chunk=64)
    latent = SlidingWindowMLASpec(**HEADS, window=64)
    assert latent.as_full_attention(16) == MLASpec(**HEADS, computes_window=64)
    assert STATE.as_full_attention(32) is STATE


def test_a_padded_window_that_keeps_every_token_stays_padded():
    padded = SlidingWindowSpec(**HEADS, window=128, padded_page_bytes=9000)
    assert padded.as_full_attention(16).page_bytes == 9000
    assert padded.as_full_attention(32).page_bytes == 2 * WINDOW.page_bytes


# Needs


def test_only_local_layers_have_an_admission_cap():
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=100)
    assert WINDOW.admission_cap_blocks(limits) == WINDOW.blocks_per_request(limits) == 16
    chunk = ChunkedLocalSpec(**HEADS, chunk=128)
    assert chunk.admission_cap_blocks(limits) == chunk.blocks_per_request(limits) == 15
    for spec in (FULL, STATE, RSWASpec(**HEADS, window=64), RingSpec(**HEADS)):
        assert spec.admission_cap_blocks(limits) == 0


def test_a_reference_window_is_bounded_like_full_attention():
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=100)
    assert RSWASpec(**HEADS, window=64).blocks_per_request(limits) == 63


# Refusals


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FullAttentionSpec(**{**HEADS, "num_kv_heads": 0}), "num_kv_heads"),
        (lambda: FullAttentionSpec(**{**HEADS, "head_size": -64}), "head_size"),
        (lambda: FullAttentionSpec(**{**HEADS, "block_size": 0}), "block_size"),
        (lambda: FullAttentionSpec(**HEADS, head_size_v=-1), "head_size_v"),
        (lambda: FullAttentionSpec(**HEADS, padded_page_bytes=100), "padded_page_bytes"),
        (lambda: FullAttentionSpec(**HEADS, padded_page_bytes=-1), "padded_page_bytes"),
        (lambda: FullAttentionSpec(**HEADS, block_stride_alignment=0), "block_stride_alignment"),
        (lambda: FullAttentionSpec(**HEADS, computes_window=-1), "computes_window"),
        (lambda: MLASpec(**HEADS, tokens_per_state=0), "tokens_per_state"),
        (lambda: MLASpec(**HEADS, tokens_per_state=3), "tokens_per_state"),
        (lambda: MLASpec(**HEADS, page_alignment=0), "page_alignment"),
        (lambda: SlidingWindowSpec(**HEADS, window=0), "window"),
        (lambda: SlidingWindowSpec(**HEADS, window=-128), "window"),
        (lambda: SlidingWindowSpec(**HEADS, window=8, extra_retained_tokens=-1), "extra_retained_tokens"),
        (lambda: RSWASpec(**HEADS, window=0), "window"),
        (lambda: ChunkedLocalSpec(**HEADS, chunk=0), "chunk"),
        (lambda: SinkFullAttentionSpec(**HEADS, sink_tokens=0), "sink_tokens"),
        (lambda: SinkFullAttentionSpec(**HEADS, sink_tokens=17), "sink_tokens"),
        (lambda: MambaSpec(block_size=16, shapes=(), dtypes=()), "shapes"),
        (lambda: MambaSpec(block_size=16, shapes=((4,),), dtypes=()), "shapes"),
        (lambda: MambaSpec(block_size=16, shapes=((4, 0),), dtypes=(DType.UINT8,)), "shapes"),
        (lambda: replace(STATE, dcp_sharded=True), "dcp_sharded"),
        (lambda: replace(STATE, speculative_blocks=-1), "speculative_blocks"),
    ],
)
def test_an_invalid_layer_format_is_refused_by_field(make, field):
    with pytest.raises(InvalidArgument) as refused:
        make()
    assert refused.value.field == field
    assert refused.value.remedy


# Values


def test_layer_formats_are_hashable_values():
    assert FullAttentionSpec(**HEADS) == FULL
    assert hash(FullAttentionSpec(**HEADS)) == hash(FULL)
    assert MLASpec(**HEADS, head_size_v=64) != FULL, "a kind is part of the value"
    assert pickle.loads(pickle.dumps(STATE)) == STATE


def test_layer_kinds_are_those_of_groups_and_events():
    assert HiddenStateSpec(**HEADS).kind is GroupKind.MLA
    assert (STATE.kind, STATE.mamba_mode, FULL.mamba_mode) == (GroupKind.MAMBA, MambaMode.NONE, None)
