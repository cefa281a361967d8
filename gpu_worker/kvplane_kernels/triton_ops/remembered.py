"""What the host computes once for equal calls: launches for the pages and rules of layers, and the rows of batches.

A step calls the same operations for each layer, with other queries of equal form. The first call with a form checks its
arguments and prepares launches; later ones look them up, in a few microseconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch, LatentPages
from kvplane_kernels.triton_ops import attention
from kvplane_kernels.triton_ops.kernels.arguments import Rows

ALIGNMENT_BYTES = 16
MAX_FORMS = 64
Prepared = TypeVar("Prepared")


class ByForm(Generic[Prepared]):
    """Prepared launches by pages and form of a call; dropped with the pages."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[AttentionPages | LatentPages, dict[Hashable, Prepared]] = WeakKeyDictionary()

    def get(self, pages: AttentionPages | LatentPages, form: Hashable) -> Prepared | None:
        """Return what was kept for a form; None if there is nothing."""
        forms = self._kept.get(pages)
        return forms.get(form) if forms else None

    def keep(self, pages: AttentionPages | LatentPages, form: Hashable, prepared: Prepared) -> None:
        """Keep launches for a form; forget all forms of the pages at the limit."""
        forms = self._kept.setdefault(pages, {})
        if len(forms) >= MAX_FORMS:
            forms.clear()
        forms[form] = prepared


class Batches:
    """The rows of batches that passed their checks, as kernels take them; dropped with the batch."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Batch, tuple[Hashable, Rows]] = WeakKeyDictionary()

    def get(self, batch: Batch, query: Tensor) -> Rows | None:
        """Return the rows of a batch that was checked with as many queries on their device; None if it was not."""
        kept = self._kept.get(batch)
        return kept[1] if kept and kept[0] == (query.shape[0], query.device) else None

    def keep(self, batch: Batch, query: Tensor) -> Rows:
        """Keep a batch that passed its checks, and return its rows."""
        rows = attention.rows(batch)
        self._kept[batch] = (query.shape[0], query.device), rows
        return rows


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what Triton specialises a kernel for, and what checks depend on, except the length of the first axis."""
    return tensor.dtype, tensor.shape[1:], tensor.stride(), tensor.device, tensor.data_ptr() % ALIGNMENT_BYTES


def form_of_rule(rule: AttentionRule) -> tuple[Any, ...]:
    """Return the numbers of a rule, and the identities of its tensors, which prepared launches hold."""
    return rule.scale, rule.window, rule.chunk, rule.soft_cap, id(rule.sinks), id(rule.slopes)


def form_of_sums(lse: Tensor | None, query: Tensor) -> Hashable:
    """Return the form of memory for log-sum-exps, with whether it has the right length."""
    return None if lse is None else (form_of(lse), lse.shape[0] == query.shape[0])
