"""Where is each page in a rank's memory? One allocation and a plan come in; typed views of every layer's pages go out.

buffers  the allocation, and its views as PyTorch and CuPy tensors
mover    zeroes and copies of whole pages, as `kvplane.rank` orders them
dtypes   element types of the contract as PyTorch types
"""

from kvplane_worker.pages.buffers import PageBuffers
from kvplane_worker.pages.mover import PageMover

__all__ = ["PageBuffers", "PageMover"]
