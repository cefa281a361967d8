"""A small reference engine that keeps all its cache in kvplane's pages. It shows how an engine uses kvplane.

It needs an open session and the pages of all ranks, and generates tokens for requests. The output of a request depends
only on its prompt: hits, preemptions and restarts never change it, which the tests verify. The modules, from the
bottom:

    config      the model, and the cache layers that it registers
    weights     random parameters from a seed, and the share of one rank
    batch       which pages the rows of a launch read and write
    model       the layers of one rank on `PagedOps`; the sum over ranks
    drafter     drafts by n-gram look-up
    request     one request, from its prompt to its last token
    scheduler   `kvplane.scheduling` with recurrent states and logits
    ranks       the pages of all ranks, attached from their workers
    engine      the loop: schedule, carry out orders, compute, sample
"""
