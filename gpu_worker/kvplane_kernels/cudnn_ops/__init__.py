"""The cuDNN backend of `kvplane_kernels`: rows with many queries by cuDNN, everything else by Triton.

entry    checks device and versions without importing cuDNN's frontend; all that the selection of a backend loads
backend  the operations, and the choice between cuDNN and the other backend
rows     which rows of a batch cuDNN computes, and the batch of the others
calls    the calls of cuDNN
kept     values cached per batch, shared by the layers of a step
"""
