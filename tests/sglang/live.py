"""A live SGLang engine: `python tests/sglang/live.py MODEL ACT...`, with the linker's options as JSON in
KVPLANE_LINKER, or without it for stock. Runs in the environment of SGLang (`environment`).

Acts, in order: `serve` answers all conversations, `flush` empties SGLang's cache, `weights` loads the weights again,
`kill` ends all of its processes as a crash does. Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

POOL, PAGE = 1536, 16  # tokens: a few of the conversations below
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": POOL,
    "page_size": PAGE,
    "context_length": 512,
    "max_running_requests": 3,
    "enable_cache_report": True,
    "log_level": "warning",
}


def conversations():
    """Prompts of turns: each repeats what was said in its conversation; a part is shared by all."""
    random_ = random.Random(7)
    system = [random_.randrange(3, 900) for _ in range(64)]
    talks = [system + [random_.randrange(3, 900) for _ in range(40)] for _ in range(10)]
    for _ in range(4):
        for at, talk in enumerate(talks):
            yield list(talk)
            talks[at] = talk + [random_.randrange(3, 900) for _ in range(50)]


def linker_options(options):
    module = os.environ.get("KVPLANE_MODULE", "kvplane_sglang.linker:KvplaneLinker")
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": module.split(":")[1],
            "linker_module_path": module.split(":")[0],
            "linker_extra_config": options,
        },
    }


def serve(engine):
    prompts, tokens, cached = list(conversations()), [], []
    for at in range(0, len(prompts), 5):
        answers = engine.generate(
            input_ids=prompts[at : at + 5], sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        )
        tokens += [one["output_ids"] for one in answers]
        cached += [one["meta_info"]["cached_tokens"] for one in answers]
        time.sleep(0.02)
    return {"tokens": tokens, "cached": sum(cached), "prompt": sum(map(len, prompts)), "by_prompt": cached}


def main():
    import sglang

    model, *acts = sys.argv[1:]
    given = os.environ.get("KVPLANE_LINKER")
    options = (
        OPTIONS
        | (linker_options(json.loads(given)) if given else {})
        | json.loads(os.environ.get("SGLANG_OPTIONS", "{}"))
    )
    engine = sglang.Engine(model_path=model, **options)
    for act in acts:
        found = {}
        if act == "serve":
            found = serve(engine)
        elif act == "flush":
            engine.flush_cache()
        elif act == "weights":
            found = {"updated": str(engine.update_weights_from_disk(model))}
        elif act == "pause":
            time.sleep(1)
        elif act == "kill":
            os.killpg(0, signal.SIGKILL)
        sys.stdout.write(json.dumps({"act": act, **found}) + "\n")
        sys.stdout.flush()
    engine.shutdown()


if __name__ == "__main__":
    main()
