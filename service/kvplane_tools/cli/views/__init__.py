"""Live views on a terminal: samples of replicas' counters come in; panels for `kvplane top` and `kvplane demo`
go out.
"""
