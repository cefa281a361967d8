"""Reader of Mooncake traces (kvcache-ai/Mooncake, FAST25-release).

A line is a request: `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one per 512 prompt
tokens, the last one maybe for a part. An id stands for the prefix that ends there, the same in the whole
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvplane_replay.workloads.fields import Record, parse
from kvplane_replay.workloads.lines import Line
from kvplane_replay.workloads.requests import TraceRequest
from kvplane_replay.workloads.tokens import Span, TokenSource, text_of_ids

TOKENS_PER_ID = 512


def read_mooncake(lines: Iterable[Line]) -> Iterator[TraceRequest]:
    """The requests in the order of the file, which is that of arrival.

    Raises:
        MalformedTrace: at the first line that is no request, or that goes back in time.
    """
    latest_s = 0.0
    for line in lines:
        record = parse(line)
        request = _request(record, line.number)
        if request.arrival_s < latest_s:
            raise record.malformed("timestamp: is before that of the request in front")
        latest_s = request.arrival_s
        yield request


def _request(record: Record, number: int) -> TraceRequest:
    num_tokens = record.count("input_length", least=1)
    ids = record.ids("hash_ids", TOKENS_PER_ID)
    needed = -(-num_tokens // TOKENS_PER_ID)
    if len(ids) != needed:
        raise record.malformed(f"hash_ids: {len(ids)} ids, but input_length {num_tokens} needs {needed}")
    output = Span(number, 0, record.count("output_length"), generated=True)
    return TraceRequest(
        name=f"line-{number}",
        arrival_s=record.time("timestamp") / 1000,
        session="",
        prompt=text_of_ids(ids, TOKENS_PER_ID, num_tokens),
        output=TokenSource((output,)),
    )
