"""The model of cost: what a step of an engine takes, by floating-point operations, bytes and links.

Everything in this file but `Fitted` is fixed before any column is predicted; each constant has its source:

H100    NVIDIA H100 Tensor Core GPU data sheet: SXM5, dense bfloat16; PCIe Gen5 of 128 GB/s for both directions
CARD    gpt-oss-120b & gpt-oss-20b Model Card (OpenAI, arXiv 2508.10925), table 1 and section 2
CONFIG  config.json of openai/gpt-oss-120b
VLLM    defaults of `vllm serve` on an H100
READ    tests/bench/results/gpu.md: a read of device memory on an H100
assumed no source; `make tables` varies it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# H100
FLOPS, MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 989.4e12, 3.35e12, 64e9
# CARD: parameters used by each token; of attention and unembedding, in bfloat16; of all experts, in 4.25 bits
ACTIVE, DENSE_BYTES, EXPERT_BYTES = 5.13e9, 2 * (0.96e9 + 0.58e9), 114.71e9 * 4.25 / 8
EXPERTS, CHOSEN = 128, 4
# CONFIG
LAYERS_OF_A_KIND, HEADS, HEAD_SIZE, KV_HEADS, WINDOW, MAX_MODEL_LEN = 18, 64, 64, 8, 128, 131_072
TOKEN_BYTES = 2 * KV_HEADS * HEAD_SIZE * 2 * LAYERS_OF_A_KIND  # keys and values of a group of layers
# VLLM
BUDGET = 8192
# READ
READ_SHARE = 0.93  # of MEMORY_BYTES_PER_S
# assumed: one port of 400 Gb/s, to storage and to each engine; seconds until a router knows of an event
STORAGE_BYTES_PER_S = PEER_BYTES_PER_S = 50e9
EVENT_DELAY_S = 0.05


@dataclass(frozen=True, slots=True)
class Fitted:
    """The three constants that are fitted on rows of the baseline.

    Attributes:
        flops: floating-point operations per second of a prefill, of `FLOPS`.
        step_s: what a decode step takes in addition to its bytes: launches and sampling; hidden by a computed prompt.
        pool_bytes: memory of an engine's cache.
        bandwidth: bytes per second that a decode step reads, of `MEMORY_BYTES_PER_S`; not fitted.
    """

    flops: float
    step_s: float
    pool_bytes: float
    bandwidth: float = READ_SHARE


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step."""

    fitted: Fitted

    def prefill_s(self, start: int, tokens: int) -> float:
        """Return the time to compute tokens of a prompt behind `start` others."""
        seen = tokens * (start + tokens / 2 + WINDOW)  # by one layer of each kind
        work = 2 * ACTIVE * tokens + 4 * HEADS * HEAD_SIZE * LAYERS_OF_A_KIND * seen
        return work / (self.fitted.flops * FLOPS)

    def weights_s(self, tokens: float) -> float:
        """Return the least time of a step with these tokens: its fixed part, and that to read the weights they use."""
        used = 1 - (1 - CHOSEN / EXPERTS) ** tokens  # the share of experts that some token has chosen
        read_s = (DENSE_BYTES + EXPERT_BYTES * used) / (self.fitted.bandwidth * MEMORY_BYTES_PER_S)
        return self.fitted.step_s + read_s

    def contexts_s(self, contexts: Iterable[int]) -> float:
        """Return the time to read the cache of requests that decode."""
        num_bytes = sum(TOKEN_BYTES * (context + WINDOW) for context in contexts)
        return num_bytes / (self.fitted.bandwidth * MEMORY_BYTES_PER_S)


FITTED = Fitted(0.3998192, 0.003553948, 6 * 2**30)  # by `tests.bench.tables.fit`, from 27 points
