"""gRPC: thin adapters between messages and the host. No rule of allocation lives here.

methods         bytes -> message -> servicer -> message -> bytes, refusals -> status; one wrapper for all
session         the stream of an engine
allocation, events, admin    servicers
decode, encode  unary messages <-> our types (steps are in kvplane.wire)
claims          raises the owner epoch in the stamp tables of the ranks, through their workers
about           what the process says of itself
server          everything put together
"""
