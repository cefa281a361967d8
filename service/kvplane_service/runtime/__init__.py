"""What the service takes from its surroundings, in forms that tests and the simulation replace.

executors  threads for blocking or long calls, a bounded few per resource
slices     long work on the event loop, cut so that other calls have their turn
reports    states that one room reports and another shows
"""
