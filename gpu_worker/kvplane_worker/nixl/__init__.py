"""Host tiers that workers on other hosts read over the network, by NIXL.

agent     the process of a worker that has NIXL: it lends the host tier, and reads those of peers into staging memory
process   starts it, and copies what it has read; the worker itself has no library and no port of the network
messages  what the two send each other
transport names of the ways to read peers

The library lets any process that reaches its port read and write any memory of its process. So this process has nothing
of the worker but its host tier, which the kernel does not let it write, and staging memory, which proves nothing.
"""
