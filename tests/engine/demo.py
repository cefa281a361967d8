"""`make demo-engine`: a service, workers, and the reference engine, which answers conversations.

The conversations run twice: with a prefix cache and without. Then one leaves the device for tiers, and comes back
(`demo_tiers`). Every answer is compared with that of a dense model, which computes without pages. The weights are
random, so the text of an answer would be noise and is not shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import kvplane
from kvplane.base.sources import LayerSource
from kvplane_tools.cli.child import ServiceChild
from tests.engine import demo_tiers
from tests.engine.backends import Place, backend_of, default_backend, suited
from tests.engine.reference.config import MIXED
from tests.engine.reference.engine import Engine
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import attach_ranks
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import draw_weights
from tests.engine.talk import Talk, conversations, readable
from tests.engine.twin import Twin
from tests.engine.workers import running_workers

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = {"with-cache": False, "without-cache": True}  # whether caching is disabled
CONFIG = SchedulerConfig(max_running=6, token_budget=160, chunk_tokens=80)
CONVERSATIONS, TURNS, AT_ONCE = 6, 3, 6
VIEW_INTERVAL_S = 0.15
LINES = 12


@dataclass
class Look:
    """The state that the demo shows.

    Attributes:
        answers: the latest answers, oldest first.
        differing: tokens that differ from the dense model's, of `compared`.
    """

    engine: Engine
    answers: deque[Request] = field(default_factory=lambda: deque(maxlen=LINES))
    num_answers: int = 0
    prompt_tokens: int = 0
    compared: int = 0
    differing: int = 0
    busy_s: float = 0.0

    @property
    def line(self) -> str:
        """A summary line."""
        counts = self.engine.counts
        share = counts.hit_tokens / max(1, self.prompt_tokens)
        return (
            f"{self.num_answers} answers in {self.busy_s:.1f} s | {counts.computed_tokens:,} tokens computed | hit "
            f"{counts.hit_tokens:,} tokens ({share:.0%} of prompts) | {counts.preempted} preempted | "
            f"{self.differing} of {self.compared} tokens differ from the dense model's"
        )


def main() -> int:
    """Run the demo. Returns 0 when no token differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.demo", description=__doc__)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--device", default="cpu", help="device of pages and model")
    parser.add_argument("--backend", help="of operations on pages (default: torch on the CPU, triton on a GPU)")
    given = parser.parse_args()
    count, place = given.conversations, Place(given.device, given.backend or default_backend(given.device))
    torch.set_num_threads(1)
    console = Console()
    looks = []
    with ExitStack() as stack:
        print(f"starting a service, then {count} conversations of {TURNS} turns each, twice", flush=True)
        address = stack.enter_context(ServiceChild()).address
        for replica in REPLICAS:
            print(f"== {replica}: starting two workers and the engine", flush=True)
            with (
                running_engine(address, replica, place) as (engine, twin),
                live(console) if console.is_terminal else lines() as show,
            ):
                looks.append(converse(engine, twin, conversations(ROOT, count, TURNS, seed=4), show))
            print(looks[-1].line, flush=True)
        print(saved(*looks), flush=True)
        text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs" / "concepts").glob("*.md")))
        differing = demo_tiers.show(address, place, text)
    return 1 if differing or any(look.differing or not look.compared for look in looks) else 0


def saved(cached: Look, uncached: Look) -> str:
    """What the cache saved, as a sentence."""
    tokens = (cached.engine.counts.computed_tokens, uncached.engine.counts.computed_tokens)
    return (
        f"the cache saved {tokens[1] - tokens[0]:,} of {tokens[1]:,} tokens ({1 - tokens[0] / tokens[1]:.0%}) and "
        f"{uncached.busy_s - cached.busy_s:.1f} of {uncached.busy_s:.1f} s; both runs gave the dense model's tokens: "
        f"{cached.differing + uncached.differing} of {cached.compared + uncached.compared} differ"
    )


