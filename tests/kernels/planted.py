"""Backends for start checks in a child process: one is correct, the others fail as kernels do."""

from __future__ import annotations

import os
import sys
import threading

from kvplane_kernels.torch_ops import TorchOps


class Sound(TorchOps):
    """A correct backend."""


class Wrong(TorchOps):
    """Copies nothing."""

    def copy_pages(self, group, src, dst):
        del group, src, dst


class Aborts(TorchOps):
    """Aborts its process, as an assertion in a driver does."""

    def copy_pages(self, group, src, dst):
        os.abort()


class Exits(TorchOps):
    """Exits with an error message."""

    def copy_pages(self, group, src, dst):
        print("the device is lost", file=sys.stderr, flush=True)
        os._exit(3)


class Hangs(TorchOps):
    """Never returns, as a kernel that spins."""

    def copy_pages(self, group, src, dst):
        threading.Event().wait()
