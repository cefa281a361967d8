"""Types, errors and arithmetic that the client, the service and the worker share.

The package imports only the standard library, so that every engine can use it. It does no I/O and reads no clock.
"""
