"""The calls of cuDNN: the only module that builds and runs its graphs, for one row at a time.

Written for the Python interface of nvidia-cudnn-frontend 1.18. A plan is built once for a shape; how many queries and
tokens a row has is read on the device, so a plan serves every row up to its size. Keys and values are contiguous: cuDNN
also reads pages, but multiplies weights of 0 with what a page holds after the end of a row, where NaN is permitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Numbers of a row that cuDNN reads on the device: its queries and tokens, and where its first ends and the next begins,
# in elements, for queries and results, keys and values, and log-sum-exps. Each is aligned to 16 bytes.
QUERIES, TOKENS, QUERY_ENDS, TOKEN_ENDS, SUM_ENDS = range(5)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan is built for.

    Attributes:
        q_heads, kv_heads, size: query heads, key-value heads, elements of a head.
        dtype: element type of queries, keys, values and results.
        scale: factor of the attention scores.
        window: attended tokens, including the query's own; 0 = all.
        is_causal: whether the last query is the last token; otherwise all queries attend to all tokens.
        queries, tokens: most queries and tokens of a row.
    """

    q_heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    scale: float
    window: int
    is_causal: bool
    queries: int
    tokens: int

    @property
    def before(self) -> Shape:
        """The shape of tokens before a row's queries: all of them are attended to."""
        return replace(self, is_causal=False, window=0)

    def numbers(self, queries: int, tokens: int) -> list[list[int]]:
        """Return the numbers of a row, four of each kind of which up to two are used."""
        ends = queries * self.q_heads * self.size, tokens * self.kv_heads * self.size, queries * self.q_heads
        return [[queries, 0, 0, 0], [tokens, 0, 0, 0], *([0, end, 0, 0] for end in ends)]


class Plan:
    """A graph of attention with its plan, and the memory that it needs."""

    def __init__(self, library: Any, handle: Any, shape: Shape, device: torch.device) -> None:  # noqa: ANN401
        """Build the plan; takes tens of milliseconds."""
        self._library, self._handle, self._device = library, handle, device
        types = library.data_type
        element = types.BFLOAT16 if shape.dtype == torch.bfloat16 else types.HALF
        graph = library.pygraph(
            io_data_type=element,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )
        self._uids: dict[str, int] = {}

        def uid(name: str) -> int:
            return self._uids.setdefault(name, 1 + len(self._uids))

        def numbers(name: str, count: int) -> Any:  # noqa: ANN401
            dim, stride = [count, 1, 1, 1], [1, 1, 1, 1]
            return graph.tensor(dim=dim, stride=stride, data_type=types.INT32, name=name, uid=uid(name))

        def heads(name: str, count: int, tokens: int, ends: Any) -> Any:  # noqa: ANN401
            dim, stride = form(count, tokens, shape.size)
            made = graph.tensor(dim=dim, stride=stride, data_type=element, name=name, uid=uid(name))
            made.set_ragged_offset(ends)
            return made

        query_ends, token_ends = numbers("query_ends", 2), numbers("token_ends", 2)
        query = heads("query", shape.q_heads, shape.queries, query_ends)
        k, v = (heads(name, shape.kv_heads, shape.tokens, token_ends) for name in ("k", "v"))
        out, sums = graph.sdpa(
            name="attention",
            q=query,
            k=k,
            v=v,
            generate_stats=True,
            attn_scale=shape.scale,
            use_padding_mask=True,
            seq_len_q=numbers("queries", 1),
            seq_len_kv=numbers("tokens", 1),
            **band(library, shape),
        )
        for name, result, size, kind, ends in (
            ("out", out, shape.size, element, query_ends),
            ("sums", sums, 1, types.FLOAT, numbers("sum_ends", 2)),
        ):
            dim, stride = form(shape.q_heads, shape.queries, size)
            result.set_output(True).set_uid(uid(name))
            result.set_dim(dim).set_stride(stride).set_data_type(kind).set_ragged_offset(ends)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self._graph = graph
        self._memory = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def run(self, query: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, numbers: Tensor) -> None:
        """Compute attention of one row, on the current stream.

        Args:
            query: [queries, q_heads, size], contiguous.
            k, v: memory of at least the row's tokens, each kv_heads x size elements; nothing after them is used.
            out, sums: receive the results, as `query`, and log-sum-exps [queries, q_heads], contiguous.
            numbers: int32 on the device, see `Shape.numbers`.
        """
        given = {
            "query": query,
            "k": k,
            "v": v,
            "out": out,
            "sums": sums,
            "queries": numbers[QUERIES],
            "tokens": numbers[TOKENS],
            "query_ends": numbers[QUERY_ENDS],
            "token_ends": numbers[TOKEN_ENDS],
            "sum_ends": numbers[SUM_ENDS],
        }
        if self._device.type == "cuda":
            self._library.set_stream(self._handle, torch.cuda.current_stream(self._device).cuda_stream)
        pack = {uid: given[name] for name, uid in self._uids.items()}
        self._graph.execute(pack, self._memory, handle=self._handle)


def form(heads: int, tokens: int, size: int) -> tuple[list[int], list[int]]:
    """Return size and strides of [1, heads, tokens, size], stored token by token."""
    return [1, heads, tokens, size], [tokens * heads * size, size, heads * size, 1]


def band(library: Any, shape: Shape) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments that select the tokens to which a query attends."""
    if not shape.is_causal:
        return {}
    causal = {"diagonal_alignment": library.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
    return causal | ({"diagonal_band_left_bound": shape.window} if shape.window else {})
