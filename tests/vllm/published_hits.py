"""An unmodified vLLM publishes its KV events on ZMQ, answers prompts, and prints what it hit.

python tests/vllm/published_hits.py MODEL NUM_BLOCKS EVENTS REPLAY [OPTIONS]

Runs in the environment of vLLM (`environment`). In: lines of JSON, {"prompts": [[token, ...], ...], "new": tokens}.
Out: lines "ANSWER {"cached": [tokens, ...], "batches": published so far}". OPTIONS: further arguments of the engine.
"""

from __future__ import annotations

import json
import sys

from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import ZmqEventPublisher
from workload import engine


def main(model: str, num_blocks: str, events: str, replay: str, options: str = "{}") -> None:
    """Answer until the input ends."""
    batches = 0
    publish = ZmqEventPublisher.publish

    def counted(publisher: ZmqEventPublisher, batch: object) -> None:
        nonlocal batches
        batches += 1
        publish(publisher, batch)

    ZmqEventPublisher.publish = counted
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay)
    llm = engine(model, "stock", int(num_blocks), kv_events_config=config, **json.loads(options))
    print("ANSWER {}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answer = {"cached": [one.num_cached_tokens for one in outputs], "batches": batches}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
