"""What was decided: the last steps of each replica with their results, and what is derived from them.

log         the last steps, as they were applied
packed_log  entries as packed bytes, under one budget of the process; also the base of the log of events
packing     one `bytes` per entry
counters    what metrics count, folded from each decision
recording   decisions in a file and back
text        decisions as lines for people
"""
