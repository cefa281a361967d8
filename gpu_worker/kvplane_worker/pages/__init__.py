"""Typed tensor views of every layer's pages in a rank's memory, which is one allocation with a memory layout.

buffers  the allocation, and its views as PyTorch and CuPy tensors
mover    zeroing and copying of whole pages, as `kvplane.rank` orders them
dtypes   element types of layer formats as PyTorch types
"""

from kvplane_worker.pages.buffers import PageBuffers
from kvplane_worker.pages.mover import PageMover

__all__ = ["PageBuffers", "PageMover"]
