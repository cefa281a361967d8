"""Copies between pages on a device and staging buffers on the host, by the faster of two routes.

Copies of a few KiB are slow, because a copy has a fixed cost. The buffered route (`buffers`) gathers fragments into a
buffer on the device and copies the buffer. The batched route (`copies`) passes all fragments to the driver in one call,
merged into `runs`. Which route is faster depends on size, count, GPU and driver: `routes` measures a small table on
first use, and `link` chooses by that table in each call. `lanes` has the streams.
"""

from kvplane_kernels.triton_ops.link.link import HostLink

__all__ = ["HostLink"]
