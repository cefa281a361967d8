"""Random configurations of each kind, as headers of kvtrace/1 without what the reference derives."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

Record = dict[str, Any]
Group = Record  # {"spec": fields, "is_eagle_group": bool, "num_layers": int}

HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@dataclass(frozen=True, slots=True)
class Habits:
    """How a scheduler of this configuration behaves: probabilities and amounts from which intents are drawn.

    Attributes:
        in_flight: steps that may be in flight when the next is planned (async scheduling).
        drafts: tokens proposed per decode step.
        lookahead: slots for drafts to come.
        external: probability that an admission has external tokens.
        encoder: most encoder tokens of a request.
        full_fit, reserved, first, skip, hold, free_chunks: probabilities of an admission whose whole sequence must
            fit, that leaves blocks to others, that is the first of its step (no watermark), of a request that reads no
            cache, of blocks held past the end, and of a chunk that ends where no recurrent state can be cached.
    """

    in_flight: int = 0
    drafts: int = 0
    lookahead: int = 0
    external: float = 0.0
    encoder: int = 0
    full_fit: float = 0.1
    reserved: float = 0.05
    first: float = 0.2
    skip: float = 0.03
    hold: float = 0.1
    free_chunks: float = 0.1


@dataclass(slots=True)
class Draft:
    """A configuration while it is drawn."""

    random: Random
    groups: list[Group]
    habits: Habits = field(default_factory=Habits)
    args: Record = field(default_factory=dict)
    retention: int | None = 0
    segments: int = 0  # retention in scheduler blocks; 0: `retention` applies
    hash_algo: str = ""
    finer_hashes: bool = False
    max_model_len: int = 0

    def habit(self, **changes: Any) -> None:
        """Change some habits."""
        self.habits = replace(self.habits, **changes)


# -- groups --------------------------------------------------------------------------------------------------------


def _attention(kind: str, block_size: int, **fields: Any) -> Group:
    spec = {"type": kind, "block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
    return {"num_layers": 1, "is_eagle_group": False, "spec": spec | fields}


def full(random: Random, size: int) -> Group:
    """Full attention."""
    del random
    return _attention("FullAttentionSpec", size)


def mla(random: Random, size: int) -> Group:
    """Multi-head latent attention."""
    return _attention("MLAAttentionSpec", size, head_size=random.choice((8, 16)))


def sliding(random: Random, size: int) -> Group:
    """A window from one token to some blocks, on block boundaries and next to them."""
    return _attention("SlidingWindowSpec", size, sliding_window=_window(random, size))


def sliding_mla(random: Random, size: int) -> Group:
    """A window over latent pages."""
    return _attention("SlidingWindowMLASpec", size, sliding_window=_window(random, size))


def _window(random: Random, size: int) -> int:
    return max(1, random.randint(0, 6) * size + random.choice((-1, 0, 1, 2)))


def chunked(random: Random, size: int) -> Group:
    """Chunks of whole blocks mostly."""
    chunk = random.randint(1, 6) * size + random.choice((0, 0, 0, 0, size // 2))
    return _attention("ChunkedLocalAttentionSpec", size, attention_chunk_size=chunk)


def r_swa(random: Random, size: int) -> Group:
    """Reference sliding window attention."""
    return _attention("RSWASpec", size, rswa_window=_window(random, size))


def ring(random: Random, size: int) -> Group:
    """One block per request."""
    del random
    return _attention("CircularBufferSpec", size)


def cross(random: Random, size: int) -> Group:
    """Blocks by encoder tokens."""
    del random
    return _attention("CrossAttentionSpec", size)


def state(random: Random, size: int, speculative: int = 0, mode: str = "align") -> Group:
    """Recurrent state."""
    spec = {
        "type": "MambaSpec", "block_size": size, "shapes": [[random.choice((8, 16))]], "dtypes": ["float32"],
        "mamba_cache_mode": mode, "num_speculative_blocks": speculative,
    }  # fmt: skip
    return {"num_layers": 1, "is_eagle_group": False, "spec": spec}


def base_size(random: Random) -> int:
    """Tokens per block: small, so that short requests have many."""
    return random.choice((2, 4, 4, 8, 8, 16))


# -- kinds ---------------------------------------------------------------------------------------------------------


def _single(make: Callable[[Random, int], Group]) -> Callable[[Random], Draft]:
    def draw(random: Random) -> Draft:
        return Draft(random, [make(random, base_size(random))])

    return draw


def _with_full(make: Callable[[Random, int], Group], most: int = 3) -> Callable[[Random], Draft]:
    """The kind alone, or with one or two full groups, in any order."""

    def draw(random: Random) -> Draft:
        size = base_size(random)
        groups = [make(random, size) for _ in range(random.randint(1, most))]
        groups += [full(random, size) for _ in range(random.choice((0, 1, 1, 2)))]
        random.shuffle(groups)
        return Draft(random, groups)

    return draw


def _chunked(random: Random) -> Draft:
    size = base_size(random)
    groups = [chunked(random, size) for _ in range(random.randint(1, 3))] + [full(random, size)]
    if random.random() < 0.3:
        groups.append(sliding(random, size))
    random.shuffle(groups)
    return Draft(random, groups if random.random() < 0.85 else groups[:1])


def _mamba_align(random: Random) -> Draft:
    size = base_size(random) * random.choice((1, 2, 4))
    one = state(random, size)
    groups = [deepcopy(one) if random.random() < 0.7 else state(random, size) for _ in range(random.randint(1, 4))]
    groups += [full(random, size) for _ in range(random.choice((0, 1, 1, 2)))]
    random.shuffle(groups)
    return Draft(random, groups)


def _mamba_partial(random: Random) -> Draft:
    """Hits inside a state block: hashes finer than states."""
    unit = random.choice((2, 4, 8))
    size = unit * random.choice((2, 3, 4, 8))
    groups = [state(random, size) for _ in range(random.randint(1, 3))]
    for _ in range(random.randint(1, 2)):
        groups.append(random.choice((full, mla))(random, random.choice((size, size, unit, 2 * unit))))
    if random.random() < 0.2:
        groups.append(sliding(random, unit))
    random.shuffle(groups)
    draft = Draft(random, groups, finer_hashes=True)
    draft.args["hash_block_size"] = unit
    return draft


def _mamba_spec(random: Random) -> Draft:
    draft = random.choice((_mamba_align, _mamba_partial))(random)
    drafts = random.randint(1, 3)
    _propose(draft, drafts)
    draft.habit(lookahead=random.choice((0, drafts)))
    if random.random() < 0.4:
        _drops(draft)
    return draft


def _mamba_checkpoint(random: Random) -> Draft:
    """Launches also write a state inside their chunk."""
    draft = random.choice((_mamba_align, _mamba_partial, _mamba_partial, _mamba_spec))(random)
    alignment = random.choice((1, 1, 2, 4, 8))
    for group in draft.groups:
        if group["spec"]["type"] == "MambaSpec":
            group["spec"] |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": alignment}
    draft.habit(free_chunks=0.3)
    if random.random() < 0.3:
        draft.retention = random.choice((None, 0))
    return draft


def _mamba_shared_prefix(random: Random) -> Draft:
    """A chunk ends at the single-group hit, and the state there is kept; half of the time also inside chunks."""
    draft = _mamba_partial(random)
    if random.random() < 0.5:
        for group in draft.groups:
            if group["spec"]["type"] == "MambaSpec":
                group["spec"] |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    _propose(draft, random.randint(1, 3))
    _drops(draft)
    draft.args["enable_mamba_shared_prefix_checkpoint"] = True
    return draft


def _mamba_none(random: Random) -> Draft:
    size = base_size(random)
    length = size * random.randint(12, 40)
    drafts = random.choice((0, 0, 1, 2))
    groups = [state(random, length, drafts, "none") for _ in range(random.randint(1, 3))]
    groups += [random.choice((full, sliding))(random, size) for _ in range(random.randint(0, 2))]
    random.shuffle(groups)
    draft = Draft(random, groups, max_model_len=length)
    draft.args["enable_caching"] = False
    draft.habit(drafts=drafts)
    return draft


def _cross(random: Random) -> Draft:
    size = base_size(random)
    groups = [cross(random, size)] + [full(random, size) for _ in range(random.randint(1, 2))]
    random.shuffle(groups)
    draft = Draft(random, groups)
    draft.args["enable_caching"] = False
    draft.habit(encoder=random.randint(1, 12) * size)
    return draft


def _ring(random: Random) -> Draft:
    draft = _hybrid(random)
    for _ in range(random.randint(1, 2)):
        size = random.choice(draft.groups)["spec"]["block_size"]
        draft.groups.insert(random.randint(0, len(draft.groups)), ring(random, size))
    return draft


def _hybrid(random: Random) -> Draft:
    """2 to 8 groups, some equal, in any order, with mixed block sizes; chunked local only where all are equal."""
    unit = base_size(random)
    sizes = [unit * k for k in random.choice(((1,), (1,), (1, 2), (1, 2, 4), (1, 3), (2, 3), (1, 2, 3), (1, 8)))]
    makers = [full, full, mla, sliding, sliding, sliding_mla, r_swa]
    if len(sizes) == 1:
        makers.append(chunked)
    kinds = [random.choice(makers)(random, random.choice(sizes)) for _ in range(random.randint(1, 4))]
    if random.random() < 0.35:
        kinds.append(state(random, random.choice((sizes[-1], math.lcm(*sizes)))))
    count = random.randint(max(2, len(kinds)), 8)
    groups = kinds + [deepcopy(random.choice(kinds)) for _ in range(count - len(kinds))]
    random.shuffle(groups)
    return Draft(random, groups, finer_hashes=random.random() < 0.3)


def _hybrid_without_chunks(random: Random) -> Draft:
    """Draft layers and chunked local attention cannot be combined."""
    while True:
        draft = _hybrid(random)
        if all(group["spec"]["type"] != "ChunkedLocalAttentionSpec" for group in draft.groups):
            return draft


def _eagle(random: Random) -> Draft:
    draft = random.choice((_single(full), _single(sliding), _hybrid_without_chunks, _hybrid_without_chunks))(random)
    _propose(draft, random.randint(1, 4))
    _drops(draft)
    return draft


def _eagle_mixed(random: Random) -> Draft:
    """Windows of small blocks with large blocks: varies which blocks are kept, and where a dropped block ends a hit."""
    unit = random.choice((2, 4))
    groups = [random.choice((sliding, sliding_mla))(random, unit) for _ in range(random.randint(1, 3))]
    groups += [full(random, unit * random.choice((2, 3, 4, 8))) for _ in range(random.randint(0, 2))]
    if random.random() < 0.3:
        groups.append(sliding(random, unit * random.choice((2, 4))))
    random.shuffle(groups)
    draft = Draft(random, groups, retention=random.choice((None, 0)))
    draft.segments = random.choice((0, 0, 1, 2))
    _propose(draft, random.randint(0, 3))
    _drops(draft)
    return draft


def _propose(draft: Draft, drafts: int) -> None:
    """Propose `drafts` drafts per step; each has a state in addition to the running one."""
    draft.habit(drafts=drafts, lookahead=drafts)
    for group in draft.groups:
        if group["spec"]["type"] == "MambaSpec":
            group["spec"]["num_speculative_blocks"] = drafts


def _drops(draft: Draft) -> None:
    """Some groups hold draft layers; if no group is marked, all groups drop a block."""
    draft.args["use_eagle"] = True
    for group in draft.groups:
        group["is_eagle_group"] = draft.random.random() < 0.3


def _mtp(random: Random) -> Draft:
    """A drafter of several modules looks ahead during prefill."""
    draft = _eagle(random)
    ahead = random.randint(2, 4)
    if math.lcm(*(group["spec"]["block_size"] for group in draft.groups)) < ahead:
        return _mtp(random)  # the block that a look-up drops must hold all drafts
    draft.args["num_prefill_lookahead"] = ahead
    for group in draft.groups:
        if "sliding_window" in group["spec"]:
            group["spec"]["extra_retained_tokens"] = ahead - 1
    _propose(draft, ahead)
    if any(group["spec"]["type"] == "MambaSpec" for group in draft.groups):
        draft.habit(free_chunks=0.0)  # no scheduler makes such chunks here: the reference would fail an assertion
    return draft


def _dcp(random: Random) -> Draft:
    """Context parallelism over two ranks: attention blocks span twice the tokens, replicated groups do not."""
    size = base_size(random)
    groups = [random.choice((full, mla))(random, size) for _ in range(random.randint(1, 2))]
    if random.random() < 0.5:
        groups += [state(random, 2 * size * random.choice((1, 2))) for _ in range(random.randint(1, 3))]
    elif random.random() < 0.5:
        groups.append(sliding(random, size * random.choice((1, 2))))
        groups[-1]["spec"]["dcp_sharded"] = False
    random.shuffle(groups)
    draft = Draft(random, groups, finer_hashes=random.random() < 0.4)
    draft.args["dcp_world_size"] = 2
    return draft


def _retention(random: Random) -> Draft:
    draft = random.choice((_with_full(sliding), _mamba_align, _mamba_partial, _hybrid))(random)
    if any(group["spec"]["type"] in SPARSE for group in draft.groups):
        draft.segments = random.choice((1, 1, 2, 3, 5))
    if random.random() < 0.2 and all("attention_chunk_size" not in group["spec"] for group in draft.groups):
        _drops(draft)
    return draft


def _with(draw: Callable[[Random], Draft], change: Callable[[Draft], None]) -> Callable[[Random], Draft]:
    def drawn(random: Random) -> Draft:
        draft = draw(random)
        change(draft)
        return draft

    return drawn


def _any(random: Random) -> Draft:
    draw = random.choice((_single(full), _with_full(sliding), _mamba_align, _mamba_partial, _hybrid))
    return draw(random)


def _hashed(name: str) -> Callable[[Random], Draft]:
    def change(draft: Draft) -> None:
        draft.hash_algo = name

    return _with(_any, change)


def _watermark(draft: Draft) -> None:
    draft.args["watermark"] = draft.random.choice((0.01, 0.05, 0.1, 0.3))
    draft.habit(first=0.4)


def _in_flight(draft: Draft) -> None:
    draft.habit(in_flight=draft.random.randint(1, 3), drafts=draft.random.choice((0, 0, 2)))


def _lookahead(draft: Draft) -> None:
    drafts = draft.random.randint(1, 5)
    draft.habit(drafts=drafts, lookahead=draft.random.choice((0, drafts, drafts + 2)))


def _uncached(draft: Draft) -> None:
    draft.args["enable_caching"] = False


def _hash_lookahead(draft: Draft) -> None:
    """Hashes that cover tokens behind their block; draft groups then drop nothing.

    More than one such token only where full attention is asked first: without it the reference looks for hashes
    that do not exist yet (IndexError).
    """
    bounded = any(group["spec"]["type"] in ("FullAttentionSpec", "MLAAttentionSpec") for group in draft.groups)
    draft.args["num_hash_lookahead_tokens"] = draft.random.randint(1, 3) if bounded else 1
    for group in draft.groups:
        group["is_eagle_group"] = draft.random.random() < 0.3


SPARSE = ("SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec")
KINDS: dict[str, Callable[[Random], Draft]] = {
    "full": _single(full),
    "mla": _single(mla),
    "sliding": _with_full(sliding),
    "sliding-mla": _with_full(sliding_mla),
    "chunked": _chunked,
    "mamba-align": _mamba_align,
    "mamba-partial": _mamba_partial,
    "mamba-speculative": _mamba_spec,
    "mamba-checkpoint": _mamba_checkpoint,
    "mamba-shared-prefix": _mamba_shared_prefix,
    "mamba-none": _mamba_none,
    "r-swa": _with_full(r_swa),
    "cross": _cross,
    "ring": _ring,
    "hybrid": _hybrid,
    "eagle": _eagle,
    "eagle-mixed": _eagle_mixed,
    "mtp": _mtp,
    "dcp": _dcp,
    "retention-n": _retention,
    "retention-0": _with(_any, lambda draft: setattr(draft, "retention", 0)),
    "retention-dense": _with(_any, lambda draft: setattr(draft, "retention", None)),
    **{f"hash-{name.replace('_', '-')}": _hashed(name) for name in HASHES},
    "hash-lookahead": _with(_any, _hash_lookahead),
    "watermark": _with(_any, _watermark),
    "full-fit": _with(_any, lambda draft: draft.habit(full_fit=0.8)),
    "reserved": _with(_any, lambda draft: draft.habit(reserved=0.7)),
    "external": _with(_any, lambda draft: draft.habit(external=0.5)),
    "in-flight": _with(_any, _in_flight),
    "lookahead": _with(_any, _lookahead),
    "uncached": _with(_any, _uncached),
}


# -- headers -------------------------------------------------------------------------------------------------------


def draw_header(kind: str, seed: int) -> tuple[Record, Habits]:
    """A configuration and how its scheduler behaves; the same for the same kind and seed."""
    random = Random(f"{kind}/{seed}")
    draft = KINDS[kind](random)
    sizes = [_span(group["spec"], draft.args.get("dcp_world_size", 1)) for group in draft.groups]
    scheduler = math.lcm(*sizes)
    length = draft.max_model_len or max(scheduler * random.randint(3, 8), random.randint(100, 320))
    if draft.random.random() < 0.3 and kind not in ("retention-n", "retention-0", "retention-dense"):
        draft.retention = None
    if random.random() < 0.2:
        _mix_precision(draft)
    header = {
        "name": f"{kind}-s{seed}",
        "kind": kind,
        "seed": seed,
        "hash_algo": draft.hash_algo or random.choice(HASHES),
        "none_hash_seed": random.choice(("vllm-none-hash", "17", "a secret")),
        "num_blocks": _num_blocks(random, draft, sizes, length),
        "manager_args": {
            "max_model_len": length,
            "scheduler_block_size": scheduler,
            "hash_block_size": _hash_block(draft, sizes, scheduler),
            "max_in_flight_tokens": random.choice((8, 32, 64, 512)),
            "enable_caching": True,
            "use_eagle": False,
            "log_stats": True,
            "enable_kv_cache_events": True,
            "dcp_world_size": 1,
            "watermark": 0.0,
            "num_prefill_lookahead": 0,
        }
        | {name: value for name, value in draft.args.items() if name != "hash_block_size"},
        "retention_interval": draft.segments * scheduler or draft.retention,
        "groups": draft.groups,
    }
    return header, draft.habits


def _mix_precision(draft: Draft) -> None:
    """Groups of several precisions: new blocks must be zeroed, and equal kinds are no longer looked up jointly."""
    for group in draft.groups:
        if "dtype" in group["spec"]:
            group["spec"]["dtype"] = draft.random.choice(("bfloat16", "float16"))


def _span(spec: Record, dcp: int) -> int:
    sharded = spec.get("dcp_sharded", spec["type"] != "MambaSpec")
    return int(spec["block_size"]) * (dcp if sharded else 1)


def _hash_block(draft: Draft, sizes: list[int], scheduler: int) -> int:
    """One group hashes its blocks; several the greatest common divisor of those that are cached, or finer."""
    if len(sizes) == 1 or not draft.args.get("enable_caching", True):
        return scheduler
    types = [group["spec"]["type"] for group in draft.groups]
    cached = [size for size, kind in zip(sizes, types, strict=True) if kind != "CircularBufferSpec"]
    widest = math.gcd(*cached)
    asked = draft.args.get("hash_block_size")
    if asked and widest % asked == 0:
        return int(asked)
    divisors = [n for n in range(1, widest + 1) if widest % n == 0]
    return draft.random.choice(divisors) if draft.finer_hashes else widest


def _num_blocks(random: Random, draft: Draft, sizes: list[int], length: int) -> int:
    """From too few for two long requests to plenty for the prefix cache."""
    alone = 0
    for group, size in zip(draft.groups, sizes, strict=True):
        spec = group["spec"]
        if spec["type"] == "MambaSpec":
            alone += 3 + spec["num_speculative_blocks"]
        elif spec["type"] == "CircularBufferSpec":
            alone += 1
        else:
            alone += -(-length // size)
    return 2 + int(alone * random.choice((0.7, 1.1, 1.5, 2.0, 3.0, 6.0)))
