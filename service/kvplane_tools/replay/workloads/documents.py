"""The second built-in workload: conversations about long documents, generated from a seed.

document | question 1 | answer 1 | question 2 | ...        each conversation has a document of its own
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kvplane_tools.replay.workloads.requests import Span, TokenSource, TraceRequest


@dataclass(frozen=True, slots=True)
class DocumentShape:
    """The size of the workload.

    Attributes:
        num_documents: number of documents, and of conversations.
        document_tokens: length of each.
        turns: questions of each conversation. A round, which is a question of each, arrives every `round_s` seconds.
        question_tokens, answer_tokens: lengths of a question and of its answer.
    """

    num_documents: int = 8
    document_tokens: int = 16_000
    turns: int = 3
    round_s: float = 12.0
    question_tokens: int = 50
    answer_tokens: int = 80

    @property
    def max_model_len(self) -> int:
        """The length of the last prompt of a conversation with its answer."""
        return self.document_tokens + self.turns * (self.question_tokens + self.answer_tokens)


def document_workload(rng: Random, shape: DocumentShape) -> Iterator[TraceRequest]:
    """Yield the requests, those of a round at once and in random order. Equal `rng` and `shape` give equal requests."""
    documents = list(range(shape.num_documents))
    prompts = [TokenSource((Span(one, 0, shape.document_tokens),)) for one in documents]
    for turn in range(shape.turns):
        rng.shuffle(documents)
        for document in documents:
            asked = Span(shape.num_documents + document, *_part(turn, shape.question_tokens))
            answered = Span(document, *_part(turn, shape.answer_tokens), generated=True)
            prompt, answer = prompts[document] + TokenSource((asked,)), TokenSource((answered,))
            name = f"document-{document}"
            yield TraceRequest(f"{name}/{turn}", turn * shape.round_s, name, prompt, answer)
            prompts[document] = prompt + answer


def _part(turn: int, length: int) -> tuple[int, int]:
    return turn * length, (turn + 1) * length
