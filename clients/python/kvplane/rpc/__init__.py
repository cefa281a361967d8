"""How a call reaches the service: gRPC channels, TLS and tokens, and refusals as gRPC statuses.

An address, TLS files and a token come in; channels whose calls carry the token go out. A failed call comes in; the
KvplaneError that it stands for goes out.

access   TLS and token
channel  channels with their keepalive and message limits
status   the table of refusals and gRPC status codes, rich error details
"""
