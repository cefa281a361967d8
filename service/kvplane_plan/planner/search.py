"""Finds the cheapest plan of a cache, over both layouts and the widths of groups; the reference plan is a candidate.

A block of the pool has room for the widest group, so a group of fewer layers wastes memory, and a layer that is padded
to the page of another one does too. The reference takes the width of the rarest kind of layer, and the given layout.
20 layers of full attention and 29 of a window make groups of 29 and 20 there; groups of 10 waste one layer in 50:

    reference   full [20 + 9 empty]    window [29]
    best        full [10] [10]         window [10] [10] [9 + 1 empty]

A candidate is taken only if, in every cell (a length of requests), at least as many requests fit as with the reference
plan, if as many fit at admission, and if prefix hits are no coarser. Cells count what a decoding request holds at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Planner
from kvplane.base.layer_spec import AttentionSpec, LayerSpec, RequestLimits, ceil_div
from kvplane.base.layers import Layer, RingSpec
from kvplane_plan.planner.grouping import layers_per_format
from kvplane_plan.planner.plan import CachePlan, Layout, PlanOptions, Worker
from kvplane_plan.planner.planner import formats_of, plan_with, whole_model
from kvplane_plan.planner.sizes import NULL_BLOCKS, blocks_per_request

MIX = {2048: 1, 8192: 1, 32_768: 1, 131_072: 1}  # weights of requests by their length in tokens
MOST_LENGTHS = 16  # of a mix
MOST_WEIGHT = 1000
MOST_GROUPS = 8  # a plan may have more only if the reference plan has
MOST_CUTS = 64  # groups into which layers of one format are divided, at most
MOST_PLACED = 1 << 15  # layers of all candidates together; of models with hundreds of layers not all are tried
GROUP_COST = Fraction(1, 500)  # of a block table more, as a share of the memory of an ideal plan


@dataclass(frozen=True, slots=True)
class Cell:
    """How many decoding requests of `length` tokens fit with the reference plan, with the best plan, and if every layer
    of every request took exactly the bytes that it needs.

    Attributes:
        split: how many fit with split pages, if no free block were in a superblock that is not whole; None without a
            plan of the planner SPLIT.
    """

    length: int
    reference: float
    best: float
    ideal: float
    split: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The reference plan and the best one.

    Attributes:
        split: the plan with split pages; None for a model for which there is none.
        binds: the constraint that the cheapest plan of all candidates violates: "cell", "admission", "hit unit" or
            "groups"; "" if it is the best plan: the rest up to the ideal is padding and parts of blocks.
    """

    reference: CachePlan
    best: CachePlan
    cells: tuple[Cell, ...]
    binds: str
    split: CachePlan | None = None


def plan_cache(workers: Sequence[Worker], options: PlanOptions) -> CachePlan:
    """Plan the cache of a replica, by `options.planner`. All workers get the number of blocks for which the smallest
    worker has room.

    Raises:
        InvalidArgument: with the field at fault: layers that contradict each other or cannot share a pool, memory that
            is too small for the longest request, options that the model does not support.
    """
    if options.planner is Planner.BEST:
        return compare(workers, options).best
    return plan_with(workers, options)


def compare(workers: Sequence[Worker], options: PlanOptions, mix: Mapping[int, int] = MIX) -> Comparison:
    """Plan the cache as the reference does, and find the best plan.

    `mix`: how much requests of each length count. Those above the longest request count as the longest one, together
    as much as the one of them that counts most; the longest request always counts, by default 1.

    Raises:
        InvalidArgument: as `plan_cache`, or the number of blocks is given instead of memory, or the mix has too many
            lengths, or a length or weight out of range.
    """
    if not (1 <= len(mix) <= MOST_LENGTHS and all(1 <= weight <= MOST_WEIGHT for weight in mix.values())):
        raise InvalidArgument(
            f"it has {len(mix)} lengths, with weights {sorted(mix.values())[:4]}",
            field="mix",
            remedy=f"give 1 to {MOST_LENGTHS} lengths, each with a weight of 1 to {MOST_WEIGHT}",
        )
    if min(mix) < 1:
        raise InvalidArgument(f"it has a length of {min(mix)} tokens", field="mix", remedy="give lengths of 1 or more")
    if options.num_blocks:
        raise InvalidArgument(
            f"it is {options.num_blocks}, and blocks of another plan have another size",
            field="num_blocks",
            remedy="give memory instead, or use the planner reference",
        )
    options = replace(options, planner=Planner.REFERENCE)
    reference, split = plan_with(workers, options), None
    with suppress(InvalidArgument):
        split = plan_with(workers, replace(reference.options, planner=Planner.SPLIT))
    weights = _weights(reference, mix)
    lengths = tuple(weights)
    ideal = {length: _ideal(workers, reference, length) for length in lengths}
    best, least, binds = reference, _cost(reference, weights, ideal), ""
    cheapest = least
    for plan in _candidates(workers, reference):
        cost, violated = _cost(plan, weights, ideal), _violated(plan, reference, lengths)
        if not violated and cost < least:
            best, least = plan, cost
        if cost < cheapest:
            cheapest, binds = cost, violated
    cells = tuple(
        Cell(
            length,
            float(_fitting(reference, length)),
            float(_fitting(best, length)),
            float(bound),
            float(_fitting(split, length)) if split else None,
        )
        for length, bound in ideal.items()
    )
    return Comparison(reference, best, cells, binds, split)


