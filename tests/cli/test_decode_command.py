"""`kvplane decode`."""

from __future__ import annotations

from dataclasses import replace

from kvplane.base.step import Admit, Cache, End, Facts, News, Part, PartResult, Peek, Resume, Run, Step, StepResult
from kvplane_service.decisions.log import Decision
from kvplane_service.telemetry.ops import pack
from tests.service.hosts import HostWorld, spec_of


def test_decode_prints_the_hints_of_new_and_ended_requests(kvplane):
    world = HostWorld(spec=replace(spec_of(), hint_values=3))
    engine = world.open()
    engine.step(Part(news=News([3, 4], [20, 20], tokens=[9] * 40, hint=[2, 0])))
    engine.step(Part(facts=Facts([3, 4], hint=[-1, 1], end=[End.NONE, End.FREE])))
    packed = [pack(entry) for entry in world.host.decisions if isinstance(entry, Decision)]
    printed = [kvplane("decode", one)[1].splitlines()[1:3] for one in packed]
    assert printed[0] == [
        "new slot 3: 20 tokens, hint 2",
        "new slot 4: 20 tokens, hint 0",
    ]
    assert printed[1] == [
        "fact slot 3: nothing",
        "fact slot 4: hint 1, ends: free",
    ]


def test_decode_prints_operations_row_by_row(kvplane):
    world = HostWorld()
    engine = world.open()
    new = News(slot=[3, 4], num_tokens=[20, 20], tokens=[9] * 40, request_id=["first", "second"])
    engine.step(Part(news=new, admit=Admit(slot=[3, 4])))
    facts = Facts(slot=[3, 4], appended=[1, 0], tokens=[7], end=[End.NONE, End.FREE])
    engine.step(Part(facts=facts, cache=Cache(evicted=[2]), run=Run(slot=[3])), Part(peek=Peek(slot=[3])))
    packed = [pack(entry) for entry in world.host.decisions if isinstance(entry, Decision)]
    assert kvplane("decode", packed[0]) == (
        0,
        "step 1 of epoch 2, executed through 0\n"
        "new slot 3 'first': 20 tokens\n"
        "new slot 4 'second': 20 tokens\n"
        "admit slot 3: granted, hit 0, 20 tokens, blocks 0:[1, 2]\n"
        "admit slot 4: granted, hit 16, 4 tokens, blocks 0:[3]\n"
        "17 blocks free\n",
        "",
    )
    code, out, _ = kvplane("decode", packed[1])
    assert code == 0
    assert out.splitlines() == [
        "step 2 of epoch 2, executed through 1",
        "part 0",
        "fact slot 3: 1 token more",
        "fact slot 4: ends: free",
        "cache: failed steps [], evicted [2], released []",
        "run slot 3: 1 token",
        "18 blocks free",
        "part 1",
        "peek slot 3: hit 16",
        "18 blocks free",
    ]


def test_decode_prints_a_resumed_image(kvplane):
    resume = Resume([1], [9], num_blocks=[3], blocks=[5, 6, 7], held_slot=[4], held_count=[1], held_blocks=[9])
    result = StepResult(3, 0, [PartResult(free_blocks=15)], 0)
    code, out, _ = kvplane("decode", pack(Decision(Step(2, 3, [Part(resume=resume)]), result, ([],), 0, 0)))
    assert code == 0
    assert out.splitlines()[1:] == ["resumed slot 1: 9 tokens computed", "held slot 4", "15 blocks free"]


def test_decode_prints_ended_loads(kvplane):
    result = StepResult(3, 0, [PartResult(free_blocks=15)], 0)
    part = Part(cache=Cache(loads_over=[5, 9]))
    code, out, _ = kvplane("decode", pack(Decision(Step(2, 3, [part]), result, ([],), 0, 0)))
    assert code == 0
    assert "loads of earlier epochs are over: blocks [5, 9]" in out.splitlines()


def test_decode_of_invalid_text_is_wrong_use(kvplane):
    code, out, errors = kvplane("decode", "nonsense")
    assert (code, out) == (2, "")
    assert "the text is not a packed step" in errors
