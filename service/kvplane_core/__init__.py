"""The allocator. Pure: no I/O, clock, randomness, threads, logging or protobuf; equal operations give equal results.

spec    the specification, in Python: read it first
cpp     the same in C++: what runs where it is compiled
face    what the product uses of either, and the loader that chooses one
"""
