"""The process `kvplane router`: serves kvplane.v1.Routing over a fleet, with the allocation service's gate, health and
metrics endpoint.

process    starts and drains it
servicer   the calls
messages   between protobuf and the router's types
picker     the endpoint picker of the Gateway API Inference Extension; prompts and endpoints, which it needs
pod_scores the service of llm-d's indexer
prober     asks engines again for prompts that they have answered
asking     the only HTTP connections of a router
watching   the stream of the index
metrics    Prometheus families
"""
