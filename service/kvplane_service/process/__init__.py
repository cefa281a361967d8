"""Start, drain and end a service process: a configuration comes in; a running service and an exit status go out.

app   creates every part of the service and ends them in order
"""
