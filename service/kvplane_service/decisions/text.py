"""Format decisions as readable lines: one line per row of the step, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvplane.base.sections import Declined, Prefetch, Prefetched, Retain, Retained
from kvplane.base.step import AdmitStatus, Cache, End, Orders, Part, PartResult, Step, StepResult
from kvplane.base.values import NO_REQUEST, UNLIMITED, PrefetchOutcome, RetainOutcome, WhyDeclined

_SHOWN = 8  # numbers of a list in a line


def operation_lines(step: Step, result: StepResult) -> Iterator[str]:
    """Yield one line per row (operation on one request) with what was requested and granted, such as "run slot 3: 1
    token, blocks 0:[17]".
    """
    yield f"step {step.seq} of epoch {step.epoch}, executed through {step.executed_through}"
    for number, (part, decided) in enumerate(zip(step.parts, result.parts, strict=True), step.part):
        if len(step.parts) > 1 or number:
            yield f"part {number}"
        yield from _part_lines(part, decided)


def _part_lines(part: Part, result: PartResult) -> Iterator[str]:
    yield from _fact_lines(part)
    cache = part.cache
    if cache != Cache():
        done = f", reset: {result.reset_done}" if cache.reset else ""
        yield f"cache: failed steps {cache.failed_steps}, evicted {cache.evicted}, released {cache.released}{done}"
    if cache.hits_checked or cache.mismatched:
        yield f"canary: {cache.hits_checked} hits compared, other content in blocks {_numbers(cache.mismatched)}"
    if cache.loads_over:
        yield f"loads of earlier epochs are over: blocks {cache.loads_over}"
    if cache.jobs_done or cache.jobs_failed:
        yield f"copy jobs: {_numbers(cache.jobs_done)} done, {_numbers(cache.jobs_failed)} failed"
    if cache.costs_ns:
        of_token, *of_block = cache.costs_ns
        yield f"costs in ns: {of_token} to compute a token, {of_block} to load a block from each tier"
    if cache.jobs_before:
        yield f"jobs of the copy engine before {cache.jobs_before}: failed, if they were not reported"
    for row, slot in enumerate(part.news.slot):
        name = f" {part.news.request_id[row]!r}" if part.news.request_id else ""
        hint = f", hint {part.news.hint[row]}" if part.news.hint else ""
        yield f"new slot {slot}{name}: {_tokens(part.news.num_tokens[row])}{hint}"
    if part.resume is not None:
        rows = zip(part.resume.slot, part.resume.computed, strict=True)
        yield from (f"resumed slot {slot}: {_tokens(computed)} computed" for slot, computed in rows)
        yield from (f"held slot {slot}" for slot in part.resume.held_slot)
    blocks = result.new_blocks.by_row()
    for row, (slot, granted) in enumerate(zip(part.run.slot, result.granted, strict=True)):
        yield f"run slot {slot}: {_tokens(granted)}{_needed(_at(result.run_needed, row))}{_blocks(blocks, row)}"
    for row, slot in enumerate(part.admit.slot):
        status = AdmitStatus(result.admit_status[row]).name.lower().replace("_", " ")
        amounts = f"hit {result.admit_hit[row]}, {_tokens(result.admit_granted[row])}"
        amounts += (
            f", {_tokens(result.admit_tier_tokens[row])} of it loaded" if _at(result.admit_tier_tokens, row) else ""
        )
        amounts += _needed(_at(result.admit_needed, row))
        yield f"admit slot {slot}: {status}, {amounts}{_blocks(blocks, len(result.granted) + row)}"
    yield from _declined_lines(part.admit.slot, result.declined)
    yield from _order_lines(result.orders)
    yield from (f"preempted slot {slot}" for slot in result.preempted)
    yield from (f"peek slot {slot}: hit {hit}" for slot, hit in zip(part.peek.slot, result.peek_hit, strict=True))
    yield from _prefetch_lines(part.prefetch, result.prefetched)
    yield from _retain_lines(part.retain, result.retained)
    yield f"{result.free_blocks} blocks free"


def _prefetch_lines(asked: Prefetch, done: Prefetched) -> Iterator[str]:
    rows = zip(asked.slot, done.hit, done.blocks, done.outcome, strict=True)
    for row, (slot, hit, blocks, outcome) in enumerate(rows):
        name = f"{asked.num_hashes[row]} hashes" if slot == NO_REQUEST else f"slot {slot}"
        why = PrefetchOutcome(outcome).name.lower().replace("_", " ")
        yield f"prefetch {name}: hit {hit}, {blocks} blocks to the first tier ({why})"


def _retain_lines(asked: Retain, done: Retained) -> Iterator[str]:
    rows = zip(asked.num_hashes, done.hit, done.blocks, done.left, done.outcome, strict=True)
    for row, (count, hit, blocks, left, outcome) in enumerate(rows):
        owner = asked.owner[row] if asked.owner else ""
        why = RetainOutcome(outcome).name.lower().replace("_", " ")
        yield f"retain {count} hashes for {owner!r}: hit {hit}, {blocks} blocks, {left} left ({why})"
    if done.next_end_ns:
        yield f"what is retained ends at {done.next_end_ns[0]} ns first"


def _declined_lines(slots: Sequence[int], declined: Declined) -> Iterator[str]:
    """Yield a line for each hit of the tiers that an admit row did not load."""
    columns = (getattr(declined, name) for name in Declined.__slots__)
    rows = zip(*columns, strict=True)
    for row, why, tier, hit, load_ns, compute_ns in rows:
        reason = WhyDeclined(why).name.lower().replace("_", " ")
        times = f", {load_ns} ns to load, {compute_ns} ns to compute" if compute_ns else ""
        yield f"admit slot {slots[row]}: a hit of {_tokens(hit)} in tier {tier} is not loaded: {reason}{times}"


def _order_lines(orders: Orders) -> Iterator[str]:
    """Yield a line for each kind of job that the movers of a replica with tiers are given."""
    for job in dict.fromkeys(orders.load_job):
        yield f"load, job {job}: {list(orders.load_job).count(job)} blocks"
    if orders.save_job:
        yield f"save blocks {_numbers(orders.save_block)} as jobs {_numbers(orders.save_job)}"
    if orders.move_job:
        yield f"move {len(orders.move_job)} slots to another tier as jobs {_numbers(orders.move_job)}"


def _numbers(values: Sequence[int]) -> str:
    """Return the first numbers, and how many there are."""
    shown = ", ".join(map(str, values[:_SHOWN]))
    return f"{shown} and {len(values) - _SHOWN} more" if len(values) > _SHOWN else shown or "none"


def _fact_lines(part: Part) -> Iterator[str]:
    facts = part.facts
    for row, slot in enumerate(facts.slot):
        said = []
        if _at(facts.appended, row):
            said.append(f"{_tokens(facts.appended[row])} more")
        if facts.computed and facts.computed[row] >= 0:
            said.append(f"computed {facts.computed[row]}")
        if facts.commit and facts.commit[row] >= 0:
            said.append(f"commit {facts.commit[row]}")
        if facts.release_skipped and facts.release_skipped[row] >= 0:
            said.append(f"release what is skipped at {facts.release_skipped[row]}")
        if facts.hint and facts.hint[row] >= 0:
            said.append(f"hint {facts.hint[row]}")
        if _at(facts.end, row):
            said.append(f"ends: {End(facts.end[row]).name.lower()}")
        yield f"fact slot {slot}: {', '.join(said) or 'nothing'}"


def _needed(count: int) -> str:
    if count == UNLIMITED:
        return ", needs superblocks that are wholly free"
    return f", needs {_count(count, 'block')}" if count else ""


def _at(column: Sequence[int], row: int) -> int:
    return column[row] if column else 0


def _tokens(count: int) -> str:
    return _count(count, "token")


def _count(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


def _blocks(blocks: dict[int, dict[int, list[int]]], row: int) -> str:
    mine = blocks.get(row, {})
    return "".join(f", blocks {group}:{ids}" for group, ids in mine.items())
