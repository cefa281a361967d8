"""The leaf of kvplane: words and arithmetic shared by client, service and worker.

Standard library only, so that an engine can import it anywhere. Nothing here does I/O or reads a clock.
"""
