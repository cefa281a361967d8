"""The bench of the echo sends and receives as many bytes as a step, and marks a ratio above the goal."""

from __future__ import annotations

import pytest

from tests.bench import echo
from tests.bench.peer.engine import Engine
from tests.bench.peer.models import MODELS
from tests.bench.peer.places import InProcess
from tests.bench.peer.plan import IN_PROCESS, UNIX


def test_an_echo_has_the_length_that_its_message_asks_for():
    with echo.echo() as stream:
        assert all(stream.exchange(sent, received) > 0 for sent, received in ((28, 13), (4636, 1503), (4, 0)))


class Unanswered(echo.Echo):
    """Stands for the stream to the echo; notes what it is asked to exchange."""

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int]] = set()

    def exchange(self, sent: int, received: int) -> int:
        self.sizes.add((sent, received))
        return 1000


@pytest.mark.parametrize(("goal", "mark"), [(1e9, ""), (0.0, "**")])
def test_a_row_names_the_sizes_of_the_steps_and_marks_a_ratio(monkeypatch, goal, mark):
    monkeypatch.setattr(echo, "GOAL", goal)
    spec, stream = MODELS[0].spec(MODELS[0].shape.decode_blocks(8, 9)), Unanswered()
    engines = {name: Engine(InProcess().session(spec), MODELS[0].shape) for name in (UNIX, IN_PROCESS)}
    for engine in engines.values():
        engine.admit(8)
    name, requests, sizes, *_, ratio = echo.measure(MODELS[0], 8, 3, stream, engines)
    assert (name, requests, ratio.startswith("**")) == (MODELS[0].name, "8", bool(mark))
    assert {sizes} == {f"{sent} / {received}" for sent, received in stream.sizes}
    for engine in engines.values():
        engine.session.close()


def test_a_row_of_steps_sent_ahead_compares_with_echoes_of_equal_sizes(monkeypatch):
    monkeypatch.setattr(echo, "AHEAD_STEPS", 2)
    monkeypatch.setattr(echo, "GPU_S", 0.01)
    spec = MODELS[0].spec(MODELS[0].shape.decode_blocks(8, 20))
    engine = Engine(InProcess().session(spec), MODELS[0].shape)
    engine.admit(8)
    with echo.echo() as stream:
        name, requests, *figures, ratio, of_cpu = echo.measure_ahead(MODELS[0], 8, 2, stream, engine)
    assert (name, requests, len(figures)) == (MODELS[0].name, "8", 3)
    assert float(ratio) > 0 < float(of_cpu)
    engine.session.close()
