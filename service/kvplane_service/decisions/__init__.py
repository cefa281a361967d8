"""The decision log: applied steps and their results come in; counters, recordings and text are derived from it.

log         the last decisions (applied steps with their results) of a replica
packed_log  logs whose packed entries share one memory budget per process; the event log uses it too
packing     packs a decision or a list of events into one `bytes` object
counters    counts refusals, removed keys, preemptions and step times for the metrics
recording   writes decisions to a file and reads them back
text        formats decisions as readable lines
"""
