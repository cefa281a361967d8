"""A signal stops a worker, wherever its main thread is when the signal comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

AT_EVERY_LINE_OF_A_WAIT = """
import os, signal, sys
from kvplane_worker.process import Stop

class AtLine:
    # Sends SIGTERM at the n-th line of `threading` that the main thread executes.
    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if frame.f_globals.get("__name__") != "threading":
            return None
        if event == "line" and self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGTERM)
        return self

def signalled_in_a_wait(event, number):
    where = AtLine(number)
    sys.settrace(where)
    event.wait(0.01)
    sys.settrace(None)
    if where.left:  # the wait has fewer lines
        return False
    assert event.wait(30), number
    return True

number = 1
while True:
    stop = Stop()
    stop.handle(signal.SIGTERM)
    if sys.argv[1] == "forced":
        stop.request()
    if not signalled_in_a_wait(getattr(stop, sys.argv[1]), number):
        break
    assert stop.forced.is_set() == (sys.argv[1] == "forced")
    number += 1
print(number - 1)
"""


@pytest.mark.parametrize("event", ["requested", "forced"])
def test_stop_is_recorded_at_every_line_of_a_wait(event):
    done = subprocess.run(
        [sys.executable, "-c", AT_EVERY_LINE_OF_A_WAIT, event], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # lines
