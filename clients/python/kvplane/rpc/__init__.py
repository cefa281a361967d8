"""How a call reaches the service: gRPC channels with TLS and tokens, and the KvplaneErrors of failed calls.

access   TLS and token
channel  channels with their keepalive and message limits
status   the table of errors and gRPC status codes, rich error details
"""
