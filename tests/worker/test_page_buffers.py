from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument, NotFound
from kvplane.base.groups import Planner
from kvplane.base.layer_spec import DType, LayerSpec
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.base.rank_plan import RankPlan
from kvplane_kernels.torch_ops import TorchOps
from kvplane_plan.planner import Layout, to_rank_plan
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.calibration import Calibration
from kvplane_worker.pages.dtypes import TORCH_DTYPES
from tests.plan.layers import PAGE, full, latent, named, plan, state, window

BLOCKS = 24
LAYOUTS = pytest.mark.parametrize("layout", list(Layout))


def rank_plan(layout: Layout = Layout.LAYER_OUTERMOST, **specs: tuple[int, LayerSpec]) -> RankPlan:
    given = specs or {"f": (2, full()), "w": (4, window()), "s": (2, mamba())}
    return to_rank_plan(plan(named(**given), num_blocks=BLOCKS, max_model_len=64, max_batched_tokens=16, layout=layout))


def mamba(**changes) -> LayerSpec:
    """A state layer with 48 bfloat16 and 24 float32: 192 bytes, padded to a page."""
    shapes, dtypes = ((12, 4), (2, 3, 4)), (DType.BFLOAT16, DType.FLOAT32)
    return state(**{"shapes": shapes, "dtypes": dtypes, "padded_page_bytes": PAGE, **changes})


@LAYOUTS
def test_views_have_the_shapes_of_their_formats(layout):
    pages = PageBuffers.allocate(rank_plan(layout))
    attention = pages.attention("w.3")
    assert attention.k.shape == attention.v.shape == (BLOCKS, 16, 1, 4)
    assert attention.k.dtype == torch.bfloat16
    assert (attention.k_scale, attention.v_scale) == (None, None)
    states = pages.state("s.1")
    assert (states.conv.shape, states.conv.dtype) == ((BLOCKS, 4, 12), torch.bfloat16)
    assert (states.ssm.shape, states.ssm.dtype) == ((BLOCKS, 2, 3, 4), torch.float32)


@LAYOUTS
def test_page_stores_keys_before_values(layout):
    pages = PageBuffers.allocate(rank_plan(layout))
    attention = pages.attention("f.1")
    attention.k[5] = 1.0
    attention.v[5] = 2.0
    index = pages.plan.groups[0].layer_names.index("f.1")
    page = pages.group(0).layers[index][5].view(torch.bfloat16)
    assert page.tolist() == [1.0] * 64 + [2.0] * 64
    assert pages.memory.view(torch.bfloat16).count_nonzero() == 128


