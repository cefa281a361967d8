"""The command `explain`: how many tokens of a prompt hit the prefix cache, and what limited the hit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.base.errors import InvalidArgument
from kvplane.base.values import UNLIMITED, AdmitStatus
from kvplane_tools.cli.client import calls, client_of, print_call
from kvplane_tools.cli.options import TABLE, Grpcurl, Output, Replica, RequestName
from kvplane_tools.cli.output import age, columns, counted, show, word
from kvplane_tools.cli.query.prompt import Domain, Lora, Salt, Tokens, content_of

if TYPE_CHECKING:
    from kvplane.v1.admin_pb2 import ExplainResponse

_SENTENCES = {
    "nothing": "the hit is as long as possible: the last token is always computed",
    "caching_off": "prefix caching is off for this replica",
    "not_read": "the request disabled the prefix-cache lookup",
    "below_one_block": "the prompt is shorter than the smallest possible hit",
    "evicted": "tokens {start}..{end} were cached, and evicted{by_request}{when}",
    "left_window": (
        "tokens {start}..{end} were cached and then left the window of a request, or a later turn superseded them; the "
        "policy evicts such blocks first, and they were evicted{by_request}{when}"
    ),
    "dropped": "tokens {start}..{end} were cached, and their key was dropped{when}",
    "withdrawn": "tokens {start}..{end} were registered by a step that did not run; withdrawn{when}",
    "unverified": "tokens {start}..{end} were cached in an earlier epoch; the stamps did not verify them{when}",
    "without_stamps": "tokens {start}..{end} were cached until epoch {epoch} began without stamps{ago}",
    "reset": "tokens {start}..{end} were cached until the cache was reset{when}",
    "tentative": ("tokens {start}..{end} were registered by step {seq} of epoch {epoch}, not yet reported as executed"),
    "window_not_resident": "tokens {start}..{end} were computed, but no window ending at {wanted} is cached",
    "no_state_at_boundary": (
        "the prefix was computed, but no state is cached at token {end}: it was not retained, or no chunk ended there "
        "(the row was UNALIGNED, or its step was smaller than a state block)"
    ),
    "unproven_keys": "its extra keys (images, embeddings, adapter) do not prove its content: it shares no block",
    "other_domain": "tokens {start}..{end} were computed in another domain, {domain}",
    "other_salt": "tokens {start}..{end} were computed with another cache salt, or none",
    "other_lora": "tokens {start}..{end} were computed with another adapter, {adapter}",
    "other_multimodal": "tokens {start}..{end} were computed with other multimodal items",
    "differs": "another prompt shares {start} tokens, then differs; the first different token is in {start}..{end}",
    "never_cached": "tokens {start}..{end} were never computed{alike}",
    "last_block_dropped": "all blocks are cached; the draft group drops the last matching one",
    "in_tier": "tokens {start}..{end} are in the {tier} tier{peers}; an admission with LOAD loads them",
    "too_slow": "tokens {start}..{end}: {lacked} on {tier}, not loaded: {load_s} > {compute_s}",
    "no_job": "tokens {start}..{end}: {lacked} on {tier}, not loaded: too many copy jobs were in flight",
    "given_up": (
        "tokens {start}..{end}: {lacked} on {tier}, not loaded: loads in flight that no request waits for any more "
        "leave no room"
    ),
    "mismatch": "tokens {start}..{end} were cached until a canary found other content in their block{when}",
    "waits": "tokens {start}..{end}: {lacked} on {tier}; the admission waits until loads in flight end",
    "not_recorded": "not recorded: the decision log does not reach back that far",
}


def explain_command(
    replica: Replica,
    request: RequestName = "",
    block: Annotated[int, typer.Option(min=0, help="A block: shows the history of the keys that it has had.")] = 0,
    tokens: Tokens = None,
    domain: Domain = "",
    salt: Salt = "",
    lora: Lora = "",
    output: Output = TABLE,
    grpcurl: Grpcurl = False,
) -> None:
    """Explain the prefix-cache hit length of a prompt, or of a request at its latest attempt to be admitted, or what a
    block has had. A request without a name is called as `kvplane requests` lists it: --request "slot 0".
    """
    if [bool(request), bool(block), tokens is not None].count(True) != 1:
        raise InvalidArgument(
            "none or several of --request, --block and --tokens are set",
            remedy="give exactly one of --request, --block and --tokens",
        )
    what = (request or block) if tokens is None else content_of(tokens, domain, salt, lora)
    print_call(grpcurl, calls.explain(replica, what))
    with client_of() as client:
        answer = client.explain(replica, what)
    show(answer, output, table=lambda: "\n".join(_changes(answer) if block else _lines(answer)))


def _changes(answer: ExplainResponse) -> Iterator[str]:
    from kvplane.v1.admin_pb2 import MissCause

    rows = [("AGE", "STEP", "EPOCH", "BLOCK", "GROUP", "KEY", "CHANGE")]
    for one in answer.changes:
        by = f" by request {one.by!r}" if one.by else ""
        how = f"loaded from the {one.tier} tier{by}" if one.tier else f"computed{by}"
        change = how if one.stored else f"removed: {word(MissCause.Name(one.cause), 'MISS_CAUSE_')}{by}"
        where = (str(one.seq or "begin"), str(one.epoch), str(one.block or "all"), str(one.group))
        rows.append((age(one.age_ms), *where, one.hash.hex()[:16], change))
    yield columns(rows)
    if not answer.log_is_complete:
        yield "the decision log does not reach back to the registration of the replica"


def _lines(answer: ExplainResponse) -> Iterator[str]:
    from kvplane.v1.replica_pb2 import GroupKind

    attempt = f" in step {answer.admit_seq} of epoch {answer.admit_epoch}" if answer.admit_seq else ""
    yield f"{answer.hit_tokens} of {answer.num_tokens} tokens hit{attempt}; longest possible hit: {answer.longest_hit}"
    rows = [("GROUP", "KIND", "HIT ALONE", "")]
    for group in answer.groups:
        kind = word(GroupKind.Name(group.kind), "GROUP_KIND_")
        mark = f"limits the hit, else {answer.wanted}" if group.group in answer.cut_by else ""
        rows.append((str(group.group), kind, str(group.hit_tokens), mark))
    yield columns(rows)
    yield f"cause: {sentence(answer)}"
    if answer.admit_status == AdmitStatus.NEVER_FITS:
        yield f"the request never fits: it holds {_blocks(answer.admit_needed)} at one time, more than the pool has"
    elif answer.admit_needed:
        yield f"the admission was refused: it needed {_blocks(answer.admit_needed)}, {answer.admit_free} were free"
    if answer.run_needed:
        when = " after it was preempted" if answer.run_preempted else ""
        needed = f"it needed {_blocks(answer.run_needed)} more, {answer.run_free} were free{when}"
        yield f"step {answer.run_seq} gave it no tokens: {needed}"
    if not answer.log_is_complete:
        yield "the decision log does not reach back to the registration of the replica"


def _blocks(needed: int) -> str:
    return "superblocks that are wholly free" if needed == UNLIMITED else counted(needed, "block")


def sentence(answer: ExplainResponse) -> str:
    """Return, as a sentence, the reason for which the prefix-cache hit is not longer."""
    from kvplane.v1.admin_pb2 import MissCause

    cause = word(MissCause.Name(answer.cause), "MISS_CAUSE_")
    moment = f"in step {answer.seq} of epoch {answer.epoch}" if answer.seq else f"when epoch {answer.epoch} began"
    return _SENTENCES[cause].format(
        start=answer.start,
        end=answer.end,
        seq=answer.seq,
        epoch=answer.epoch,
        ago=f" {age(answer.age_ms)} ago" if answer.epoch else "",
        wanted=answer.wanted,
        by=answer.by,
        by_request=f" by request {answer.by!r}" if answer.by else "",
        when=f" {age(answer.age_ms)} ago, {moment}" if answer.epoch else "",
        alike=" with its salt and adapter" if answer.admit_seq else "",
        domain=repr(answer.by) if answer.by else "the default one",
        adapter=repr(answer.by) if answer.by else "or none",
        tier=answer.by,
        peers=f" ({', '.join(answer.peers)})" if answer.peers else "",
        lacked=" and ".join(f"group {group}" for group in answer.cut_by) + " lacked,",
        load_s=f"{answer.load_ns / 1e9:.3g} s",
        compute_s=f"{answer.compute_ns / 1e9:.3g} s",
    )
