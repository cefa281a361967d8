"""The allocator. Pure: no I/O, clock, randomness, threads, logging or protobuf; equal operations give equal results.

A `Step` comes in, a `StepResult` goes out. State changes only in `replica.Replica.apply`, in `open_step.OpenStep`, and
when an engine life begins. Read bottom-up: `columns`, `keys`, `keytable`, `freelist`, `pool`, `dropping`, `managers/`,
`lookup`, `coordinator`, `requests`, `in_flight`, `facts`, `step_applier`, `entries`, `recovery`, `resume`,
`replica`, `part_rows`, `open_step`; `invariants` checks the state.
"""
