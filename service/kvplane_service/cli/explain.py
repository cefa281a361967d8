"""`kvplane explain`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_service.cli.asking import (
    DEFAULT_SERVICE,
    Form,
    Grpcurl,
    Output,
    Replica,
    Service,
    age,
    client_of,
    columns,
    grpcurl_line,
    show,
    word,
)

if TYPE_CHECKING:
    from kvplane import Content
    from kvplane.v1.admin_pb2 import ExplainResponse

_SENTENCES = {
    "nothing": "nothing: the hit is as long as it can be, since the last token is always computed",
    "caching_off": "the replica caches nothing",
    "not_read": "the request asked for no look-up",
    "below_one_block": "the prompt is shorter than the least hit",
    "evicted": "tokens {start}..{end} were cached, and evicted{by_request}{when}",
    "dropped": "tokens {start}..{end} were cached, and their key was dropped{when}",
    "withdrawn": "tokens {start}..{end} were registered by a step that did not run; withdrawn{when}",
    "unverified": "tokens {start}..{end} were cached in an earlier engine life; the memory did not prove them{when}",
    "without_stamps": "tokens {start}..{end} were cached until engine life {epoch} began without stamps{ago}",
    "reset": "tokens {start}..{end} were cached until the cache was reset{when}",
    "tentative": (
        "tokens {start}..{end} were registered by step {seq} of engine life {epoch}, which is not known to be executed"
    ),
    "window_not_resident": "tokens {start}..{end} were computed, but no window that ends at {wanted} was kept",
    "no_state_at_boundary": (
        "the prefix was computed, but no state was kept at token {end}: by the rule of retention, or since no chunk "
        "ended there (its row was UNALIGNED, or its step below a state block)"
    ),
    "other_domain": "tokens {start}..{end} were computed in another domain, {domain}",
    "other_salt": "tokens {start}..{end} were computed under another cache salt, or none",
    "other_lora": "tokens {start}..{end} were computed with another adapter, {adapter}",
    "other_multimodal": "tokens {start}..{end} were computed with other multimodal items",
    "differs": "another prompt begins alike and goes on otherwise; the first different token is among {start}..{end}",
    "never_cached": "nobody has computed tokens {start}..{end}{alike}",
    "last_block_dropped": "all blocks are there; the draft group drops the last one that matches",
    "not_recorded": "not recorded: the decision log does not reach so far back",
}


def command(
    replica: Replica,
    request: Annotated[str, typer.Option(help="name of a request: its last attempt to be admitted")] = "",
    tokens: Annotated[
        Path | None, typer.Option(help="file with token ids, apart by spaces, commas or lines; - = stdin")
    ] = None,
    domain: Annotated[str, typer.Option(help="of the prompt")] = "",
    salt: Annotated[str, typer.Option(help="cache salt of the prompt")] = "",
    lora: Annotated[str, typer.Option(help="adapter of the prompt, NAME or NAME=PATH")] = "",
    service: Service = DEFAULT_SERVICE,
    output: Output = Form.TABLE,
    grpcurl: Grpcurl = False,
) -> None:
    """Tell why a prompt, or a request when it was admitted, hit so much of the prefix cache and not more."""
    from kvplane import InvalidArgument, calls

    if bool(request) == (tokens is not None):
        raise InvalidArgument("nothing to explain, or two things", remedy="give exactly one of --request and --tokens")
    what = request if tokens is None else _content(tokens, domain, salt, lora)
    if grpcurl:
        print(grpcurl_line(service, calls.explain(replica, what)))
        return
    with client_of(service) as client:
        answer = client.explain(replica, what)
    show(answer, output, lambda: "\n".join(_lines(answer)))


def _content(file: Path, domain: str, salt: str, lora: str) -> Content:
    from kvplane import Content, ExtraKeys, InvalidArgument, NotFound

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        ids = [int(piece) for piece in text.replace(",", " ").replace("[", " ").replace("]", " ").split()]
    except OSError as error:
        raise NotFound(f"{file}: {error.strerror}", field="--tokens") from None
    except ValueError as error:
        raise InvalidArgument(f"{file} holds something else than token ids: {error}", field="--tokens") from None
    name, _, path = lora.partition("=")
    keys = ExtraKeys(lora=(name, path) if lora else None, salt=salt)
    return Content(tokens=ids, domain=domain, extra_keys=keys)


def _lines(told: ExplainResponse) -> Iterator[str]:
    from kvplane.v1.replica_pb2 import GroupKind

    attempt = f" when it was tried in step {told.admit_seq} of engine life {told.admit_epoch}" if told.admit_seq else ""
    yield f"{told.hit_tokens} of {told.num_tokens} tokens hit{attempt}; the longest hit would be {told.longest_hit}"
    rows = [("GROUP", "KIND", "HAS ALONE", "")]
    for group in told.groups:
        kind = word(GroupKind.Name(group.kind), "GROUP_KIND_")
        mark = f"cut the hit from {told.wanted}" if group.group in told.cut_by else ""
        rows.append((str(group.group), kind, str(group.hit_tokens), mark))
    yield columns(rows)
    yield f"why: {sentence(told)}"
    if not told.log_is_complete:
        yield "the decision log does not reach back to the registration of the replica"


def sentence(told: ExplainResponse) -> str:
    """The cause in words."""
    from kvplane.v1.admin_pb2 import MissCause

    cause = word(MissCause.Name(told.cause), "MISS_CAUSE_")
    life = f"engine life {told.epoch}"
    moment = f"in step {told.seq} of {life}" if told.seq else f"when {life} began"
    return _SENTENCES[cause].format(
        start=told.start,
        end=told.end,
        seq=told.seq,
        epoch=told.epoch,
        ago=f" {age(told.age_ms)} ago" if told.epoch else "",
        wanted=told.wanted,
        by=told.by,
        by_request=f" by request {told.by!r}" if told.by else "",
        when=f" {age(told.age_ms)} ago, {moment}" if told.epoch else "",
        alike=" with its salt and adapter" if told.admit_seq else "",
        domain=repr(told.by) if told.by else "the default one",
        adapter=repr(told.by) if told.by else "or none",
    )
