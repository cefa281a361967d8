"""The FlashInfer backend of `kvplane_worker.ops`: attention by FlashInfer, everything else by another backend.

entry    checks device and versions without importing FlashInfer; the selection of a backend loads only this module
backend  the operations, and the choice between FlashInfer and the other backend
calls    the calls of FlashInfer
indices  a batch in the form that FlashInfer reads
plans    values cached per batch, shared by the layers of a step
"""
