"""The allocator. Pure: no I/O, clock, randomness, threads, logging or protobuf; equal operations give equal results.

Read bottom-up: `freelist`, `pool`, `managers/`, `lookup`, `coordinator`, `requests`, `program`, `replica`; `inspect`
proves the invariants. The only entrance that changes state is `replica.Replica.apply`.
"""
