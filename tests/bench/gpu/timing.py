"""Durations of work on a device: medians over rounds of several runs, without the host's part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Clock:
    """Times work on a device; on a CPU in wall-clock time, which is no measure of kernels.

    Attributes:
        runs: executions of the work per round; rounds: rounds over which the median is taken.
    """

    device: torch.device
    runs: int = 10
    rounds: int = 5

    def seconds(self, work: Work) -> float:
        """Seconds per run. On a GPU the runs of a round are one graph, so that launches take no host time."""
        work()
        if self.device.type != "cuda":
            return self._by_the_wall(work)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.runs):
                work()
        graph.replay()
        return self._by_events(graph.replay) / self.runs

    def seconds_as_called(self, work: Work) -> float:
        """Seconds per run including the host: for work on several streams, which waits for events of earlier runs."""
        work()
        if self.device.type != "cuda":
            return self._by_the_wall(work)

        def several() -> None:
            for _ in range(self.runs):
                work()

        return self._by_events(several) / self.runs

    def seconds_during(self, work: Work, background: Work) -> float:
        """Seconds per run while `background`, longer than all runs of a round, runs on another stream."""
        if self.device.type != "cuda":
            background()
            return self._by_the_wall(work)
        work()
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)
        times = []
        for _ in range(self.rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(stream):
                background()
            begin.record()
            for _ in range(self.runs):
                work()
            end.record()
            torch.cuda.synchronize(self.device)
            times.append(begin.elapsed_time(end) / 1e3 / self.runs)
        return statistics.median(times)

    def _by_events(self, work: Work) -> float:
        times = []
        for _ in range(self.rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize(self.device)
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def _by_the_wall(self, work: Work) -> float:
        times = []
        for _ in range(self.rounds):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


class DryClock(Clock):
    """Calls each work once and measures nothing, so that what it launches is compiled."""

    def seconds(self, work: Work) -> float:
        """Call the work."""
        work()
        return 1.0

    seconds_as_called = seconds

    def seconds_during(self, work: Work, background: Work) -> float:
        """Call both."""
        background()
        return self.seconds(work)
