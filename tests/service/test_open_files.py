"""The limit of open files follows `max_connections`, as far as the system permits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvplane_service.runtime.interpreter import OTHER_FILES

RUN = """
import logging, resource, sys
from kvplane_service.runtime.interpreter import allow_connections
soft, hard, most = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
allow_connections(most)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most", "limit", "warns"),
    [
        (256, 8000, 4096, 4096 + OTHER_FILES, False),
        (7000, 8000, 4096, 7000, False),
        (256, 2000, 4096, 2000, True),
        (2000, 2000, 4096, 2000, True),
    ],
)
def test_the_limit_of_open_files_is_raised_and_one_that_is_too_low_is_named(soft, hard, most, limit, warns):
    command = [sys.executable, "-c", RUN, *map(str, (soft, hard, most))]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert printed[-1] == f"{limit} {hard}"
    named = f"may open {limit} files, and max_connections needs {most + OTHER_FILES}: set `ulimit -n"
    assert [named in line for line in printed[:-1]] == [True] * warns
