"""The client for threads: its sessions, unary calls and event subscriptions block until the service answers.

This package does the I/O over gRPC. `kvplane.session` and `kvplane.unary` decide what is sent, and when it is sent
again.

    client     replicas, sessions, unary calls, events
    session    a session over any transport, with a thread that keeps the lease
    transport  one gRPC stream, with a reader thread
    workers    the client that a worker uses: registration and lease
"""
