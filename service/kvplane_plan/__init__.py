"""From a model to the KV cache groups that serve it: what a cache of a size needs and holds. Imports no service.

models    the models: shapes of layers by name or from a Hugging Face config.json, and what fits into their memory
planner   from layers and memory to groups, blocks and their placement
"""