@contextmanager
def running_engine(address: str, replica: str, place: Place) -> Iterator[tuple[Engine, Twin]]:
    """Register the replica and start its workers and the engine."""
    model = suited(MIXED, place.backend)
    source = LayerSource(
        layers=model.cache_layers(),
        num_blocks=800,
        max_model_len=1024,
        max_batched_tokens=160,
        retention_interval=-1,
        disable_caching=REPLICAS[replica],
    )
    with (
        kvplane.connect(address) as client,
        tempfile.TemporaryDirectory(prefix="kvplane-demo-") as folder,
    ):
        client.register_replica(replica, source, num_ranks=model.num_ranks)
        with running_workers(address, replica, place.device, Path(folder), model.num_ranks) as workers:
            ops, weights = backend_of(place.backend, place.device), draw_weights(model)
            memory = attach_ranks(workers, ops)
            forward = Model(model, weights, [one.pages for one in memory], ops)
            yield Engine(partial(client.lasting_session, replica), memory, forward, CONFIG), Twin(model, weights)


Show = Callable[[Look], None]


def converse(engine: Engine, twin: Twin, talk: Talk, show: Show) -> Look:
    """Run conversations, several at a time, and compare each answer with the dense model's."""
    look = Look(engine)
    for _ in range(AT_ONCE):
        put(engine, look, talk.next())
    while engine.has_work:
        started = time.monotonic()
        ended = engine.step()
        look.busy_s += time.monotonic() - started
        for request in ended:
            compare(twin, request, look)
            put(engine, look, following(talk, request))
        show(look)
    return look


def following(talk: Talk, request: Request) -> Request | None:
    """The next requests after an answer."""
    return talk.answered(request) or talk.next()


def put(engine: Engine, look: Look, request: Request | None) -> None:
    if request is not None:
        look.prompt_tokens += len(request.prompt)
        engine.add(request)


def compare(twin: Twin, request: Request, look: Look) -> None:
    look.answers.append(request)
    look.num_answers += 1
    look.compared += len(request.output)
    look.differing += twin.count_wrong(request.prompt, request.output)


@contextmanager
def live(console: Console) -> Iterator[Show]:
    """A table of answers, redrawn in place."""
    due_s = 0.0
    with Live(console=console, auto_refresh=False) as view:

        def show(look: Look) -> None:
            nonlocal due_s
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + VIEW_INTERVAL_S
                view.update(panel(look), refresh=True)

        yield show


def panel(look: Look) -> Panel:
    """The latest answers, and the summary."""
    table = Table(box=None, pad_edge=False, header_style="bright_black", expand=True)
    for heading, ratio in (("turn", 1), ("prompt", 1), ("hit", 1), ("question", 6), ("answer", 2)):
        table.add_column(heading, no_wrap=True, ratio=ratio)
    for request in look.answers:
        question = readable(request.prompt).rpartition("Q: ")[2].removesuffix("·A: ")
        hit = Text(str(request.hits[-1]), style="cyan" if request.hits[-1] else "bright_black")
        table.add_row(request.request_id, str(len(request.prompt)), hit, question, f"{len(request.output)} tokens")
    colour = "bold red" if look.differing else "bold green"
    title = "[bold]a reference engine on kvplane: full, window, chunked and Mamba layers, two ranks[/]"
    return Panel(Group(table, Text(), Text(look.line, style=colour)), title=title, title_align="left")


@contextmanager
def lines() -> Iterator[Show]:
    """Format an answer as a line."""
    shown = 0

    def show(look: Look) -> None:
        nonlocal shown
        new = look.num_answers - shown
        shown = look.num_answers
        for request in list(look.answers)[len(look.answers) - new :]:
            hit, prompt = request.hits[-1], len(request.prompt)
            answer = f"{len(request.output)} tokens answered"
            print(f"turn {request.request_id:<5} {hit:>4} of {prompt:>4} prompt tokens cached | {answer}", flush=True)

    yield show


if __name__ == "__main__":
    sys.exit(main())
