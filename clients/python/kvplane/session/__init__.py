"""The logic of a session without I/O: which message is sent next, and what its answer means for the engine.

An engine's call with parts of steps becomes a series of actions on a transport; from their outcomes this package
computes the call's result. The blocking and the asyncio session share it, and tests run it through every order of
events.

    machine         opens, sends, receives, and opens again after a failure
    state           step numbers, what is in flight, what a failed step undoes
    reopening       what a restarted service is sent, and how steps in flight are answered
    known_requests  the requests of a session, recorded from its own steps, for an engine that keeps no record
    options         options of `Client.session`
    view            the attributes that both sessions have
    rows            parts built from one object per row
    builder         parts of decode steps built from columns that are filled in place
    tables          the block tables of requests, updated with each result
"""
