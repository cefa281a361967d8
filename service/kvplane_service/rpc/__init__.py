"""The gRPC edge: protobuf messages come in and become calls with the service's own types; the answers go out as
protobuf.

The messages of calls are decoded and encoded only here and in `kvplane.wire`.

server, ports, methods   addresses and certificates, and the wrapper around every method
allocation, session      the Allocation service: unary calls, and the stream of an engine
lookups                  FindCacheHit: how many tokens of a prompt are cached; long look-ups run on a thread
reads                    long reads of a replica's state on a thread, while it does not change
workers, events, admin   the other services
health                   gRPC Health
decode, encode, sources  messages to the service's types and back; the cache plan of a registration
claims                   claims the pages of all workers for a new engine life
traced                   spans of unary calls
about                    what a process reports about itself
"""
