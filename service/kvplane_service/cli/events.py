"""`kvplane events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_service.cli.asking import DEFAULT_SERVICE, Form, Grpcurl, Output, Replica, Service, client_of, grpcurl_line

if TYPE_CHECKING:
    from kvplane import EventBatch


def command(
    replica: Replica,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on as events happen, until Ctrl-C")] = False,
    after: Annotated[int, typer.Option(min=0, help="begin behind this batch; 0 = with the oldest that is kept")] = 0,
    service: Service = DEFAULT_SERVICE,
    output: Output = Form.TABLE,
    grpcurl: Grpcurl = False,
) -> None:
    """Print what a replica shows of its prefix cache: keys stored and removed, by batch.

    JSON is one object a line, YAML one document a batch. Following goes on behind the last batch when the service was
    away for a moment.
    """
    from kvplane import calls

    with client_of(service, is_patient=follow) as client:
        if grpcurl:
            request = calls.subscription(replica, after)
            print(grpcurl_line(service, calls.Call("/kvplane.v1.Events/Subscribe", request, type(request))))
            return
        last = client.describe_replica(replica).event_seq
        if not follow and after == last:
            return
        for batch in client.subscribe(replica, after):
            print(_text(batch, output), flush=True)
            if not follow and batch.seq >= last:
                return


def _text(batch: EventBatch, form: Form) -> str:
    if form is Form.TABLE:
        return "\n".join(_lines(batch))
    import json

    from kvplane_service.cli.asking import plain_text

    plain = _plain(batch)
    return json.dumps(plain) if form is Form.JSON else f"---\n{plain_text(plain, form)}"


def _lines(batch: EventBatch) -> list[str]:
    marks = [name for name in ("gap", "withdrawn", "restored") if getattr(batch, name)]
    lines = [f"batch {batch.seq} of epoch {batch.epoch}{''.join(f', {mark}' for mark in marks)}"]
    for event in batch.events:
        hashes = " ".join(digest.hex()[:12] for digest in event.hashes)
        reason = f" ({event.reason.name.lower()})" if event.reason else ""
        where = f" tokens {event.start}..{event.end}" if event.end else ""
        lines.append(f"  {event.kind.name.lower()} group {event.group}{where}{reason} {hashes}".rstrip())
    return lines


def _plain(batch: EventBatch) -> dict[str, object]:
    events = [
        {
            "kind": event.kind.name.lower(),
            "group": event.group,
            "domain": event.domain,
            "hashes": [digest.hex() for digest in event.hashes],
            "blocks": list(event.blocks),
            "start": event.start,
            "end": event.end,
            "reason": event.reason.name.lower(),
        }
        for event in batch.events
    ]
    flags = {name: getattr(batch, name) for name in ("gap", "withdrawn", "restored")}
    return {"seq": batch.seq, "epoch": batch.epoch, **flags, "events": events}
