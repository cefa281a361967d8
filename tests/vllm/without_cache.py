"""A scheduler for a model without a KV cache: `python tests/vllm/without_cache.py`, in the environment of vLLM.

Prints as JSON the class of the manager with `fallback: stock`, and the refusal without.
"""

from __future__ import annotations

import json
import os
import random
import sys

from page_contents import SOURCE, Options
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvplane_vllm.spec import UnsupportedModel

if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    os.chdir(SOURCE)  # vLLM's tests name a model below it
    init_none_hash(sha256)
    options = Options(random.Random(1), "inprocess", {"kind": "full", "is_async": False, "drafts": 0})
    options.specs = []
    from tests.v1.core import utils  # of vLLM, which switches its cache off for such a model

    make = utils.create_scheduler
    utils.create_scheduler = lambda **given: make(**given | {"enable_prefix_caching": False})
    manager = options.scheduler("inprocess", {"fallback": "stock"}).kv_cache_manager
    found = {"fallback": type(manager).__name__}
    try:
        options.scheduler("inprocess", {})
    except UnsupportedModel as error:
        found["refused"] = error.message
    print("RESULT " + json.dumps(found))
