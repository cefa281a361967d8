"""A scheduler for engines with continuous batching: a state machine without I/O.

    scheduler = Scheduler(session.spec, Limits(token_budget=2048))
    scheduler.add(Request("r-1", prompt, max_new_tokens=64))
    while scheduler.has_work:
        part = scheduler.plan()
        result = session.apply(part).parts[0]
        for row in scheduler.update(part, result):         # the rows of one launch
            scheduler.finish_row(row, sample(row))         # one token after each of the last `num_outputs` tokens
        finished = scheduler.take_finished()

It manages the queues, prompt chunks, drafts, preemptions, aborts and block tables that every engine needs. The service
decides which blocks each request gets and how many tokens it computes; the engine provides the order of requests, its
limits and the sampled tokens. A launch must be complete before the next step is planned. An engine that hashes tokens
itself overrides `Request.news_row`, `append` and `content`.
"""

from kvplane.scheduling.requests import NO_SLOT, Counts, Drafter, Limits, Request, Scheduled, no_drafts
from kvplane.scheduling.scheduler import MAX_IDLE_STEPS, MAX_NEWS_TOKENS, Scheduler

__all__ = [
    "MAX_IDLE_STEPS",
    "MAX_NEWS_TOKENS",
    "NO_SLOT",
    "Counts",
    "Drafter",
    "Limits",
    "Request",
    "Scheduled",
    "Scheduler",
    "no_drafts",
]
