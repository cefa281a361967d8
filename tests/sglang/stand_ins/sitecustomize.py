"""Stands in for modules that SGLang imports and does not call on a CPU, for which there is no build of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

NAMES = ("sgl_kernel", "torchvision")


class Loader(importlib.abc.Loader):
    """Makes modules that have every name."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__version__ = "0"
        module.__getattr__ = lambda name: MagicMock()


class Finder(importlib.abc.MetaPathFinder):
    """Finds these modules, and those in them."""

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(fullname, Loader(), is_package=True)
        return None


sys.meta_path.insert(0, Finder())
