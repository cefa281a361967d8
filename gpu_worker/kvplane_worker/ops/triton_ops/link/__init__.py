"""Between pages on a device and staging on the host, by the faster of two routes as measured on this machine.

Fragments are what makes the link slow: each copy of a few KiB costs what a larger one costs. `buffers` gathers them on
the device and copies what it gathered; `copies` hands all of them to the driver at once, merged into `runs`. Which is
faster depends on the size, the count, the GPU and the driver: `routes` has a small table, measured when the link is
first used, and `link` chooses by it, call by call.
"""

from kvplane_worker.ops.triton_ops.link.link import HostLink

__all__ = ["HostLink"]
