"""Live views on a terminal: samples of the counters of replicas go in, panels for `kvplane top` and `kvplane demo` come
out.
"""
