"""One engine process at a time writes a replica where no worker has the pages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import pytest

from kvplane.base.errors import OtherWriter
from kvplane_vllm.engine_lock import EngineLock

HOLDER = """
import os, sys, time
from pathlib import Path
from kvplane_vllm.engine_lock import EngineLock
lock = EngineLock("127.0.0.1:7070", "a", Path(sys.argv[1]))
child = os.fork() if sys.argv[2:] else 0
if sys.argv[2:] and not child:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print("locked", child, flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def holder(folder, *options):
    """An engine's process that has the lock."""
    command = [sys.executable, "-c", HOLDER, str(folder), *options]
    child = 0
    process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline().split()
        assert line[0] == "locked"
        child = int(line[1])
        yield process
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def lock(folder, replica="a"):
    return EngineLock("127.0.0.1:7070", replica, folder)


def test_a_second_engine_process_is_refused_with_the_pid_of_the_first(tmp_path):
    with holder(tmp_path) as process, pytest.raises(OtherWriter, match=f"process {process.pid} writes") as refused:
        lock(tmp_path)
    assert refused.value.metadata == {"pid": str(process.pid)}


def test_other_replicas_are_not_locked(tmp_path):
    with holder(tmp_path):
        lock(tmp_path, "b").release()


def test_sigkill_releases_the_lock(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        lock(tmp_path).release()


def test_the_lock_ends_with_its_process_even_if_a_child_of_it_lives(tmp_path):
    with holder(tmp_path, "with a child") as process:
        with pytest.raises(OtherWriter):
            lock(tmp_path)
        process.stdin.close()
        process.wait(60)
        lock(tmp_path).release()


def test_a_released_lock_is_free(tmp_path):
    mine = lock(tmp_path)
    mine.release()
    mine.release()
    with holder(tmp_path):
        pass
