"""A small reference engine: a decoder of mixed attention kinds that keeps all its cache in kvplane's pages.

It is made to be read, and to prove the whole: its tokens never change, whatever the cache does. Bottom-up:

    config      what the model is, and what its layers ask of the cache
    weights     seeded random parameters, and one rank's share of them
    batch       which pages the rows of a launch read and write
    model       one rank's layers on `PagedOps`; the sum over ranks
    drafter     drafts by n-gram, so that there is something to reject
    request     one request, from its prompt to its last token
    scheduler   continuous batching on the session: what is asked of the service, what its answer means
    ranks       the pages of all ranks, attached from their workers
    engine      schedule, order, compute, sample
"""
