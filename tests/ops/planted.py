"""Backends that a child process tries: one is sound, the others fail as kernels do."""

from __future__ import annotations

import os
import sys
import threading

from kvplane_worker.ops.torch_ops import TorchOps


class Sound(TorchOps):
    """Right."""


class Wrong(TorchOps):
    """Copies nothing."""

    def copy_pages(self, group, src, dst):
        del group, src, dst


class Aborts(TorchOps):
    """Ends its process, as an assertion of a driver does."""

    def copy_pages(self, group, src, dst):
        os.abort()


class Exits(TorchOps):
    """Ends its process with last words."""

    def copy_pages(self, group, src, dst):
        print("the device is lost", file=sys.stderr, flush=True)
        os._exit(3)


class Hangs(TorchOps):
    """Waits for ever, as a kernel that spins."""

    def copy_pages(self, group, src, dst):
        threading.Event().wait()
