"""The KV cache of models: the name or the Hugging Face config.json of a model comes in; layers and memory figures go
out.

catalogue  known models by name, as the layers that one tensor-parallel rank holds
hf_config  reads a model from its config.json
sizing     computes the memory of a cache and the number of requests that fit
"""
