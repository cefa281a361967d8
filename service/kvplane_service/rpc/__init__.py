"""The gRPC edge: protobuf messages and bytes come in, calls on our own types go to the rooms below, answers go out.

Protobuf stops in this room and in `kvplane.wire`.

server, ports, methods   what listens, with which certificates, and what surrounds every method
allocation, session      the Allocation service: unary calls, and the stream of an engine
workers, events, admin   the other services
health                   gRPC health
decode, encode, sources  messages to our types and back; what RegisterReplica plans
claims                   how the pages of the workers are claimed for an engine life
traced                   spans of unary calls
about                    what a process reports about itself
"""
