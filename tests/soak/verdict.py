"""The verdict on the samples of a soak test: growth once the logs are full, and how long the event loop was held."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles

WARM_UP = 0.5  # share of the samples that is warm-up
MIB = 1 << 20
# Growth per minute that counts as a leak. Descriptors, threads and tasks fluctuate with the load.
ALLOWED = {"rss": 1.0 * MIB, "descriptors": 1.0, "threads": 0.5, "tasks": 1.0}


@dataclass(frozen=True)
class Verdict:
    """Growth after the warm-up, and longest holds of the event loop.

    Attributes:
        slopes: column of the samples → growth in units per minute.
        last: column → last value.
    """

    slopes: dict[str, float]
    last: dict[str, float]
    held_ms: tuple[float, float]  # 99th percentile of the longest hold per second, and the longest, in ms
    samples: int

    @property
    def leaks(self) -> list[str]:
        """Columns that grow faster than the limit."""
        grown = {name: self.slopes[name] for name, most in ALLOWED.items() if self.slopes[name] > most}
        return [f"{name}: {slope:+.3g} a minute" for name, slope in grown.items()]

    def __str__(self) -> str:
        lines = [f"{self.samples} samples; loop held: p99 {self.held_ms[0]:.0f} ms, longest {self.held_ms[1]:.0f} ms"]
        for name, slope in self.slopes.items():
            unit = MIB if name == "rss" else 1
            lines.append(f"{name:12} {self.last[name] / unit:12,.1f}  {slope / unit:+10.3f} a minute")
        return "\n".join(lines)


def slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Slope by least squares, in units per minute."""
    middle_s, middle = fmean(times_s), fmean(values)
    spread = sum((at - middle_s) ** 2 for at in times_s)
    return 60 * sum((at - middle_s) * (value - middle) for at, value in zip(times_s, values, strict=True)) / spread


def verdict_of(lines: Sequence[str]) -> Verdict:
    """Compute the verdict of samples, one JSON object per line."""
    samples = [json.loads(line) for line in lines]
    steady = samples[int(len(samples) * WARM_UP) :]
    assert len(steady) > 2, f"too few samples: {len(samples)}"
    times_s = [sample["at_s"] for sample in steady]
    names = [name for name in steady[0] if name not in ("at_s", "held_ms")]
    slopes = {name: slope(times_s, [sample[name] for sample in steady]) for name in names}
    held = sorted(sample["held_ms"] for sample in samples)
    last = {name: steady[-1][name] for name in names}
    return Verdict(slopes, last, (quantiles(held, n=100)[-1], held[-1]), len(samples))


def read(path: Path) -> Verdict:
    """Compute the verdict of a file of samples."""
    return verdict_of(path.read_text(encoding="utf-8").splitlines())
