"""What operators see: metrics and traces, all read from the decision log.

collector  the metrics of all replicas in Prometheus' terms
http       the port that is scraped
sampling   which steps and calls are traced
tracing    spans of steps and admissions, from the decision log, to an OTLP collector
ops        the operations of a step in one attribute
"""
