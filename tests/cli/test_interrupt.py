"""Ctrl-C ends a command, wherever it is when the signal comes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kvplane import Content, connect
from kvplane.base.requests import Allocate
from kvplane_service.config import Config
from tests.service.rig import running, until

BEGIN = """
import os, signal, sys, threading, time
from kvplane_tools.cli import interrupt
interrupt.LIMIT_S = 0.5
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(3):
        pass
handler = interrupt.Interrupt()
signal.signal(signal.SIGINT, handler)
sys.unraisablehook = handler.discarded
"""
IN_A_GENERATOR = """
def generate():
    try:
        yield
    finally:
        ctrl_c()
one = generate()
next(one)
del one
print("the generator ended", flush=True)
time.sleep(60)
"""
IN_A_FINALIZER = """
class Finalized:
    def __del__(self):
        ctrl_c()
Finalized()
print("the finalizer ended", flush=True)
time.sleep(60)
"""
FINALIZER_THAT_HANGS = """
class Finalized:
    def __del__(self):
        print("in the finalizer", flush=True)
        ctrl_c()
        threading.Event().wait()
Finalized()
time.sleep(60)
"""
WHILE_A_THREAD_STARTS = """
with threading._active_limbo_lock:
    print("a thread starts", flush=True)
    ctrl_c()
"""
CLEANUP_THAT_HANGS = """
try:
    ctrl_c()
    time.sleep(60)
finally:
    print("cleaning up", flush=True)
    threading.Event().wait()
"""
CLEANUP_THAT_HANGS_OUTSIDE_PYTHON = """
import ctypes
try:
    ctrl_c()
finally:
    print("cleaning up", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(60)  # holds the GIL
"""
FORWARDED = """
interrupt.LIMIT_S = 60
try:
    ctrl_c()
finally:
    ctrl_c()
    print("cleaned up", flush=True)
"""
PRESSED_AGAIN = """
interrupt.LIMIT_S, interrupt.SECOND_S = 60, 0
try:
    ctrl_c()
finally:
    print("cleaning up", flush=True)
    ctrl_c()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "printed", "exit_code"),
    [
        (IN_A_GENERATOR, "the generator ended", -signal.SIGINT),
        (IN_A_FINALIZER, "the finalizer ended", -signal.SIGINT),
        (FINALIZER_THAT_HANGS, "in the finalizer", -signal.SIGINT),
        (WHILE_A_THREAD_STARTS, "a thread starts", -signal.SIGINT),
        (CLEANUP_THAT_HANGS, "cleaning up", 130),
        (CLEANUP_THAT_HANGS_OUTSIDE_PYTHON, "cleaning up", 1),
        (FORWARDED, "cleaned up", -signal.SIGINT),
        (PRESSED_AGAIN, "cleaning up", 130),
    ],
)
def test_interrupt_ends_the_process(code, printed, exit_code):
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == printed
    assert done.returncode == exit_code, done.stderr


AT_EVERY_LINE_OF_GRPC = """
import os, signal, sys, time
from kvplane import Unavailable, connect
from kvplane_tools.cli import interrupt

class AtLine:
    # Sends SIGINT at the n-th line of gRPC that the main thread executes.
    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if frame.f_globals.get("__name__", "").partition(".")[0] != "grpc":
            return None
        if event == "line" and self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGINT)
        return self

number, step, where = int(sys.argv[2]), int(sys.argv[3]), None
while where is None or not where.left:
    handler = interrupt.Interrupt()
    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = handler.discarded
    where = AtLine(number)
    try:
        with connect(sys.argv[1]) as client:
            sys.settrace(where)
            client.describe_replica("r")
            for batch in client.subscribe("r", 0):
                break
        sys.settrace(None)
        while not where.left:
            time.sleep(0.001)  # the handler raises later, where it may
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    number += step
    signal.setitimer(signal.ITIMER_REAL, 0)
print(number, flush=True)
os._exit(0)
"""


def test_interrupt_at_any_line_of_grpc_leaves_a_channel_that_closes():
    """The process ends by its limit, with exit code 1 or 130, if a channel does not close."""
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        service.register()
        client.allocate_slots("r", Allocate("first", Content(token_ids=[1] * 40)))
        client.allocate_slots("r", Allocate("second", Content(token_ids=[2] * 40)))
        done = subprocess.run(
            [sys.executable, "-c", AT_EVERY_LINE_OF_GRPC, service.address, "1", "1"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_benchmark_deregister_its_replica(number):
    with running() as service:
        command = [sys.executable, "-m", "kvplane_tools", "bench", "--service", service.address, "--requests", "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            until(lambda: len(service.app.registry) == 1 or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            process.send_signal(number)
            printed, _ = process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode in (130, -signal.SIGINT), printed
        assert len(service.app.registry) == 0


HELD_LOCK = """
import os, signal, sys, threading, time
from kvplane_tools.cli import interrupt
lock = threading.Lock()
lock.acquire()
class Call:
    def __del__(self, lock=lock):  # a global is gone when Python ends
        with lock:
            pass
call = Call()
print("kept in a buffer")
with interrupt.handled():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_a_lock_that_a_stopped_thread_holds_does_not_keep_an_interrupted_command():
    """Python stops daemon threads at its end, wherever they are: here, with a lock."""
    done = subprocess.run([sys.executable, "-c", HELD_LOCK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, "kept in a buffer\n"), done.stderr
