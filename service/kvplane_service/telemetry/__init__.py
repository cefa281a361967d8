"""What operators see: metrics and traces, all read from the decision log.

tally      what metrics count beside the core's own counters, folded from each decision
collector  the metrics of all replicas in Prometheus' terms
http       the port that is scraped
sampling   which steps and calls are traced
tracing    spans of steps and admissions, from the decision log, to an OTLP collector
ops        the operations of a step in one attribute
"""
