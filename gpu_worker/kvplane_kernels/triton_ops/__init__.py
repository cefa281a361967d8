"""The Triton backend of `kvplane_kernels`.

entry      checks device and versions without importing Triton; the selection of a backend loads only this module
backend    the operations, with the PyTorch backend for what Triton does not support
attention  arguments and tile sizes of attention
writes     arguments of writes of new tokens
moves      arguments of copies of whole pages
compiles   the kernels of a plan, compiled before serving; a count of later compiles
launch     a kernel launch as a value
kernels    the functions that Triton compiles
link       copies between device and host
"""
