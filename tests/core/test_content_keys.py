"""Two requests have an equal hash only if they have equal content, whatever their extra keys leave out.

Random prompts have images, whose placeholder tokens are alike, and embeddings, all of whose tokens are alike. Their
keys are right, or have one of the mistakes below, each of which states less than the content. A mistake costs the hits
of that request, and nothing of the others in its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from kvplane.base.hashing import continued, digest_embeds
from kvplane.base.step import Admit, Budget, End, ExtraKeys, Facts, Multimodal, News, Part, Run
from tests.core.builders import Engine, full
from tests.twins import weakened

BLOCK = 4
PLACEHOLDER, NO_TOKEN = 99, 0
NO_BYTES = hashlib.sha256(b"").digest()


@dataclass(frozen=True)
class Content:
    """What a prompt consists of: tokens, and what stands behind each; an image or an embedding, or nothing."""

    tokens: tuple[int, ...]
    behind: tuple[str, ...]
    keys: ExtraKeys

    def prefix(self, count: int) -> tuple[object, ...]:
        return self.tokens[:count], self.behind[:count]


def drawn(rng: Random) -> Content:
    """A prompt with images, with embeddings, or with an adapter."""
    length = rng.choice([1, 3, 8, 9, 9, 13, 23])
    kind = rng.choice(["images", "images", "embeddings", "embeddings", "adapter"])
    if kind == "embeddings":
        rows = [rng.choice("ab") if rng.random() < 0.3 else "a" for _ in range(length)]
        keys = ExtraKeys(prompt_embeds=digest_embeds("".join(rows).encode(), 1, BLOCK))
        return Content((NO_TOKEN,) * length, tuple(rows), keys)
    if kind == "adapter":
        name = rng.choice("xy")
        return Content((7,) * length, (name,) * length, ExtraKeys(lora=(name, f"/{name}")))
    items, behind, at = list[Multimodal](), [""] * length, 0
    while at < length and len(items) < 3:
        at += rng.choice([0, 0, 0, 0, 1])
        size = rng.choice([1, 4, 4, 4, 6])
        if at + size > length:
            break
        name = rng.choice("pq")
        items.append(Multimodal(name, at, size))
        behind[at : at + size] = [f"{name}{number}" for number in range(size)]
        at += size
    tokens = tuple(PLACEHOLDER if one else 5 for one in behind)
    return Content(tokens, tuple(behind), ExtraKeys(multimodal=tuple(items)))


def _item(change: Callable[[Multimodal, Content], list[Multimodal]]) -> Callable[[Content, Random], ExtraKeys]:
    def changed(content: Content, rng: Random) -> ExtraKeys:
        items = list(content.keys.multimodal)
        if items:
            at = rng.randrange(len(items))
            items[at : at + 1] = change(items[at], content)
        return replace(content.keys, multimodal=tuple(items))

    return changed


def _digests(
    change: Callable[[tuple[bytes, ...], Content, Random], tuple[bytes, ...]],
) -> Callable[[Content, Random], ExtraKeys]:
    def changed(content: Content, rng: Random) -> ExtraKeys:
        digests = content.keys.prompt_embeds
        return replace(content.keys, prompt_embeds=change(digests, content, rng)) if digests else content.keys

    return changed


def _embeds(content: Content) -> bytes:
    return "".join(content.behind).encode()


MISTAKES: dict[str, Callable[[Content, Random], ExtraKeys]] = {
    "an item without identifier": _item(lambda item, _: [replace(item, identifier="")]),
    "an item of no length": _item(lambda item, _: [replace(item, length=0)]),
    "an item stated twice": _item(lambda item, _: [item, item]),
    "an item behind the prompt": _item(lambda item, content: [replace(item, offset=len(content.tokens) + item.offset)]),
    "an item across the end": _item(lambda item, content: [replace(item, length=len(content.tokens) + 1)]),
    "an item that begins before the prompt": _item(lambda item, _: [replace(item, offset=-1)]),
    "too few digests": _digests(lambda digests, _, rng: digests[: rng.randrange(len(digests))] or digests[:1]),
    "one digest": _digests(lambda digests, _, rng: digests[:1]),
    "too many digests": _digests(lambda digests, _, rng: digests * 2),
    "digests of smaller blocks": _digests(lambda _, content, rng: digest_embeds(_embeds(content), 1, BLOCK // 2)),
    "digests of larger blocks": _digests(lambda _, content, rng: digest_embeds(_embeds(content), 1, BLOCK * 2)),
    "digests of no bytes": _digests(lambda digests, _, rng: (NO_BYTES,) * len(digests)),
    "first digest of no bytes": _digests(lambda digests, _, rng: (NO_BYTES, *digests[1:])),
    "short digests": _digests(lambda digests, _, rng: tuple(one[:16] for one in digests)),
    "an adapter without a name": lambda one, _: replace(one.keys, lora=one.keys.lora and ("", "/x")),
}  # fmt: skip


class Served:
    """Serves requests in steps of several, and looks at the hashes of each."""

    def __init__(self) -> None:
        self.engine = Engine(full(), num_blocks=300, max_model_len=64)
        self.known: dict[bytes, tuple[object, ...]] = {}
        self.hits = self.wrong = self.without = 0

    def serve(self, contents: list[tuple[Content, ExtraKeys]], more: int = 0) -> None:
        """Admit all in one step, let each generate some tokens, and end them."""
        slots = list(range(len(contents)))
        lengths, ids = [len(one.tokens) for one, _ in contents], [token for one, _ in contents for token in one.tokens]
        news = News(slots, lengths, ids)
        news.extra_keys = [keys for _, keys in contents]
        (result,) = self.engine.step(Part(news=news, admit=Admit(slots), budget=Budget(4096)))
        assert all(result.admit_status), "a request is served, whatever its keys are"
        self.hits += sum(result.admit_hit)
        for number in range(more):
            facts = Facts(slots, appended=[1] * len(slots), tokens=[number] * len(slots))
            self.engine.step(Part(facts=facts, run=Run(slots), budget=Budget(4096)))
        for slot, (content, _) in zip(slots, contents, strict=True):
            self._look(slot, content, more)
        self.engine.step(Part(facts=Facts(slots, end=[int(End.FREE)] * len(slots))))

    def _look(self, slot: int, content: Content, more: int) -> None:
        grown = Content((*content.tokens, *range(more)), (*content.behind, *[""] * more), content.keys)
        hashes = list(self.engine.replica.requests.hashes(slot))
        self.without += not hashes and len(content.tokens) >= BLOCK
        for number, digest in enumerate(hashes, 1):
            prefix = grown.prefix(number * BLOCK)
            self.wrong += self.known.setdefault(digest, prefix) != prefix


def damaged(content: Content, rng: Random) -> ExtraKeys:
    """The keys with a mistake that such content can have."""
    wrong = [keys for change in MISTAKES.values() if (keys := change(content, rng)) != content.keys]
    return rng.choice([*wrong, content.keys])


def run(seed: int, mistakes: bool = True) -> Served:
    rng, served = Random(seed), Served()
    for _ in range(12):
        contents = []
        for _ in range(rng.randint(1, 4)):
            content = drawn(rng)
            wrong = mistakes and rng.random() < 0.5
            contents.append((content, damaged(content, rng) if wrong else content.keys))
        served.serve(contents, more=rng.choice([0, 0, 6]))
    return served


@pytest.mark.parametrize("seed", range(12))
def test_equal_hashes_have_equal_content(seed):
    assert run(seed).wrong == 0


def test_right_keys_hit():
    served = [run(seed, mistakes=False) for seed in range(12)]
    assert [one.wrong for one in served] == [one.without for one in served] == [0] * 12
    assert sum(one.hits for one in served) > 500


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_the_hits_of_its_request_alone(mistake):
    rng, served, concerned = Random(mistake), Served(), 0
    for _ in range(40):
        content, other = drawn(rng), drawn(rng)
        keys = MISTAKES[mistake](content, rng)
        if keys == content.keys or len(content.tokens) < BLOCK:
            continue
        before, concerned = served.without, concerned + 1
        served.serve([(other, other.keys), (content, keys)])
        assert served.without == before + 1
    assert concerned > 2
    assert served.wrong == 0


@pytest.mark.parametrize("twin", ["keys are not compared with the prompt", "what has no name is a key"])
def test_a_twin_that_trusts_the_keys_is_found(twin):
    with weakened(twin):
        assert any(run(seed).wrong for seed in range(20))


@pytest.mark.parametrize("length", [9, 12, 13])
def test_a_grown_request_of_embeddings_is_sent_again_with_equal_hashes(length):
    embeds = digest_embeds(bytes(range(length)), 1, BLOCK)
    content = Content((NO_TOKEN,) * length, tuple(map(str, range(length))), ExtraKeys(prompt_embeds=embeds))
    served = Served()
    served.serve([(content, content.keys)], more=9)
    tokens = (*content.tokens, *range(9))
    again = Content(tokens, (*content.behind, *[""] * 9), content.keys)
    served.serve([(again, continued(content.keys, len(tokens), BLOCK))])
    assert (served.without, served.wrong) == (0, 0)
    assert served.hits == (len(tokens) - 1) // BLOCK * BLOCK
