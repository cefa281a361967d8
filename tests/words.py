"""The words that the tree does not use, each with what to write instead: standard terms, so that readers can search.

`python -m tests.words [PATH ...]` lists what is found under the paths (the whole tree without any).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Words, also as parts of identifiers (`_told_by`, `ToldTwice`). A phrase may be broken over two lines.
REPLACEMENTS: dict[str, str] = {
    "told|tell|tells|telling": "report, notify, state, send, or distinguish",
    "anew": "again",
    "whoever|whomever": "any client that, the process that",
    "nobody|somebody|whom": "no client, a client, no process, none",
    "he|she|his|her|hers|himself": "it, its",
    "mend|mends|mended|mending": "fix",
    "bring|brings|brought|bringing": "load, fetch, make available, recover",
    "heard|hear|hears|hearing": "receive, observe",
    "beside|besides": "off (the event loop), next to, concurrently with, also",
    "shall": "will, must",
    "junction": "the longest hit of a single group (`longest_single_group_hit`)",
    "standing": "progress",
    "settle|settles|settled|settling|unsettled": "normalize, flush, wait until idle",
    "regain|regained|regains|retell|retelling": "recover, replay events",
    "surroundings": "runtime, dependencies",
    "witness|witnessed": "monitor, observer",
    "polite|impolite": "well-behaved",
    "stranger|strangers": "another client, an untrusted client, a third-party engine",
    "believe|believes|believed": "expect, consider, trust",
    "speak|speaks|spoke|spoken|unspoken": "use (a protocol), state",
    "lies|lie|lay|lain": "is at, is stored in",
    "so many|so much": "that number of, `count`",
    "without a word": "silently, without emitting events",
    "goes on|go on|going on|went on": "continue",
    "in place of": "instead of",
    "for ever": "forever, indefinitely",
    "now and then": "periodically",
    "again and again": "repeatedly",
    "all the same": "anyway, still",
    "says so|say so|said so|say nothing|says nothing": "states it, is silent",
    "not ours|not theirs": "name the owner",
    "for good": "permanently",
    "a moment ago|in a moment": "just before, soon, after a retry",
    "as if nothing": "unchanged",
    "make of it|makes of it|make of them": "handle, return",
}

# Words that users do not search for, in what they read: documents, contract, messages of the product. In backticks, or
# as a part of an identifier, they are names, which stay.
FOR_USERS: dict[str, str] = {
    "engine life|engine lives": "epoch",
    "lapse|lapses|lapsed": "expire, expired (the state `lapsed` is a name)",
    "mover|movers": "copy engine, copy job, transfer, worker",
    "dearer": "more expensive, slower",
    "lack of room": "no free blocks",
}
READ_BY_USERS = ("README.md", "SECURITY.md", "docs/", "proto/", "helm/")

# Where the words are the subject, where the text is of the past or not by this project, and the written results of
# benchmarks: each has the words of the program and the commit that measured it, and changes when it is measured again.
EXEMPT = ("tests/words.py", "CHANGELOG.md", "LICENSE", "tests/bench/results/")
CODE = (".py", ".pyi", ".c", ".proto", ".sh", "Makefile", "Dockerfile")
SUFFIXES = (*CODE, ".md", ".toml", ".yaml", ".yml", ".tpl", ".txt")


def _pattern(alternatives: str) -> re.Pattern[str]:
    words = "|".join(
        rf"[{word[0].upper()}{word[0]}]{word[1:]}".replace(" ", r"(?:\s|#|//|\*)+") for word in alternatives.split("|")
    )
    return re.compile(rf"(?<![A-Za-z])(?:{words})(?![a-z])")


def _phrases(alternatives: str) -> list[frozenset[str]]:
    return [frozenset(phrase.split()) for phrase in alternatives.split("|")]


_PATTERNS = [(_phrases(words), _pattern(words), remedy) for words, remedy in REPLACEMENTS.items()]
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_FOR_USERS = [
    (
        _phrases(words),
        re.compile(r"(?<![\w`\".-])(?:" + words.replace(" ", r"(?:\s|#|//|\*)+") + r")(?![\w`\"-])", re.IGNORECASE),
        remedy,
    )
    for words, remedy in FOR_USERS.items()
]


def is_checked(path: str) -> bool:
    """Whether a file is text that this project writes."""
    return path.endswith(SUFFIXES) and not path.startswith(EXEMPT) and "_pb2" not in path


def banned(text: str, for_users: bool = False) -> Iterator[tuple[int, str, str]]:
    """Line, word and replacement of every banned word, by line; `for_users`: of those of FOR_USERS alone."""
    words = {word.lower() for word in _WORD.findall(text)}  # one pass: most phrases are in no file
    patterns = [
        (pattern, remedy)
        for phrases, pattern, remedy in (_FOR_USERS if for_users else _PATTERNS)
        if any(phrase <= words for phrase in phrases)
    ]
    found = [
        (text.count("\n", 0, one.start()) + 1, one[0], remedy) for p, remedy in patterns for one in p.finditer(text)
    ]
    yield from sorted((line, " ".join(word.split()), remedy) for line, word, remedy in found)


def main(paths: list[str]) -> int:
    """Print what is found; 1 when anything is."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], check=True, capture_output=True, text=True).stdout
    count = 0
    for path in filter(is_checked, listed.splitlines()):
        for line, word, remedy in banned(Path(path).read_text(encoding="utf-8")):
            count += 1
            print(f"{path}:{line}: {word}: write {remedy}")
    print(f"{count} found")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
