"""How does an engine use kvplane? A small reference engine that keeps all its cache in kvplane's pages.

Requests, an open session and the pages of all ranks come in; generated tokens go out. The output of a request depends
only on its prompt: hits, preemptions and restarts never change it, which the tests verify. Bottom-up:

    config      the model, and the cache layers that it registers
    weights     seeded random parameters, and the share of one rank
    batch       which pages the rows of a launch read and write
    model       the layers of one rank on `PagedOps`; the sum over ranks
    drafter     drafts by n-gram lookup
    request     one request, from its prompt to its last token
    scheduler   `kvplane.scheduling` with states and logits
    ranks       the pages of all ranks, attached from their workers
    engine      the loop: schedule, carry out orders, compute, sample
"""
