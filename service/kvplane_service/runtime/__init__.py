"""What the service takes from its process, in forms that tests and the simulation replace: threads, slices, reports.

executors  threads for blocking or long calls, a bounded number per resource
slices     long work on the event loop, in slices, so that other calls are served in between
reports    states that one room reports and another displays
"""
