"""The leaf of kvplane: types, errors and arithmetic that client, service and worker share.

Standard library only, so that an engine can import it anywhere. It does no I/O and reads no clock.
"""
