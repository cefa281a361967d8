"""What the service takes from its process, in forms that tests and the simulation replace: threads, time slices,
reports.

executors  run blocking or long calls on a bounded number of threads per resource
slices     split long work on the event loop into time slices, so that other calls are served in between
memory     the memory that the process may use
interpreter  its garbage collector and its threads
reports    types of states that one package reports and another displays
"""
