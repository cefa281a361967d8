"""What a plan costs: its work grows with the layers of a model, whatever their formats, and has an end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import replica_pb2 as rp
from kvplane_plan.models.config_fields import MAX_LAYERS
from kvplane_service.rpc.sources import MAX_STAGES, plan_source
from tests.costs import calls_of

MOST_CALLS = 12_000_000  # of functions; about a second
PLANNERS = (rp.PLANNER_REFERENCE, rp.PLANNER_BEST, rp.PLANNER_SPLIT)
FULL, WINDOW = "full_attention", "sliding_attention"
CONFIGS = json.loads((Path(__file__).parent / "reference_plans" / "plans.json").read_text())
GEMMA = next(one["config"] for name, one in CONFIGS.items() if "gemma4" in name)


def config_of(num_layers: int, num_formats: int, windows: int) -> rp.ModelSource:
    """A config.json of layers of many sizes, `windows` sliding ones between two full ones."""
    types = [WINDOW if windows and at % (windows + 1) < windows else FULL for at in range(num_layers - 1)] + [FULL]
    sizes = {str(at): {"head_dim": 64 + 8 * (at % num_formats)} for at in range(num_layers)}
    config = GEMMA.get("text_config", GEMMA) | {"num_hidden_layers": num_layers, "num_kv_shared_layers": 0}
    return rp.ModelSource(config=json.dumps(config | {"layer_types": types, "per_layer_config": sizes}))


def layers_of(num_layers: int, num_formats: int, stages: int = 1, *, by_block: bool = False) -> rp.LayerSource:
    """Layers of all kinds and of many sizes, on pipeline stages."""
    source = rp.LayerSource(block_outermost=by_block)
    for at in range(num_layers):
        size = 1 + at % num_formats
        kind = (rp.GROUP_KIND_FULL_ATTENTION, rp.GROUP_KIND_SLIDING_WINDOW, rp.GROUP_KIND_MAMBA)[at % 3]
        form = rp.LayerFormat(kind=kind, block_size=16)
        if at % 3 == 2:
            form.states.add(shape=[size, 64], dtype="float32")
        else:
            form.num_kv_heads, form.head_size, form.dtype = size, 64, "bfloat16"
            form.window = 127 + size if at % 3 else 0
        source.layers.add(name=f"l{at}", format=form)
    for at in range(stages if stages > 1 else 0):
        source.stages.add(layer_names=[f"l{one}" for one in range(at, num_layers, stages)])
    return source


def sources() -> Iterator[tuple[str, rp.ModelSource | rp.LayerSource]]:
    most = MAX_LAYERS
    for formats, windows in ((2, 5), (64, 1), (most, 1)):
        yield f"config of {formats} formats, {windows} windows", config_of(most, formats, windows)
    for formats, stages in ((2, 1), (64, 1), (64, MAX_STAGES), (most, MAX_STAGES)):
        yield f"{formats} formats, {stages} stages", layers_of(most, formats, stages)
        yield f"{formats} formats, {stages} stages, by block", layers_of(most, formats, stages, by_block=True)
    yield "a stage for each layer", layers_of(most, 3, most)
    everywhere = layers_of(most, 3)
    for _ in range(most):
        everywhere.stages.add(layer_names=[one.name for one in everywhere.layers])
    yield "all layers on every stage", everywhere
    shared = layers_of(3, 3)
    shared.layers.extend(rp.Layer(name=f"s{at}", shares_with=f"s{at - 1}" if at else "l0") for at in range(most - 3))
    yield "a chain of shared layers", shared


SOURCES = dict(sources())


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_plan_of_the_most_layers_has_a_bounded_cost(name, planner):
    source = type(SOURCES[name]).FromString(SOURCES[name].SerializeToString())
    source.planner, source.memory_bytes = planner, 1 << 46
    request = pb.RegisterReplicaRequest()
    target: Any = request.model if isinstance(source, rp.ModelSource) else request.layers
    target.MergeFrom(source)
    assert calls_of(lambda: plan_source(request)) <= MOST_CALLS


def test_the_work_of_a_plan_is_counted():
    assert calls_of(lambda: sum(1 for _ in range(1000))) >= 1000


def test_layers_beyond_the_most_are_refused_before_they_are_planned():
    source = layers_of(MAX_LAYERS + 1, 3)
    with pytest.raises(InvalidArgument, match=f"give 1 to {MAX_LAYERS} layers"):
        plan_source(pb.RegisterReplicaRequest(replica="r", layers=source))
