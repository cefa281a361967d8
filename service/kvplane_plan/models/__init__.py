"""The KV cache of models: the name or the Hugging Face config.json of a model comes in; layers and memory figures go
out.

shapes         shapes of layers and models, and the layers that one tensor-parallel rank holds
catalogue      known models by name
config_fields  the fields of a config.json, and which of them were read
attention_types, state_types  readers of layers from a config.json
model_types    the reader of each model type
hf_config      reads a model from its config.json
sizing         computes the memory of a cache and the number of requests that fit
"""
