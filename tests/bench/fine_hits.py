"""Share of prompt tokens that hit in a multi-turn chat on models with states: with and without `prefix_match_unit`, and
with the unit by the policies lru and turn_tail.

    python -m tests.bench.fine_hits             prints a table and writes tests/bench/results/fine_hits.md
    python -m tests.bench.fine_hits --turns 500 --no-write

Each model is registered by its layers in a real service, with memory for a part of the sessions and for all of them,
and the replay engine serves turns of 100 sessions, 24 at a time. A turn adds 200 to 1,500 tokens to the context of its
session, which starts again after 16,000; sessions are drawn with Zipf frequencies (exponent 0.6). The layer lists are
likenesses: numbers of layers and sizes are those of the published models where known, otherwise of their issues in vLLM
(54458, 48401).
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

from kvplane import LayerSource, connect
from kvplane.base.groups import EvictionPolicy, MambaMode
from kvplane.base.layer_spec import DType, ceil_div
from kvplane.base.layers import FullAttentionSpec, Layer, MambaSpec, MLASpec
from kvplane_service.config import Config
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.machine import machine_line
from tests.service.rig import running

RESULTS = Path(__file__).parent / "results" / "fine_hits.md"
SESSIONS, RUNNING, MOST_TOKENS = 100, 24, 16_000
MEMORIES_GIB = (20, 160)
LRU, TURN_TAIL = EvictionPolicy.LRU, EvictionPolicy.TURN_TAIL


@dataclass(frozen=True, slots=True)
class Likeness:
    """A model of attention layers of one format and layers with a state, spread evenly.

    Attributes:
        attention: format of an attention layer.
        shapes: shapes of the state, in bfloat16 and float32.
        unit: tokens of which blocks are multiples.
        prefix_match_unit: the unit that is compared with the default.
    """

    attention: FullAttentionSpec | MLASpec
    num_attention: int
    shapes: tuple[tuple[int, ...], ...]
    num_states: int
    unit: int
    prefix_match_unit: int

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers, with blocks that are as large as a state (vLLM 0.33, platforms/interface.py)."""
        dtypes = (DType.BFLOAT16, DType.FLOAT32)
        state_bytes = sum(prod(shape) * dtype.num_bytes for shape, dtype in zip(self.shapes, dtypes, strict=True))
        token_bytes = self.attention.page_bytes // self.attention.block_size
        size = self.unit * ceil_div(state_bytes, self.unit * token_bytes)
        attention = replace(self.attention, block_size=size)
        state = MambaSpec(
            block_size=size,
            shapes=self.shapes,
            dtypes=dtypes,
            mode=MambaMode.ALIGN,
            padded_page_bytes=attention.page_bytes if attention.page_bytes != state_bytes else 0,
        )
        total = self.num_attention + self.num_states
        every = total // self.num_attention
        attends = [index % every == every - 1 and index // every < self.num_attention for index in range(total)]
        return tuple(Layer(f"layers.{index}", attention if is_it else state) for index, is_it in enumerate(attends))


def full(heads: int, head_size: int) -> FullAttentionSpec:
    """Return full attention in fp8."""
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=head_size, dtype=DType.FLOAT8_E4M3FN)


LATENT = MLASpec(block_size=64, num_kv_heads=1, head_size=512, dtype=DType.BFLOAT16)
MODELS = {
    "Qwen3.5-35B fp8": Likeness(full(2, 256), 10, ((3, 8192), (32, 128, 128)), 30, 16, 16),
    "GLM-5.3-Flash": Likeness(LATENT, 11, ((3, 24_576), (64, 128, 128)), 34, 128, 64),
    "Nemotron-3-Super fp8": Likeness(full(2, 128), 8, ((3, 10_240), (128, 64, 128)), 40, 16, 16),
}


def turns(count: int, output_share: float, seed: int) -> Iterator[TraceRequest]:
    """Yield the turns of all sessions in order of arrival. No two of RUNNING adjacent turns are of one session."""
    rng = random.Random(seed)
    weights = [(rank + 1) ** -0.6 for rank in range(SESSIONS)]
    context = [TokenSource()] * SESSIONS
    recent: deque[int] = deque(maxlen=RUNNING)
    for number in range(count):
        resting = [one for one in range(SESSIONS) if one not in recent]
        session = rng.choices(resting, [weights[one] for one in resting])[0]
        recent.append(session)
        added = rng.randint(200, 1500)
        if len(context[session]) + added > MOST_TOKENS:
            context[session] = TokenSource()
        output = max(1, round(added * output_share))
        prompt = context[session] + TokenSource((Span(number, 0, added - output),))
        answer = TokenSource((Span(number, 0, output, generated=True),))
        yield TraceRequest(f"turn-{number}", 0.0, f"session-{session}", prompt, answer)
        context[session] = prompt + answer


def share_of_hits(address: str, source: LayerSource, trace: Iterator[TraceRequest]) -> tuple[float, int]:
    """Serve the turns; return the share of the admitted requests' tokens that hit, and the hit unit in tokens."""
    with connect(address) as client:
        client.register_replica("chat", source)
        with client.session("chat") as session:
            engine = Engine(session, EngineConfig(max_running=RUNNING), CostModel())
            for request in trace:
                while engine.num_waiting + engine.num_running >= RUNNING:
                    engine.step()
                engine.submit(request)
            while engine.has_work:
                engine.step()
            engine.finish()
            assert not engine.refusals, engine.refusals[0]
            spec = engine.spec
        client.deregister_replica("chat")
    hit_unit = spec.hash_block_size if spec.partial_hits else spec.scheduler_block_size
    return engine.tally.hit_tokens / engine.tally.queried_tokens, hit_unit


def main() -> None:
    """Measure every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3000)
    parser.add_argument("--output-share", type=float, default=0.3, help="share of a turn that the model generates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    lines = [
        "| model | GiB | hit unit by default | tokens hit | prefix_match_unit | tokens hit | with turn_tail |",
        "|---|---|---|---|---|---|---|",
    ]
    with running(Config(listen="127.0.0.1:0")) as service:
        for (name, model), memory_gib in product(MODELS.items(), MEMORIES_GIB):
            cells = [name, str(memory_gib)]
            for unit, policy in ((0, LRU), (model.prefix_match_unit, LRU), (model.prefix_match_unit, TURN_TAIL)):
                source = LayerSource(
                    layers=model.layers(),
                    memory_bytes=memory_gib << 30,
                    max_model_len=2 * MOST_TOKENS,
                    prefix_match_unit=unit,
                    eviction=policy,
                )
                trace = turns(options.turns, options.output_share, options.seed)
                share, hit_unit = share_of_hits(service.address, source, trace)
                cells += [f"{share:.1%}"] if policy is TURN_TAIL else [f"{hit_unit:,}", f"{share:.1%}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if not options.no_write:
        RESULTS.write_text("\n".join(["# Hits inside the blocks of states", "", machine_line(), "", *lines, ""]))


if __name__ == "__main__":
    main()
