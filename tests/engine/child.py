"""An engine in a child process, on workers' pages and a gRPC session, until it is killed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

import kvplane
from kvplane.base.step import RowFlag
from kvplane_kernels.torch_ops import TorchOps
from tests.engine.reference.config import MIXED, ModelConfig
from tests.engine.reference.engine import Engine
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import attach_ranks
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import draw_weights


def engine(connection: Connection, address: str, replica: str, workers: list[str]) -> None:
    """Send the number of kept keys; then serve lists of requests, and send the requests that end in each step."""
    torch.set_num_threads(1)
    with kvplane.connect(address) as client:
        served = begin(client, replica, workers, Made())
        connection.send(served.kept_keys)
        with contextlib.suppress(EOFError):
            while True:
                serve(connection, served, connection.recv())


@dataclass(frozen=True)
class Made:
    """Arguments of an engine."""

    kind: type[Engine] = Engine
    model: ModelConfig = MIXED
    load_deadline_s: float = 30.0
    session_socket: str = ""


def begin(client: kvplane.Client, replica: str, workers: list[str], made: Made) -> Engine:
    """Begin an engine life on the workers' pages. Raises as `attach` and `lasting_session`."""
    ops = TorchOps()
    memory = attach_ranks(workers, ops)
    model = Model(made.model, draw_weights(made.model), [one.pages for one in memory], ops)
    flags = RowFlag.LOAD if memory[0].jobs else RowFlag.NONE
    config = SchedulerConfig(token_budget=64, admit_flags=flags, load_deadline_s=made.load_deadline_s)
    session = partial(client.lasting_session, replica, session_socket=made.session_socket)
    return made.kind(session, memory, model, config)


def serve(connection: Connection, served: Engine, prompts: list[tuple[list[int], int]]) -> None:
    """Send (number, hits, output) of the requests that end in each step, and None at the end."""
    for number, (prompt, max_new) in enumerate(prompts):
        served.add(Request(str(number), prompt, max_new))
    while served.has_work:
        ended = [(int(one.request_id), one.hits, one.output) for one in served.step()]
        connection.send(ended)
    connection.send(None)
