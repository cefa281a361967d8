"""How do other processes call a worker? kvplane.v1.Worker on a Unix socket; protobuf stops in this room.

Messages come in and are checked; calls of `transfers` and `lending` go out, refusals become gRPC status.

server    the gRPC server, with gRPC health
servicer  the methods: describe, attach, transfer, checksum, claim; their locks and limits
handlers  bytes -> message -> method -> message -> bytes, refusals -> status
client    the same calls from the other side
wire      messages <-> our types
"""
