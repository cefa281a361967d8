"""The gRPC API of a worker, kvplane.v1.Worker, on a Unix socket. No other package of the worker uses protobuf.

server    the gRPC server, with gRPC health
callers   the socket, and the process behind each connection
servicer  the methods: describe, attach, transfer, checksum, claim; their locks and limits
health    gRPC Health, by Check only
handlers  conversion of bytes to messages and back, and of errors to gRPC statuses
client    the same calls from the other side
wire      conversion between messages and the worker's types
"""
