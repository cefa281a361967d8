"""Metrics and traces: the counters of the core and the decision log come in; Prometheus pages and spans go out.

collector  the metrics of all replicas as Prometheus metric families
http       the HTTP endpoint that Prometheus scrapes
holds      measures how long the event loop was blocked, and by which function
sampling   decides which steps and calls are traced
tracing    sends spans of steps and admissions, built from the decision log, to an OTLP collector
ops        packs the operations of a step into one attribute of its span
"""
