"""The logic of unary calls without I/O: what is sent, when it is sent again, and to which service.

It turns the arguments of a client's method into a `Call`, and a `Call` into a series of actions (`kvplane.sansio`). The
blocking and the asyncio client share it.

    calls         one function per RPC, from arguments to a `Call`
    retrying      the attempts of one call, over services and owners
    subscription  cache events through broken streams, each batch once
"""
