"""A request of the reference engine, from its prompt to its last token."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from torch import Tensor

from kvplane import scheduling
from tests.engine.reference.config import EOS


@dataclass(eq=False, slots=True)
class Request(scheduling.Request):
    """A request of the reference engine. It ends with EOS, or after `max_new_tokens` tokens.

    Attributes:
        keep_logits: whether to keep the logits of each output token.
        logits: with keep_logits, a tensor [vocabulary] per output token.
        state_at: maps a group of state layers to the index in the block table of the state after `computed` tokens.
    """

    prompt: list[int]
    stop_token_ids: Container[int] = (EOS,)
    keep_logits: bool = False
    logits: list[Tensor] = field(default_factory=list, init=False)
    state_at: dict[int, int] = field(default_factory=dict, init=False)
