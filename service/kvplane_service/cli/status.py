"""`kvplane status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplane_service.cli.asking import (
    DEFAULT_SERVICE,
    Form,
    Grpcurl,
    Output,
    Service,
    age,
    client_of,
    grpcurl_line,
    show,
)

if TYPE_CHECKING:
    from kvplane.v1.admin_pb2 import StatusResponse


def command(service: Service = DEFAULT_SERVICE, output: Output = Form.TABLE, grpcurl: Grpcurl = False) -> None:
    """Tell what runs there: version, replicas, tracing, metrics."""
    from kvplane import calls

    if grpcurl:
        print(grpcurl_line(service, calls.status()))
        return
    with client_of(service) as client:
        answer = client.status()
    show(answer, output, lambda: _table(service, answer))


def _table(service: str, answer: StatusResponse) -> str:
    counts = {
        "live": answer.live_replicas,
        "idle": answer.replicas - answer.live_replicas - answer.lapsed_replicas - answer.recovering_replicas,
        "lapsed": answer.lapsed_replicas,
        "recovering": answer.recovering_replicas,
    }
    state = "draining" if answer.draining else "serving"
    return "\n".join(
        (
            f"kvplane {answer.version} at {service}, {state} for {age(answer.uptime_ms)}",
            f"replicas: {answer.replicas} ({', '.join(f'{count} {state}' for state, count in counts.items())})",
            f"metrics: {answer.metrics_address or 'none'}",
            f"traces: {'on' if answer.tracing else 'off'}",
        )
    )
