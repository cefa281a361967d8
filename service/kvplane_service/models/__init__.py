"""Which model has which cache: layers by name or from a Hugging Face config, and how many requests fit.

catalogue  models by name, as the layers of one tensor-parallel rank
hf_config  a model from its config.json
sizing     figures of a cache plan
"""
