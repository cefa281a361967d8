"""Ctrl-C ends a command, wherever it is when the signal comes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

IN_A_FINALIZER = """
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            pass
Finalized()
print("the finalizer ended", flush=True)
time.sleep(60)
"""
CLEANUP_THAT_HANGS = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
finally:
    print("cleaning up", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("code", "printed", "exit_code"),
    [(IN_A_FINALIZER, "the finalizer ended", -signal.SIGINT), (CLEANUP_THAT_HANGS, "cleaning up", 130)],
)
def test_interrupt_ends_the_process(code, printed, exit_code):
    begin = "import os, signal, threading, time\nfrom kvplane_service import cli\ncli.INTERRUPT_S = 0.5\n"
    command = begin + "signal.signal(signal.SIGINT, cli.interrupt)\n" + code
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == printed
    assert done.returncode == exit_code, done.stderr
