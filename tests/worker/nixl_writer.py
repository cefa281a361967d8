"""python -m tests.worker.nixl_writer ARENA ADDRESS: what a holder of `nixl_arena` (hex) can do: write there, over NIXL.

The exit status is 0 if the write was done. It exits without clean-up: with a write under way that of UCX may crash.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np

from kvplane_worker.nixl import agent
from kvplane_worker.nixl.messages import ADDRESS

LIMIT_S = 20
NUM_BYTES, VALUE = 64, 0xEE


def write(arena: bytes, address: int) -> bool:
    """Write NUM_BYTES into the memory of the lending process, from another process; returns whether NIXL says that it
    did.
    """
    command = [sys.executable, "-m", "tests.worker.nixl_writer", arena.hex(), str(address)]
    code = subprocess.run(command, timeout=3 * LIMIT_S).returncode
    assert code in (0, 3), "the writer failed before it wrote"
    return code == 0


def main(arena: bytes, address: int) -> int:
    nixl = agent.library()
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, agent.PROGRESS_US
    mine = nixl.nixlAgent("writer", config)
    mine.createBackend("UCX", {})
    content = np.full(NUM_BYTES, VALUE, dtype=np.uint8)
    at = int(content.ctypes.data)
    mine.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(at, content.nbytes, 0, "")]), [])
    name = mine.loadRemoteMD(arena[ADDRESS.size :]).decode()
    local, remote = ([(one, content.nbytes, 0)] for one in (at, address))
    made = mine.createXferReq(
        nixl.NIXL_WRITE, nixl.nixlXferDList(nixl.DRAM_SEG, local), nixl.nixlXferDList(nixl.DRAM_SEG, remote), name
    )
    try:
        status, end = mine.postXferReq(made), time.monotonic() + LIMIT_S
        while status == nixl.NIXL_IN_PROG and time.monotonic() < end:
            status = mine.getXferStatus(made)
    except nixl.nixlRemoteDisconnectError:
        return 3
    return 0 if status == nixl.NIXL_SUCCESS else 3


if __name__ == "__main__":
    os._exit(main(bytes.fromhex(sys.argv[1]), int(sys.argv[2])))