def test_a_state_of_several_blocks_has_the_memory_of_these_blocks_alone():
    """Of split pages: a state is written and zeroed whole, by the number of its first block."""
    specs = named(f=(2, full(block_size=64)), s=(2, mamba(padded_page_bytes=4 * PAGE, block_size=64)))
    options = {"max_model_len": 64, "max_batched_tokens": 16, "planner": Planner.SPLIT}
    pages = PageBuffers.allocate(to_rank_plan(plan(specs, num_blocks=BLOCKS, **options)))
    attention, states = pages.attention("f.1"), pages.state("s.1")
    assert attention.k.shape == (BLOCKS, 16, 1, 4)
    assert states.ssm.shape == (BLOCKS - 3, 2, 3, 4)
    attention.k.fill_(1.0)
    attention.v.fill_(1.0)
    ops, group = TorchOps(), next(number for number, one in enumerate(pages.plan.groups) if "s.1" in one.layer_names)
    ops.zero_pages(pages.group(group), [8])
    zeroed = [block for block in range(BLOCKS) if not attention.k[block].any() and not attention.v[block].any()]
    assert zeroed == [8, 9, 10, 11]
    states.ssm[8], states.conv[8] = 2.0, 3.0
    ops.copy_pages(pages.group(group), [8], [20])
    assert states.ssm[20].eq(2.0).all()
    assert states.conv[20].eq(3.0).all()
    assert all(attention.k[block].eq(1.0).all() for block in range(BLOCKS) if block // 4 not in (2, 5))
    with pytest.raises(InvalidArgument, match="21"):
        ops.zero_pages(pages.group(group), [BLOCKS - 3])


@LAYOUTS
@pytest.mark.parametrize("block", [0, 1, BLOCKS - 1])
def test_layers_of_a_group_do_not_overlap(layout, block):
    pages = PageBuffers.allocate(rank_plan(layout))
    for index, group in enumerate(pages.plan.groups):
        pages.memory.zero_()
        for number, _ in enumerate(group.layer_names):
            pages.group(index).layers[number][block] = number + 1
        for number, _ in enumerate(group.layer_names):
            view = pages.group(index).layers[number]
            assert set(view[block].tolist()) == {number + 1}
            assert view.count_nonzero() == PAGE
        assert pages.memory.count_nonzero() == PAGE * len(group.layer_names)


@LAYOUTS
def test_groups_overlap_and_blocks_do_not(layout):
    pages = PageBuffers.allocate(rank_plan(layout))
    pages.group(0).layers[0][3] = 7
    assert set(pages.group(1).layers[0][3].tolist()) == {7}
    others = [block for block in range(BLOCKS) if block != 3]
    assert all(layer[others].count_nonzero() == 0 for group in range(4) for layer in pages.group(group).layers)


def test_every_element_type_has_a_view():
    assert TORCH_DTYPES.keys() == set(DType)
    for dtype, torch_dtype in TORCH_DTYPES.items():
        pages = PageBuffers.allocate(rank_plan(f=(1, full(dtype=dtype, head_size_v=8))))
        attention = pages.attention("f.0")
        assert (attention.k.dtype, attention.k.element_size()) == (torch_dtype, dtype.num_bytes)
        assert (attention.k.shape[-1], attention.v.shape[-1]) == (4, 8)


def test_latent_rows_have_no_values():
    pages = PageBuffers.allocate(rank_plan(m=(1, latent())))
    assert pages.latent("m.0").rows.shape == (BLOCKS, 16, 8)
    with pytest.raises(InvalidArgument, match="not contain keys and values"):
        pages.attention("m.0")


def test_shared_layer_views_the_pages_of_its_target():
    layers = (Layer("f.0", full()), Layer("f.1", full()), KVSharingLayer("x", "f.1"))
    pages = PageBuffers.allocate(to_rank_plan(plan(layers, num_blocks=80)))
    pages.attention("x").k[2, 1, 0, 3] = 5.0
    assert pages.attention("f.1").k[2, 1, 0, 3] == 5.0
    assert pages.attention("f.0").k.count_nonzero() == 0
    assert len(pages.group(0).layers) == 2


def test_scales_are_for_8_bit_pages_only():
    fp8 = DType.FLOAT8_E4M3FN
    plan = rank_plan(f=(1, full(num_kv_heads=2, dtype=fp8)), m=(1, latent(dtype=fp8)))
    pages = PageBuffers.allocate(plan)
    assert pages.attention("f.0").k_scale == torch.ones(1)
    assert pages.attention("f.0") is pages.attention("f.0"), "no step allocates a scale"
    per_head = torch.tensor([0.5, 2.0])
    pages.set_scales("f.0", per_head, per_head[:1])
    assert pages.attention("f.0").k_scale is per_head
    for wrong in ([0.0], [float("nan")], [float("inf")], [-1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(InvalidArgument, match=r"^v_scale"):
            pages.set_scales("f.0", torch.ones(1), torch.tensor(wrong))
    assert pages.attention("f.0").k_scale is per_head, "a refusal changes nothing"
    pages.set_scales("m.0", per_head[:1])
    assert pages.latent("m.0").scale == 0.5
    for wrong_call in ((per_head,), (per_head[:1], per_head[:1])):
        with pytest.raises(InvalidArgument, match=r"^[kv]_scale"):
            pages.set_scales("m.0", *wrong_call)
    with pytest.raises(InvalidArgument, match=r"^k_scale"):
        PageBuffers.allocate(rank_plan()).set_scales("f.0", per_head, per_head)


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2])
def test_calibrated_scales_keep_every_head_in_range(dtype):
    """Heads that differ by a factor of 4,096: each is stored within half a step, and nothing saturates."""
    pages = PageBuffers.allocate(rank_plan(f=(1, full(num_kv_heads=2, dtype=dtype))))
    calibration, drawn = Calibration(), torch.Generator().manual_seed(1)
    size = pages.attention("f.0").k.shape[3]
    new = torch.randn((6, 2, size), generator=drawn) * torch.tensor([1 / 64, 64.0])[:, None]
    calibration.observe("f.0", new[:3], new[:3] * 2)
    calibration.observe("f.0", new[3:], new[3:] * 2)
    calibration.apply(pages)
    TorchOps().write_kv(pages.attention("f.0"), new, new * 2, torch.arange(16, 22))
    stored = pages.attention("f.0")
    assert stored.k_scale is not None
    found = stored.k[1, :6].float() * stored.k_scale[:, None]
    info = torch.finfo(stored.k.dtype)
    assert (stored.k[1, :6].float().abs().amax((0, 2)) == info.max).all(), "the largest value is the end of the range"
    assert ((found - new).abs() <= info.eps / 2 * new.abs() + info.smallest_normal * stored.k_scale[:, None]).all()
    calibration.observe("f.0", new[:0], new[:0])
    calibration.apply(pages)
    again = pages.attention("f.0").k_scale
    assert again is not None
    assert again.tolist() == stored.k_scale.tolist(), "no tokens change nothing"


def test_calibration_with_a_refused_layer_changes_no_layer():
    pages = PageBuffers.allocate(rank_plan(f=(2, full(num_kv_heads=2, dtype=DType.FLOAT8_E4M3FN))))
    size, before = pages.attention("f.0").k.shape[3], pages.attention("f.0")
    calibration = Calibration()
    calibration.observe("f.0", torch.ones(3, 2, size), torch.ones(3, 2, size))
    calibration.observe("f.1", torch.full((3, 2, size), float("inf")), torch.ones(3, 2, size))
    with pytest.raises(InvalidArgument, match="infinite or NaN"):
        calibration.apply(pages)
    assert pages.attention("f.0") is before


def test_incarnation_is_in_the_null_block_of_every_group():
    pages = PageBuffers.allocate(rank_plan(Layout.BLOCK_OUTERMOST))
    assert pages.read_incarnation() == 0
    pages.write_incarnation(2**63 + 5)
    assert pages.read_incarnation() == 2**63 + 5
    for group in range(4):
        firsts = [bytes(layer[0, :8].tolist()) for layer in pages.group(group).layers]
        assert (2**63 + 5).to_bytes(8, "little") in firsts


def test_unknown_layer_or_group_is_refused():
    pages = PageBuffers.allocate(rank_plan())
    with pytest.raises(NotFound, match=r"^layer: this rank has no layer 'q'"):
        pages.attention("q")
    with pytest.raises(InvalidArgument, match=r"^group"):
        pages.group(4)
    for view in (pages.latent, pages.states):
        with pytest.raises(InvalidArgument, match=r"f\.0 do not contain"):
            view("f.0")
    flat = PageBuffers.allocate(rank_plan(s=(1, state())))
    with pytest.raises(InvalidArgument, match=r"states\(\)"):
        flat.state("s.0")
    assert flat.states("s.0")[0].shape == (BLOCKS, PAGE)


def test_memory_of_wrong_type_or_size_is_refused():
    wanted = rank_plan()
    for memory in (
        torch.zeros(wanted.size_bytes - 1, dtype=torch.uint8),
        torch.zeros(wanted.size_bytes, dtype=torch.int8),
        torch.zeros(2, wanted.size_bytes, dtype=torch.uint8),
    ):
        with pytest.raises(InvalidArgument, match=r"^memory"):
            PageBuffers(wanted, memory)
    with pytest.raises(InvalidArgument, match=r"^tensors"):
        PageBuffers.allocate(replace(wanted, size_bytes=wanted.size_bytes - 1))


def test_misaligned_pages_are_refused():
    odd = full(padded_page_bytes=PAGE + 1)
    layers = (Layer("f.0", odd), Layer("f.1", odd))
    with pytest.raises(InvalidArgument, match="block_stride_alignment"):
        PageBuffers.allocate(to_rank_plan(plan(layers, num_blocks=80)))
    aligned = full(padded_page_bytes=PAGE + 1, block_stride_alignment=2)
    PageBuffers.allocate(to_rank_plan(plan((Layer("f.0", aligned),), num_blocks=80)))


def test_null_block_must_hold_the_incarnation():
    tiny = full(block_size=1, head_size=1)
    with pytest.raises(InvalidArgument, match="incarnation"):
        PageBuffers.allocate(to_rank_plan(plan((Layer("f.0", tiny),), num_blocks=2000)))


def test_memory_with_an_offset_is_viewed_from_that_offset():
    wanted = rank_plan()
    whole = torch.zeros(wanted.size_bytes + 64, dtype=torch.uint8)
    pages = PageBuffers(wanted, whole[64:])
    pages.attention("f.0").k.fill_(1)
    pages.group(0).layers[0].fill_(3)
    assert whole[:64].count_nonzero() == 0
    assert set(pages.attention("f.0").k.view(torch.uint8).flatten().tolist()) == {3}


def test_as_cupy_refuses_host_memory():
    with pytest.raises(FailedPrecondition, match="device: the pages are on cpu"):
        PageBuffers.allocate(rank_plan(a=(1, full()))).as_cupy()


@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("cupy") is None, reason="there is no CUDA, or no CuPy")
def test_cupy_and_torch_share_memory():
    pages = PageBuffers.allocate(rank_plan(a=(1, full())), "cuda:0")
    pages.as_cupy()[5] = 7
    assert pages.memory[5].item() == 7
