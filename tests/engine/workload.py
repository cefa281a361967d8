"""Seeded requests: shared prefixes of any length, repeats, conversations that continue, and new prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.engine.reference.config import BOS, NUM_BYTES
from tests.engine.reference.request import Request

WORDS = "the a page block of key value state that was held free hit miss token rank step is not and it went".split()


class Requests:
    """An unlimited source of requests.

    Args:
        max_len: most tokens of a prompt and its output.
        seed: equal seeds and equal outputs give equal requests.
    """

    def __init__(self, max_len: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._max_len = max_len
        self._shared = [self._text(max_len // 2) for _ in range(3)]
        self._past: list[Request] = []
        self._number = 0

    def done(self, request: Request) -> None:
        """Record an ended request; later ones may repeat or continue it."""
        self._past = [*self._past[-5:], request]

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self.next()

    def next(self) -> Request:
        """The next request, which shares a random part with earlier ones."""
        rng = self._rng
        prompt = rng.choice([self._fresh, *[self._prefixed, self._repeated, self._continued] * 2])()
        max_new = self._max_new()
        self._number += 1
        prompt = prompt[: self._max_len - max_new]
        return Request(f"q{self._number}", prompt, max_new, rng.choice([""] * 7 + ["other"]), keep_logits=True)

    def _max_new(self) -> int:
        rng = self._rng
        return rng.choice([1, rng.randrange(2, 8), rng.randrange(8, 40), rng.randrange(8, 40)])

    def _fresh(self) -> list[int]:
        return [BOS, *self._text(self._rng.randrange(0, self._max_len // 3))]

    def _prefixed(self) -> list[int]:
        """A system prompt, or a part of it, and a question."""
        rng = self._rng
        shared = rng.choice(self._shared)
        return [BOS, *shared[: rng.randrange(1, len(shared))], *self._text(rng.randrange(0, 24))]

    def _repeated(self) -> list[int]:
        """An earlier prompt, the same with its answer, or a prefix of that."""
        if not self._past:
            return self._fresh()
        past, rng = self._rng.choice(self._past), self._rng
        length = rng.choice(
            [len(past.prompt), len(past.prompt), len(past.tokens), rng.randrange(1, len(past.tokens) + 1)]
        )
        return past.tokens[:length]

    def _continued(self) -> list[int]:
        """The next turn of a conversation."""
        if not self._past:
            return self._fresh()
        return self._rng.choice(self._past).tokens + self._text(self._rng.randrange(1, 24))

    def _text(self, num_bytes: int) -> list[int]:
        rng = self._rng
        if rng.random() < 0.2:
            return [rng.randrange(NUM_BYTES) for _ in range(num_bytes)]
        text = ""
        while len(text) < num_bytes:
            text += rng.choice(WORDS) + " "
        return list(text.encode()[:num_bytes])


class LongPrompts(Requests):
    """Prompts of several kernel tiles, most of which share a prefix, and short outputs."""

    def _max_new(self) -> int:
        return self._rng.choice([1, 2, 3, 8])

    def _fresh(self) -> list[int]:
        return [BOS, *self._text(self._rng.randrange(self._max_len // 3, self._max_len - 20))]


class Returning(Requests):
    """Many conversations that come back in turn, more than a small pool has room for: mostly the next turn, or the same
    prompt again; one that is too long begins again.
    """

    CONVERSATIONS = 24

    def __init__(self, max_len: int, seed: int) -> None:
        super().__init__(max_len, seed)
        self._texts = [self._fresh_text() for _ in range(self.CONVERSATIONS)]
        self._at = 0

    def next(self) -> Request:
        rng = self._rng
        self._at = rng.choice([(self._at + 1) % self.CONVERSATIONS] * 4 + [rng.randrange(self.CONVERSATIONS)])
        text = self._texts[self._at]
        max_new = rng.choice([1, 2, 3, 8])
        if len(text) + max_new + 8 > self._max_len:
            text = self._fresh_text()
        elif rng.random() < 0.6:
            text = text + self._text(rng.randrange(1, 8))
        self._texts[self._at] = text
        self._number += 1
        return Request(f"q{self._number}", text, max_new, keep_logits=True)

    def _fresh_text(self) -> list[int]:
        return [BOS, *self._text(self._rng.randrange(self._max_len // 2, 3 * self._max_len // 4))]


def in_laps(*counts: int) -> type[Returning]:
    """Conversations of which in each lap the first of these numbers come back, so that the distance at which they do
    changes: about as far as a pool reaches.
    """

    class InLaps(Returning):
        CONVERSATIONS = max(counts)
        _left, _lap = 0, 0

        def next(self) -> Request:
            if not self._left:
                self._lap, self._left = self._rng.choice(counts), 2 * max(counts)
            self._left -= 1
            self._at %= self._lap
            request = super().next()
            self._at %= self._lap
            return request

    return InLaps


class Answers(Requests):
    """Triples: a prompt, the same prompt in another domain, and the next turn of the second.

    The second has no hit, and its drafts are known; the third hits states that drafts left behind.
    """

    def next(self) -> Request:
        number = self._number
        self._number += 1
        if number % 3 == 0:
            prompt = [BOS, *self._text(self._rng.randrange(4, 40))]
        else:
            prompt = self._past[-1].prompt if number % 3 == 1 else self._past[-1].tokens + self._text(4)
        max_new = 2 if number % 3 == 2 else 28
        return Request(f"q{number}", prompt, max_new, f"domain {number // 3 * 2 + (number % 3 > 0)}", keep_logits=True)


class Pairs(Requests):
    """Each prompt twice with different last tokens: the second has the longest possible hit, mostly inside a block."""

    def next(self) -> Request:
        self._number += 1
        first = self._number % 2 == 1
        prompt = [BOS, *self._text(self._rng.randrange(8, 60))] if first else [*self._past[-1].prompt[:-1], BOS]
        return Request(f"q{self._number}", prompt, self._rng.randrange(1, 12), keep_logits=True)


class Recall:
    """A drafter that remembers the continuations of all requests; some drafts are wrong, so that they are rejected.

    Drafts at multiples of BOUNDARY are always wrong: accepted drafts then end at the end of a block.
    """

    def __init__(self, seed: int, wrong: float) -> None:
        self._rng = random.Random(seed)
        self._wrong = wrong
        self._followed: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        for at in range(DEPTH, len(tokens)):
            self._followed[tuple(tokens[at - DEPTH : at])] = tokens[at]

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        guessed = list(tokens)
        for at in range(len(tokens), len(tokens) + most):
            token = self._followed.get(tuple(guessed[at - DEPTH : at]), 0)
            is_wrong = at % BOUNDARY == 0 or self._rng.random() < self._wrong
            guessed.append((token + is_wrong) % NUM_BYTES)
        return guessed[len(tokens) :]


DEPTH = 6
BOUNDARY = 16
