"""A session without I/O: which message is sent next, and what its answer means for the engine.

Parts of steps come in; actions for a transport go out, their outcomes come in, and results for the engine go out. The
blocking and the asyncio session share it, and tests run it through every order of events.

machine         opens, sends, receives, opens again after a failure
state           step numbers, what is in flight, what is undone when a step fails
reopening       what a restarted service is sent, and how steps in flight are answered
known_requests  the requests of a session, recorded from its own steps, for an engine that keeps no record
options         options of `Client.session`
view            the attributes that both sessions show
rows            parts built row by row
tables          block tables, kept up to date from the answers
"""
