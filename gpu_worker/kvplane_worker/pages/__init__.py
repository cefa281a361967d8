"""Page buffers: one allocation per rank, and typed views of every layer's pages over it."""

from kvplane_worker.pages.buffers import PageBuffers
from kvplane_worker.pages.mover import PageMover

__all__ = ["PageBuffers", "PageMover"]
