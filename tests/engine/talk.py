"""Conversations about real text for the demo: questions on the documents of this repository, turn by turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.reference.config import BOS, NUM_BYTES
from tests.engine.reference.request import Request

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PREFIX_BYTES = (320, 480)
ANSWER_TOKENS = 24


@dataclass
class Conversation:
    """The beginning of a document, then questions and answers.

    Attributes:
        tokens: all tokens so far.
        questions: questions that are left.
    """

    name: str
    tokens: list[int]
    questions: list[str]
    turns: int = 0

    def ask(self) -> Request:
        """The next question, as a prompt with all tokens before it."""
        self.turns += 1
        self.tokens += f"\nQ: {self.questions.pop(0)}\nA: ".encode()
        return Request(f"{self.name}.{self.turns}", list(self.tokens), ANSWER_TOKENS, keep_logits=True)

    def record(self, request: Request) -> None:
        self.tokens = list(request.tokens)


@dataclass
class Talk:
    """All conversations; several are open at a time."""

    waiting: list[Conversation]
    open: dict[str, Conversation] = field(default_factory=dict)

    def next(self) -> Request | None:
        """The first question of the next conversation; None when all have begun."""
        if not self.waiting:
            return None
        conversation = self.waiting.pop(0)
        return self._ask(conversation)

    def answered(self, request: Request) -> Request | None:
        """The next question of the answered conversation; None when it has ended."""
        conversation = self.open.pop(request.request_id)
        conversation.record(request)
        return self._ask(conversation) if conversation.questions else None

    def _ask(self, conversation: Conversation) -> Request:
        request = conversation.ask()
        self.open[request.request_id] = conversation
        return request


def conversations(root: Path, count: int, turns: int, seed: int) -> Talk:
    """Create conversations about three documents; conversations about one document share a prefix."""
    rng = random.Random(seed)
    texts = [plain(root / name) for name in DOCUMENTS]
    prefixes = [[BOS, *text.encode()[: rng.randrange(*PREFIX_BYTES)]] for text in texts]
    sentences = [sentence for text in texts for sentence in sentences_of(text)]
    return Talk(
        [
            Conversation(f"{at + 1}", list(prefixes[at % len(prefixes)]), rng.sample(sentences, turns))
            for at in range(count)
        ]
    )


def plain(path: Path) -> str:
    """The paragraphs of a document, without its tables and code."""
    paragraphs = path.read_text(encoding="utf-8").split("\n\n")
    return "\n".join(" ".join(one.split()) for one in paragraphs if one[:1].isalpha())


def sentences_of(text: str) -> list[str]:
    """Questions from short paragraphs."""
    return [f"{one}?" for one in text.replace("\n", " ").split(". ") if 20 < len(one) < 70]


def readable(tokens: Sequence[int]) -> str:
    """Printable characters unchanged, a dot for every other byte."""
    return "".join(chr(token) if 32 <= token < 127 else "·" for token in tokens if token < NUM_BYTES)
