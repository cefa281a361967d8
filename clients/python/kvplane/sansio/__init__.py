"""Building blocks for logic without I/O: generators that yield actions, retries, and the choice of a service.

A generator yields actions, such as sending a message or waiting. A driver carries out each action, blocking or with
asyncio, and sends its outcome back into the generator. Nothing in this package opens a connection or waits.

    driver   runs a generator of actions; an action's exception is raised where the action was yielded
    retry    how often, how fast and for how long a call is tried again
    owners   one channel per service: the client's list, and the owners of replicas
    tracing  the engine's trace context
"""
