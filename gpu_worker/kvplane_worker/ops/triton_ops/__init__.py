"""The Triton backend of `kvplane_worker.ops`.

entry      checks device and versions without importing Triton; what selection loads
backend    the operations, with fallback to the torch backend
attention  arguments and tile sizes of decode, latent decode and prefill
writes     arguments of writes of new tokens
moves      arguments of moves of whole pages
launch     a kernel launch as a value
kernels    the functions that Triton compiles
link       copies between device and host
"""
