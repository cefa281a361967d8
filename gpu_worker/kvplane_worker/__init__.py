"""The GPU worker of kvplane: a process that holds the pages of one rank, so that they outlive the engine.

The packages from the top; each imports only those below it (checked by an import contract in pyproject.toml):

    cli        the command `kvplane worker`
    process    start, registration, lease and shutdown of a worker process
    attach     the engine's side: map the pages of a worker on this host
    rpc        the gRPC API kvplane.v1.Worker on a Unix socket: server, client, messages
    nixl       the process of a worker that reads host tiers on other hosts, and lends its own to them
    transfers  copies and checksums of whole pages, verified by stamps
    lending    which process may write the pages, the worker's memory, and its private directory
    pages      typed tensor views of every layer's pages in one allocation
    memory     memory that two processes of a host map
"""
