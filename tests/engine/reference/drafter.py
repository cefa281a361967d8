"""A drafter by n-gram look-up: it finds the last earlier occurrence of the request's newest tokens and proposes the
tokens that followed there.

See Saxena, "Prompt lookup decoding".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Drafter = Callable[[Sequence[int], int], list[int]]  # (tokens of a request, most drafts) -> drafts

LONGEST_MATCH = 3
SEARCHED_TOKENS = 256


def draft(tokens: Sequence[int], most: int) -> list[int]:
    """Return up to `most` draft tokens; none if the newest tokens of `tokens` have no earlier occurrence."""
    recent = list(tokens[-SEARCHED_TOKENS:])
    for length in range(min(LONGEST_MATCH, len(recent) - 1), 0, -1):
        ending = recent[-length:]
        for start in range(len(recent) - length - 1, -1, -1):
            if recent[start : start + length] == ending:
                return recent[start + length : start + length + most]
    return []
