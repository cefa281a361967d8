"""The decision log: applied steps with their results come in; counters, recordings and text are derived from it.

log         the last steps of a replica, as they were applied
packed_log  packed entries under one memory budget of the process; also the base of the event log
packing     one `bytes` per entry
counters    counters of the metrics, folded from each decision
recording   decisions to a file and back
text        decisions as readable lines
"""
