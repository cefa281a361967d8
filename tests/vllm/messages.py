"""Counts the messages of a live engine in mode remote."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Messages:
    """How many messages each schedule() hands over to the connection with the service. The adapter has a count of its
    own, which this one checks.

    Attributes:
        decoding: number of messages -> calls that only continue the batch of the call before, with a token per request.
        others: the same of all other calls: a request of the batch is new, has ended, was preempted or has more tokens.
    """

    def __init__(self, scheduler: Any) -> None:
        self.decoding, self.others = Counter[int](), Counter[int]()
        self._sent, self._batch = 0, set[str]()
        link, schedule = scheduler.kv_cache_manager.link, scheduler.schedule
        for name in ("send", "exchange"):
            setattr(link, name, self._counted(getattr(link, name)))

        def counted(*args: Any, **options: Any) -> Any:
            before, batch = self._sent, self._batch
            output = schedule(*args, **options)
            tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
            self._batch = set(tokens)
            continues = self._batch == batch and not (output.scheduled_new_reqs or cached.resumed_req_ids)
            counts = self.decoding if continues and set(tokens.values()) == {1} else self.others
            counts[self._sent - before] += 1
            return output

        scheduler.schedule = counted

    def _counted(self, real: Any) -> Any:
        def counted(*args: Any) -> Any:
            self._sent += 1
            return real(*args)

        return counted
