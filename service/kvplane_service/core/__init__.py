"""The allocator. Pure: no I/O, clock, randomness, threads, logging or protobuf; equal operations give equal results.

A `Step` comes in, a `StepResult` goes out. State changes only in `replica.Replica.apply` and in the beginning of an
engine life. Read bottom-up: `columns`, `keys`, `freelist`, `pool`, `dropping`, `managers/`, `lookup`, `coordinator`,
`requests`, `tracker`, `refusals`, `step_applier`, `entries`, `recovery`, `resume`, `replica`; `inspect` proves the
invariants. `planner/` is apart: it makes the groups of a replica from the layers of a model.
"""
