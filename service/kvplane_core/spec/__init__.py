"""The specification of the allocator: what is decided, in Python.

A `Step` comes in, a `StepResult` goes out. State changes only in `replica.Replica.apply`, in `open_step.OpenStep`, and
when an engine life begins. README.md has the order in which to read. Nothing of the product imports it except
`kvplane_core.face.loader`.
"""
