"""What was published: numbers alone, each with its source.

In public repositories of github.com at the commits named; GUIDE is guides/tiered-prefix-cache of llm-d/llm-d.

POST       llm-d.ai/blog, 2026-06-13, "Serving Hybrid Models at Scale in llm-d"; its figures are in
           llm-d/llm-d.github.io at 9a8058f73, static/img/blogs/hybrid-models
ROWS       GUIDE at 34f91b1ac, benchmark-results/vllm-gpt-oss-120b-h100/README.md
SERVER     GUIDE at a660ed2f8, modelserver/gpu/vllm/base/patch-vllm-gpt-oss-120b.yaml
ROUTER     GUIDE at 68d37a354, router/single-host/tiered-prefix-cache-cpu.values.yaml
LOAD       llm-d/llm-d-benchmark at c90f8c99c, workload/profiles/inference-perf/guide_tiered-prefix-cache_1.yaml.in
GENERATOR  kubernetes-sigs/inference-perf at 0ba9aceba, inference_perf/datagen/shared_prefix_datagen.py, and at
           11db4a8f6, inference_perf/apis/completion.py

The unit of the published throughput (`Unit`): the generator counts the tokens of the *text* that comes back, with a
tokenizer of its own, and divides by the time from a stage's first request to its last answer. The servers generate 256
tokens per request, whatever the text is: (mean latency - mean TTFT) / mean time per token is 257. But 382 are counted.
So 40 requests per second are up to 15,290 tokens per second, not 10,240.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# LOAD
RATES = (5, 10, 15, 20, 25, 30, 35, 40)  # stages, requests per second
STAGE_S, PAUSE_S = 60, 60
GROUPS, PROMPTS, SYSTEM, QUESTION, OUTPUT = 250, 5, 16_000, 256, 256
# SERVER; TP 1, one H100 each
ENGINES, BLOCK, MAX_RUNNING = 16, 128, 512
HOST_BYTES, MEMORY_SHARE = 107_374_182_400, 0.95


class Row(NamedTuple):
    """One stage: mean and p90 of TTFT and of the whole latency in seconds, and the counted tokens per second."""

    ttft_s: float
    ttft_p90_s: float
    latency_s: float
    latency_p90_s: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Summary:
    """All stages of a column together: requests and tokens per second, and mean seconds."""

    requests_per_s: float
    input_per_s: float
    output_per_s: float
    ttft_s: float
    latency_s: float
    per_token_s: float

    @property
    def counted_output(self) -> float:
        """Output tokens of a request as the generator counts them."""
        return self.output_per_s / self.requests_per_s

    @property
    def generated(self) -> float:
        """Output tokens of a request as its tokens are timed."""
        return (self.latency_s - self.ttft_s) / self.per_token_s

    @property
    def input_tokens(self) -> float:
        """Tokens of a prompt."""
        return self.input_per_s / self.requests_per_s


# ROWS
BASELINE_ALL = Summary(9.69, 162_353, 3704, 12.5, 19.2, 0.0261)
OFFLOADED_ALL = Summary(11.48, 192_212, 4120, 1.2, 5.3, 0.0157)
BASELINE = {
    5: Row(0.45, 0.57, 1.80, 2.05, 1983),
    10: Row(0.44, 0.56, 1.98, 2.38, 3664),
    15: Row(0.45, 0.57, 2.73, 3.45, 5653),
    20: Row(0.73, 1.04, 5.59, 9.72, 6581),
    25: Row(6.16, 10.71, 14.29, 18.62, 7229),
    30: Row(14.07, 26.17, 22.51, 34.04, 6822),
    35: Row(18.44, 35.16, 26.52, 41.82, 7178),
    40: Row(24.78, 45.42, 32.78, 52.03, 6722),
}
OFFLOADED = {
    5: Row(0.43, 0.56, 1.80, 2.04, 1738),
    10: Row(0.37, 0.55, 1.91, 2.28, 3799),
    15: Row(0.35, 0.55, 2.17, 2.65, 5171),
    20: Row(0.32, 0.56, 2.60, 3.39, 6967),
    25: Row(0.34, 0.57, 3.46, 4.61, 8777),
    30: Row(0.33, 0.58, 4.24, 5.50, 9767),
    35: Row(0.50, 0.84, 6.16, 7.41, 11_677),
    40: Row(4.24, 8.76, 10.33, 14.63, 11_742),
}
# POST, Figure 4, digitised: scaled by the 9 markers of the other two columns that nothing covers, whose own errors are
# up to 15 tokens/s; a triangle's centre is known to 3 pixels. The text says "roughly 115 %" above the baseline, 14,452.
BOTH = {5: 1757, 10: 3634, 15: 5699, 20: 7412, 25: 8985, 30: 10_369, 35: 13_396, 40: 14_360}
BOTH_ERROR, BOTH_MOST_TTFT_S = 100, 0.6  # tokens/s; the markers of TTFT are below this at all rates
# ROWS: hits of all prompts; queries count a prompt again at each attempt to admit it, so they are no denominator.
PROMPT_TOKENS = sum(RATES) * STAGE_S * BASELINE_ALL.input_tokens
BASELINE_HITS, OFFLOADED_HITS, OFFLOADED_LOADS = 27.0e6, 45.6e6, 61.0e6
# POST: capacity of the hybrid allocator relative to none, "as seen in vLLM's log".
CAPACITY_RATIO = 1.77
# POST, Figure 2, its labels: seconds of ten prompts of 128k tokens without and with hybrid transfers.
LOADS = {
    ("gpt-oss-20b", 2, "CPU"): (0.750, 0.400),
    ("gpt-oss-120b", 4, "CPU"): (0.815, 0.430),
    ("gpt-oss-20b", 2, "storage"): (1.330, 0.750),
    ("gpt-oss-120b", 4, "storage"): (1.900, 1.010),
}
# POST, Figure 3, digitised: the last number of users before a fall and the first one after it, None = no fall;
# thousands of tokens per second before and after, read to 5.
USERS = {
    ("GPU", False): ((150, 200), 395, 82),
    ("GPU", True): ((250, 300), 408, 82),
    ("GPU + CPU", False): ((400, 450), 394, 82),
    ("GPU + CPU", True): ((800, 850), 400, 82),
    ("GPU + CPU + storage", False): ((400, 500), 369, 222),
    ("GPU + CPU + storage", True): ((800, 850), 385, 342),
}


class Unit(NamedTuple):
    """How a request of the load is counted: tokens of its prompt, tokens generated, and tokens counted of these."""

    prompt: float
    generated: int
    counted: float

    @classmethod
    def of(cls, summary: Summary) -> Unit:
        """The unit of a column, from its own summary."""
        return cls(summary.input_tokens, OUTPUT, summary.counted_output)


UNIT = Unit.of(BASELINE_ALL)  # of every predicted column: no other one may be looked at


def drained_s(rate: int, row: Row, unit: Unit) -> float:
    """The time from a stage's first request to its last answer, if the throughput is in this unit."""
    return rate * STAGE_S * unit.counted / row.throughput
