"""A request of the engine, from its prompt to its last token."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from torch import Tensor

from kvplane import scheduling
from kvplane_worker.engine.config import EOS


@dataclass(eq=False, slots=True)
class Request(scheduling.Request):
    """A request inside the engine. It ends with EOS, or after `max_new_tokens`.

    Attributes:
        keep_logits: keep the logits of each output token.
        logits: [vocabulary] per output token, with keep_logits.
        state_at: state group → index in the block table of the state after `computed` tokens.
    """

    prompt: list[int]
    stop_token_ids: Container[int] = (EOS,)
    keep_logits: bool = False
    logits: list[Tensor] = field(default_factory=list, init=False)
    state_at: dict[int, int] = field(default_factory=dict, init=False)
