"""Unary calls without I/O: what is sent, when it is sent again, and to which service.

Arguments of the clients come in; `Call` values go out, and the actions that carry one out (`kvplane.sansio`). The
blocking and the asyncio client share all of it.

calls         one function per RPC: arguments to a `Call`
retrying      the order of attempts of one call, over services and owners
subscription  cache events through broken streams, as a sequence without repeats
"""
