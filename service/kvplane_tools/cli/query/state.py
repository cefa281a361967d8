"""Commands that read the state of replicas: `lookup`, `requests`, `snapshot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplane.base.errors import FailedPrecondition, InvalidArgument, NotFound
from kvplane_tools.cli.client import calls, client_of, print_call
from kvplane_tools.cli.options import TABLE, Grpcurl, Limit, Output, Replica, RequestName, Watch
from kvplane_tools.cli.output import columns, counted, escaped, fields_of, repeat, request_state, show, text_of
from kvplane_tools.cli.query.prompt import Domain, Lora, Salt, Tokens, content_of

if TYPE_CHECKING:
    from kvplane import Client, Content
    from kvplane.v1.admin_pb2 import ListRequestsResponse


_LISTED = 100  # requests by default


def lookup_command(
    replica: Annotated[str, typer.Argument(help="Name of the replica. Default: all replicas.")] = "",
    request: RequestName = "",
    tokens: Tokens = None,
    domain: Domain = "",
    salt: Salt = "",
    lora: Lora = "",
    output: Output = TABLE,
    watch: Watch = None,
    grpcurl: Grpcurl = False,
) -> None:
    """Look up how much of a prompt, or of a request, one replica or each replica has cached; the longest hit first.

    Changes nothing, not even which block is evicted next. Replicas whose engine is not connected have no hit; the last
    column says why.
    """
    if bool(request) == (tokens is not None) or (request and not replica):
        remedy = "give --tokens, or REPLICA and --request"
        raise InvalidArgument("it is not clear what to look up", field="--tokens", remedy=remedy)
    what = request if tokens is None else content_of(tokens, domain, salt, lora)
    print_call(grpcurl, calls.find_cache_hit(replica or "REPLICA", what))

    def one() -> None:
        names = [replica] if replica else [known.replica for known in client.list_replicas()]
        hits = sorted((_hit(client, name, what) for name in names), key=lambda hit: -hit["hit_tokens"])
        if replica and hits[0]["refused"]:
            client.find_cache_hit(replica, what)  # raises the refusal
        table = [("REPLICA", "HIT", "OF", "ONE GROUP ALONE", ""), *map(_hit_row, hits)]
        names_text = "\n".join(hit["replica"] for hit in hits if hit["hit_tokens"])
        print(text_of(lambda: {"hits": hits}, output, table=lambda: columns(table), name=lambda: names_text))

    with client_of() as client:
        repeat(watch, one)


def _hit(client: Client, replica: str, what: Content | str) -> dict[str, Any]:
    try:
        found = client.find_cache_hit(replica, what)
    except (FailedPrecondition, NotFound) as error:  # its engine is not connected, or it was deregistered
        return {"replica": replica, "hit_tokens": 0, "num_tokens": 0, "single_group_hit": 0, "refused": error.message}
    fields = {name: getattr(found, name) for name in ("hit_tokens", "num_tokens", "single_group_hit")}
    return {"replica": replica, **fields, "refused": ""}


def _hit_row(hit: dict[str, Any]) -> tuple[str, ...]:
    if hit["refused"]:
        return hit["replica"], "-", "-", "-", hit["refused"]
    return hit["replica"], f"{hit['hit_tokens']}", f"{hit['num_tokens']}", f"{hit['single_group_hit'] or '-'}", ""


def requests_command(
    replica: Replica,
    limit: Limit = None,
    output: Output = TABLE,
    watch: Watch = None,
    grpcurl: Grpcurl = False,
) -> None:
    """List the requests of a replica that hold the most blocks.

    A block that several requests share counts for each of them. With -o wide: blocks by group.
    """
    print_call(grpcurl, calls.list_requests(replica, limit or _LISTED))

    def one() -> None:
        answer = client.list_requests(replica, limit or _LISTED)
        show(
            answer,
            output,
            table=lambda: _request_table(answer, False),
            wide=lambda: _request_table(answer, True),
            name=lambda: "\n".join(escaped(request.request_id) for request in answer.requests if request.request_id),
        )

    with client_of() as client:
        repeat(watch, one)


def _request_table(answer: ListRequestsResponse, by_group: bool) -> str:
    rows = [("REQUEST", "SLOT", "STATE", "BLOCKS", "COMPUTED", "OF TOKENS", *(("BY GROUP",) if by_group else ()))]
    for one in answer.requests:
        name = one.request_id or "-"
        counts = (str(sum(one.num_blocks)), str(one.computed_tokens), str(one.num_tokens))
        groups = (" ".join(map(str, one.num_blocks)),) if by_group else ()
        rows.append((name, str(one.slot), request_state(one), *counts, *groups))
    left_out = answer.num_requests - len(answer.requests)
    return columns(rows) + (f"\n{left_out} more: --limit" if left_out else "")


def snapshot_command(
    replica: Replica,
    full: Annotated[bool, typer.Option("--full", help="With keys, free blocks and block tables (-o json).")] = False,
    output: Output = TABLE,
    grpcurl: Grpcurl = False,
) -> None:
    """Check every invariant of a replica, and print a digest of its state, or with --full the state.

    The engine of the replica waits meanwhile: seconds for a pool of a million blocks. Needs the scope admin.
    """
    print_call(grpcurl, calls.snapshot(replica, summary=not full))
    with client_of() as client:
        answer = client.snapshot(replica, summary=not full)

    def table() -> str:
        free, used = answer.num_free_blocks, f"{answer.usage:.1%}"
        counts = f"{counted(answer.distinct_keys, 'key')}, {counted(free, 'free block')}"
        return f"{replica}: every invariant holds; {counts}, {used} in use\ndigest: {answer.digest}"

    print(text_of(lambda: _state_of(answer, full), output, table=table))


def _state_of(answer: Any, full: bool) -> dict[str, Any]:  # noqa: ANN401 - a SnapshotResponse
    fields = fields_of(answer)
    return fields if full else {name: fields[name] for name in fields if not isinstance(fields[name], list)}
