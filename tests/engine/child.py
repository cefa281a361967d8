"""The engine in a process of its own, on workers' pages and a session over gRPC, until it is killed."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

import torch

import kvplane
from kvplane_worker.engine.config import MIXED
from kvplane_worker.engine.engine import Engine
from kvplane_worker.engine.model import Model
from kvplane_worker.engine.ranks import attach_ranks, open_session
from kvplane_worker.engine.request import Request
from kvplane_worker.engine.scheduler import SchedulerConfig
from kvplane_worker.engine.weights import draw_weights
from kvplane_worker.ops.torch_ops import TorchOps


def engine(connection: Connection, address: str, replica: str, workers: list[str]) -> None:
    """Say how many keys the new life kept; then serve lists of requests, and say after each step what ended in it."""
    torch.set_num_threads(1)
    ops = TorchOps()
    memory = attach_ranks(workers, ops)
    with kvplane.connect(address) as client:
        session = open_session(client, replica, memory)
        model = Model(MIXED, draw_weights(MIXED), [one.pages for one in memory], ops)
        served = Engine(session, memory, model, SchedulerConfig(token_budget=64))
        connection.send(session.kept_keys)
        with contextlib.suppress(EOFError):
            while True:
                _serve(connection, served, connection.recv())


def _serve(connection: Connection, served: Engine, prompts: list[tuple[list[int], int]]) -> None:
    for number, (prompt, max_new) in enumerate(prompts):
        served.add(Request(str(number), prompt, max_new))
    while served.has_work:
        ended = [(int(one.name), one.hits, one.output) for one in served.step()]
        connection.send(ended)
    connection.send(None)
