"""A request of the engine, from its prompt to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvplane_worker.engine.config import EOS

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Request:
    """A request inside the engine.

    Attributes:
        name: request id, which explanations show.
        prompt: token ids.
        max_new: most tokens to generate; fewer when EOS comes first.
        domain: requests share pages only within a domain.
        keep_logits: keep the logits of each output token.
        tokens: the prompt and the generated tokens.
        slot: the slot of the request at the service.
        computed: leading tokens whose keys, values and states are in pages.
        launch_end: position after the last launched token, including rejected drafts.
        state_at: state group → index in the block table of the state after `computed` tokens.
        drafts: drafts of the next tokens.
        logits: [vocabulary] per output token, with keep_logits.
        hits: prefix cache hit in tokens, per admission.
        error: why the request was rejected; "" = it was not.
    """

    name: str
    prompt: list[int]
    max_new: int
    domain: str = ""
    keep_logits: bool = False
    tokens: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    computed: int = 0
    launch_end: int = 0
    state_at: dict[int, int] = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        """Whether the last token was generated."""
        return len(self.output) >= self.max_new or (bool(self.output) and self.tokens[-1] == EOS)

    def lose_blocks(self) -> None:
        """Reset after a preemption: the tokens stay, none of them is computed."""
        self.computed = 0
        self.drafts = []
        self.state_at = {}
