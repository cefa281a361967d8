"""The client for threads: sessions, unary calls and event subscriptions that block until they are answered.

Calls of an engine come in; gRPC messages go out. What is sent, and when it is sent again, `kvplane.session` and
`kvplane.unary` decide; this room carries it out.

client     replicas, sessions, unary calls, events
session    a session on any transport, with a thread that keeps the lease
transport  one gRPC stream
watchdog   deadlines of blocking reads
workers    the client of a worker: registration and lease
"""
