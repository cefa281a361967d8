"""The GPU worker of kvplane: a process that holds the pages of one rank, so that they outlive the engine.

From the top; a room imports only what is below it (an import contract in pyproject.toml):

cli        the command `kvplane worker`
process    start, registration, lease and shutdown of a worker process
engine     the reference engine: a small model and scheduler that keep their cache in pages
attach     the engine's side: map the pages of a worker of this host
rpc        kvplane.v1.Worker on a Unix socket: server, client, messages
transfers  moves and checksums of whole pages, verified by stamps
lending    what a worker lends, its private directory, and the process that has the pages
pages      typed views of every layer's pages over one allocation
ops        operations on pages: one interface, several backends
memory     memory that two processes of a host map
"""
