"""The command line, as in tests/cli."""

from tests.cli.conftest import kvplane

__all__ = ["kvplane"]
