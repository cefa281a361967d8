"""What answering a prompt at an engine takes, in seconds: fitted from what was measured there, from a prior on.

    prefill     a + b * tokens + c * tokens * (tokens before each of them, on average)
    decode      d + e * prompts in flight, for one token

Both are linear in what is fitted, so recursive least squares with forgetting (Ljung, System Identification, 11.2) take
each measurement in constant time. A prediction is never less than a small share of the prior's, because a fit from few
measurements may be negative elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FORGET = 0.995
_LEAST_SHARE = 0.02  # of the prior's prediction
_MOST_SHARE = 50.0
_SPREAD = 0.3  # relative standard deviation of the prior's coefficients
_TOKENS = 1e3  # units in which features are near 1
_PRODUCTS = 1e7


class LinearFit:
    """Recursive least squares for non-negative quantities.

    Attributes:
        samples: measurements taken.
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float]) -> None:
        """`prior`: the coefficients before any measurement, with their standard deviations."""
        self._prior = np.array(prior)
        self._weights = self._prior.copy()
        self._covariance: NDArray[np.float64] = np.diag(np.square(spread))
        self._limit = float(np.trace(self._covariance))
        self.samples = 0

    def predict(self, features: Sequence[float]) -> float:
        """Return the fitted value, within wide bounds around the prior's."""
        at = np.array(features)
        before = float(self._prior @ at)
        return min(max(float(self._weights @ at), _LEAST_SHARE * before), _MOST_SHARE * before)

    def take(self, features: Sequence[float], value: float) -> None:
        """Take a measurement. One that is far from all predictions counts as a less extreme one: a process that was
        stopped for a minute must not change the fit.
        """
        at = np.array(features)
        value = min(value, _MOST_SHARE * float(self._prior @ at))
        gain = self._covariance @ at
        noise = max(0.1 * self.predict(features), 1e-6) ** 2
        gain /= noise + float(at @ gain)
        self._weights = self._weights + gain * (value - float(self._weights @ at))
        covariance = (self._covariance - np.outer(gain, at @ self._covariance)) / _FORGET
        # Forgetting without news of a direction would let its variance grow without bound.
        self._covariance = covariance * min(1.0, self._limit / max(float(np.trace(covariance)), 1e-300))
        self.samples += 1


@dataclass(frozen=True, slots=True)
class Prior:
    """What is assumed of an engine that nothing was measured of.

    Attributes:
        prefill_tokens_per_s: prompt tokens that it computes in a second.
        decode_s: seconds in which each prompt in flight gets a token.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_s: float = 0.02


class EngineCosts:
    """The fitted costs of one engine."""

    def __init__(self, prior: Prior) -> None:
        per_token = _TOKENS / prior.prefill_tokens_per_s
        products = 0.1 * per_token * _PRODUCTS / _TOKENS / 10_000  # a tenth more per token at 10,000 tokens
        self._prefill = LinearFit((0.002, per_token, products), (0.02, 3 * per_token, 3 * products))
        row = 0.02 * prior.decode_s
        self._decode = LinearFit((prior.decode_s, row), (_SPREAD * 3 * prior.decode_s, 3 * row))

    def prefill_s(self, tokens: int, cached: int) -> float:
        """Return the seconds to compute `tokens` tokens of a prompt after `cached` tokens that are hit."""
        return self._prefill.predict(_prefill_features(tokens, cached))

    def row_s(self) -> float:
        """Return the seconds by which one more prompt in flight delays each token of all others."""
        return max(self._decode.predict((1.0, 1.0)) - self._decode.predict((1.0, 0.0)), 0.0)

    def take_prefill(self, tokens: int, cached: int, seconds: float) -> None:
        """Take the time that a prompt's tokens took. Negative and endless times are ignored."""
        if 0 <= seconds < math.inf:
            self._prefill.take(_prefill_features(tokens, cached), seconds)

    def take_decode(self, tokens: int, in_flight: float, seconds: float) -> None:
        """Take the time that `tokens` generated tokens took, with that number of prompts in flight on average."""
        if tokens > 0 and 0 <= seconds < math.inf:
            self._decode.take((1.0, in_flight), seconds / tokens)

    @property
    def samples(self) -> int:
        """Prompts from which the costs are fitted."""
        return self._prefill.samples

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens that are computed in a second, for a prompt of 1000 tokens without a hit."""
        return 1000 / max(self.prefill_s(1000, 0), 1e-9)


def _prefill_features(tokens: int, cached: int) -> tuple[float, float, float]:
    return (1.0, tokens / _TOKENS, tokens * (cached + tokens / 2) / _PRODUCTS)
