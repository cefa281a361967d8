"""A fake of cuDNN's frontend for graphs of attention, written from its documentation, by torch's attention on the host.
The real one needs a GPU.

`python -m tests.bench.gpu --only correct` checks the calls of the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ELEMENTS = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32, "INT32": torch.int32}


@dataclass(frozen=True)
class Faults:
    """Faults that a version of cuDNN could have.

    Attributes:
        window: tokens by which the window is too long.
        scale: scale that replaces the given one; 0 = none.
        from_the_top: the first query is the first token, instead of the last query the last token.
        reads_past_the_end: tokens after the end are multiplied with weights of 0.
        writes_past_the_end: results of queries after the end are set to 0.
        base_2: log-sum-exps are in base 2.
    """

    window: int = 0
    scale: float = 0.0
    from_the_top: bool = False
    reads_past_the_end: bool = False
    writes_past_the_end: bool = False
    base_2: bool = False


@dataclass(eq=False)
class Node:
    """A tensor of a graph."""

    given: dict[str, Any] = field(default_factory=dict)

    def set_ragged_offset(self, ends: Node) -> Node:
        self.given["ends"] = ends
        return self

    def set_uid(self, uid: int) -> Node:
        self.given["uid"] = uid
        return self

    def set_output(self, is_output: bool) -> Node:
        assert is_output
        return self

    def set_dim(self, dim: list[int]) -> Node:
        self.given["dim"] = dim
        return self

    def set_stride(self, stride: list[int]) -> Node:
        self.given["stride"] = stride
        return self

    def set_data_type(self, kind: str) -> Node:
        self.given["data_type"] = kind
        return self


@dataclass
class Graph:
    """A graph with one attention; `steps` are the calls that build it."""

    library: Any
    steps: list[str] = field(default_factory=list)
    attention: dict[str, Any] = field(default_factory=dict)
    results: tuple[Node, Node] = field(default_factory=lambda: (Node(), Node()))

    def tensor(self, **given: Any) -> Node:
        assert {"dim", "stride", "data_type", "uid"} <= given.keys()
        return Node(given)

    def sdpa(self, **given: Any) -> tuple[Node, Node]:
        assert given["generate_stats"]
        assert given["use_padding_mask"]
        self.attention = given
        return self.results

    def validate(self) -> None:
        self.steps.append("validate")

    def build_operation_graph(self) -> None:
        self.steps.append("build_operation_graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]
        self.steps.append("create_execution_plans")

    def check_support(self) -> None:
        self.steps.append("check_support")

    def build_plans(self) -> None:
        assert self.steps == ["validate", "build_operation_graph", "create_execution_plans", "check_support"]
        self.library.plans += 1

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: Mapping[int, Tensor], workspace: Tensor, handle: object) -> None:
        """Compute the row. Tensors are memory: their shapes count as little as those of pointers."""
        assert workspace.dtype == torch.uint8
        assert handle == "handle"
        given, faults = self.attention, self.library.faults
        count, length = (int(pack[given[name].given["uid"]].flatten()[0]) for name in ("seq_len_q", "seq_len_kv"))
        q, k, v = (rows(pack, given[name], n) for name, n in (("q", count), ("k", length), ("v", length)))
        out, sums = (rows(pack, node, count) for node in self.results)
        top = 0 if faults.from_the_top else length - count
        assert given.get("diagonal_band_right_bound", 0) == 0
        is_causal = given.get("diagonal_alignment") == "BOTTOM_RIGHT"
        window = given.get("diagonal_band_left_bound")
        at, token = torch.arange(count)[:, None] + top, torch.arange(length)
        seen = (token <= at) if is_causal else torch.ones((count, length), dtype=torch.bool)
        if window:
            seen &= token > at - window - faults.window
        scale = faults.scale or given["attn_scale"]
        logits = scale * (q.double() @ k.double().repeat_interleave(len(q) // len(k), 0).mT)
        found = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
        )[0]
        out.copy_(found.nan_to_num())
        sums[..., 0].copy_(logits.masked_fill(~seen, -torch.inf).logsumexp(-1) * (1.4427 if faults.base_2 else 1))
        if faults.reads_past_the_end:
            out += 0 * rows(pack, given["v"], given["v"].given["dim"][2])[:, length:].sum()
        if faults.writes_past_the_end:
            whole = rows(pack, self.results[0], None)
            whole[:, count:] = 0


def rows(pack: Mapping[int, Tensor], node: Node, count: int | None) -> Tensor:
    """The first `count` tokens of a row in memory, [heads, tokens, size]; None = all in the storage after its begin."""
    dim, stride = node.given["dim"], node.given["stride"]
    _, heads, most, size = dim
    assert stride == [most * heads * size, size, heads * size, 1], "token by token"
    memory = pack[node.given["uid"]]
    assert memory.dtype == ELEMENTS[node.given["data_type"]]
    assert memory.data_ptr() % 16 == 0
    begin = pack[node.given["ends"].given["uid"]].flatten()[0]
    assert begin == 0
    room = memory.untyped_storage().nbytes() // memory.element_size() - memory.storage_offset()
    if count is None:
        count = min(most, room // (heads * size))
    else:
        assert count <= most
        count = min(count, room // (heads * size))
    return memory.as_strided((heads, count, size), (size, heads * size, 1))


class Library(SimpleNamespace):
    """A fake of the module; `plans` counts the plans that were built."""

    def __init__(self, faults: Faults = Faults()) -> None:
        super().__init__(
            faults=faults,
            plans=0,
            data_type=SimpleNamespace(**{name: name for name in ELEMENTS}),
            diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT="BOTTOM_RIGHT"),
            heur_mode=SimpleNamespace(A="A"),
        )

    def pygraph(self, **given: Any) -> Graph:
        assert given["intermediate_data_type"] == given["compute_data_type"] == "FLOAT"
        assert given["handle"] == "handle"
        return Graph(self)

    def create_handle(self) -> str:
        return "handle"