def _candidates(workers: Sequence[Worker], reference: CachePlan) -> Iterator[CachePlan]:
    """Yield the plans that are possible, each with the longest request of the reference plan."""
    options = reference.options
    counts = layers_per_format(formats_of(whole_model(workers), options)) if options.hybrid else []
    most = min(max(MOST_GROUPS, len(reference.groups)), MOST_CUTS)
    widths = {ceil_div(count, cuts) for count in counts for cuts in range(1, min(most, count) + 1)}
    tried = MOST_PLACED // (2 * sum(len(worker.layers) for worker in workers)) - 1
    widths = set(sorted(widths)[-tried:]) if tried > 0 else set()
    layouts = [options.layout, *(layout for layout in Layout if layout is not options.layout)]
    for layout in layouts:
        for width in (0, *sorted(widths)):
            with suppress(InvalidArgument):
                yield plan_with(workers, replace(options, layout=layout), width)


def _violated(plan: CachePlan, reference: CachePlan, lengths: Sequence[int]) -> str:
    """Return the constraint that the plan violates; "" if it violates none."""
    if any(_fitting(plan, length) < _fitting(reference, length) for length in lengths):
        return "cell"
    if _at_admission(plan) < _at_admission(reference):
        return "admission"
    if reference.hit_alignment % plan.hit_alignment or plan.partial_hits < reference.partial_hits:
        return "hit unit"
    return "groups" if len(plan.groups) > max(MOST_GROUPS, len(reference.groups)) else ""


def _weights(plan: CachePlan, mix: Mapping[int, int]) -> dict[int, Fraction]:
    """Return the weights of the cells, ascending: 1 on the average. The last one is the longest request."""
    longest = plan.options.max_model_len
    weights = {length: mix[length] for length in sorted(mix) if length < longest}
    weights[longest] = max((weight for length, weight in mix.items() if length >= longest), default=1)
    scale = Fraction(len(weights), sum(weights.values()))
    return {length: weight * scale for length, weight in weights.items()}


def _cost(plan: CachePlan, weights: Mapping[int, Fraction], ideal: Mapping[int, Fraction]) -> Fraction:
    """Return the memory of a request as a multiple of the ideal, summed over the cells, and the cost of groups."""
    memory = sum((weights[length] * bound / _fitting(plan, length) for length, bound in ideal.items()), Fraction(0))
    return memory + len(plan.groups) * GROUP_COST


def _fitting(plan: CachePlan, length: int) -> Fraction:
    """Return how many decoding requests of this length fit, fractions included."""
    return _share(plan, blocks_per_request(plan.groups, _decoding(plan.options, length), plan.blocks_per_state))


def _at_admission(plan: CachePlan) -> Fraction:
    """Return how many of the longest requests fit while each has its most tokens in flight."""
    return _share(plan, plan.blocks_per_request)


def _share(plan: CachePlan, blocks: int) -> Fraction:
    return Fraction(max(plan.num_blocks - NULL_BLOCKS * plan.blocks_per_state, 1), max(blocks, 1))


def _decoding(options: PlanOptions, length: int) -> RequestLimits:
    return replace(options.limits, max_model_len=length, max_in_flight_tokens=1)


def _ideal(workers: Sequence[Worker], plan: CachePlan, length: int) -> Fraction:
    """Return how many decoding requests fit if each layer takes exactly what it needs, on the fullest worker."""
    limits = _decoding(plan.options, length)
    formats = formats_of(whole_model(workers), plan.options)
    fitting = []
    for worker in workers:
        own = (formats[layer.name] for layer in worker.layers if isinstance(layer, Layer))
        fitting.append(Fraction(worker.memory_bytes, max(sum(_exact(spec, limits) for spec in own), 1)))
    return min(fitting)


def _exact(spec: LayerSpec, limits: RequestLimits) -> int:
    """Return the bytes of a layer in blocks of one entry, without padding."""
    if isinstance(spec, AttentionSpec) and not isinstance(spec, RingSpec):
        spec = replace(spec, block_size=spec.tokens_per_state, padded_page_bytes=0)
    return spec.content_bytes * spec.blocks_per_request(limits)
