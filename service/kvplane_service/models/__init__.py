"""The KV cache of models: a model name or a Hugging Face config comes in, layers and sizing figures go out.

catalogue  models by name, as the layers of one tensor-parallel rank
hf_config  a model from its config.json
sizing     figures of a cache plan
"""
