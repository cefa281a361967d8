"""Every rule finds its violation: a few records that keep the rule, and one more that breaks it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim import history as h
from tests.sim.history import History, Record
from tests.sim.rules import RULES, findings

HERE, BESIDE = ("a", 0, 77), ("a", 1, 77)
CLAIMED: list[Record] = [h.Claimed(HERE, 5, 0, 1), h.Claimed(BESIDE, 5, 0, 1)]


def carried(seq: int, part: int = 0, **changes) -> h.CarriedOut:
    given = {"place": HERE, "epoch": 5, "owner": 5, "seq": seq, "part": part, "stamped": (), "life": 1}
    return h.CarriedOut(**{**given, **changes})


def key(kind: type, *numbers: int) -> Record:
    return kind(1, "a", 5, *numbers, 0, 9, b"digest")


def began(epoch: int = 5, kept=(), due=(), flushed=(), entered=0) -> h.Began:
    return h.Began(1, "a", epoch, 1, entered, kept, due, flushed, ((0, 8), (0, 8 if epoch == 5 else 7)))


def viewed(**changes) -> h.Viewed:
    given = {"status": "live", "shows": True, "age_ms": 0, "state": "a"}
    return h.Viewed(1, "a", 3, 1, True, **{**given, **changes})


STORED: list[Record] = [*CLAIMED, key(h.Stored, 3), h.Executed(HERE, 5, 3)]
APPLIED = h.Applied(1, "a", 5, 1, 0, "answer")
DECIDED, IMAGED = h.Decided("a", 3, 1, "yes", "a"), h.Imaged(1, "a", 3, 5, 0, ())
BROKEN: dict[str, tuple[list[Record], Record]] = {
    "never a wrong hit": ([], h.Wrong("a page")),
    "sound": ([], h.Broken("a block")),
    "no block is leaked": ([h.Emptied("a", 9, 9)], h.Emptied("a", 8, 9)),
    "executed": (STORED, key(h.Published)),
    "what is shown is what is published": ([], h.Misled("a key")),
    "stamps version content": (
        [carried(1, stamped=((4, 100),)), carried(1, place=BESIDE, stamped=((4, 100),))],
        carried(2, stamped=((5, 100),)),
    ),
    "the stamp table belongs to the memory": ([began(kept=((1, 8),))], began(6, kept=((1, 8),))),
    "an engine restart keeps its cache": ([began(kept=((1, 8),), due=((1, 8),))], began(6, due=((1, 8),))),
    "a drain loses nothing": ([began(kept=((1, 8),), flushed=((1, 8),))], began(5, flushed=((1, 8),))),
    "the epoch lives where the pages live": ([*CLAIMED, carried(1)], carried(2, epoch=4)),
    "orders run once": ([carried(1), carried(1, 1), carried(2)], carried(2)),
    "a launch without an answer ends its engine life": (
        [*CLAIMED, carried(1), h.Invalidated(HERE, 5, (3,)), carried(2, place=BESIDE), carried(1, epoch=6)],
        carried(2),
    ),
    "a lease that lapses takes nothing": ([h.Lapsed("a", "x", "x")], h.Lapsed("a", "x", "y")),
    "who gave up writes nothing more": ([h.Wrote(1, "a", True)], h.Wrote(1, "a", False)),
    "ownership converges": ([h.Owned("a", ("one",)), h.Owned("b", ())], h.Owned("a", ("one", "two"))),
    "resume": ([], h.Lost("a", 3)),
    "copies out of a page are bracketed": ([h.Moved("a", True)], h.Moved("a", False)),
    "a repeat gets the same answer": ([APPLIED, h.Answered("a", 5, 1, 0, "answer")], h.Answered("a", 5, 1, 0, "other")),
    "epochs never go back": ([began(5), h.Opened("a", 5, 4), began(6), began(6, entered=9)], began(6, entered=9)),
    "one life per epoch": ([h.Claimed(HERE, 5, 0, 2), carried(1)], carried(2, life=2)),
    "allocation never waits for the store": ([h.Waited(0.0)], h.Waited(0.1)),
    "nothing hung takes its neighbours along": ([h.Asked(1, "step", 0.1, True)], h.Asked(1, "step", 0.1, False)),
    "a mirror publishes what its engine decided": (
        [DECIDED, h.Decided("a", 3, 2, "yes", "b"), IMAGED, h.Mirrored(1, "a", 3, 1, "yes")],
        h.Mirrored(1, "a", 3, 2, "no"),
    ),
    "a mirror has the state of its engine": ([DECIDED, IMAGED, viewed()], viewed(state="other")),
    "what is not followed is hidden": ([viewed(), viewed(status="diverged", shows=False)], viewed(status="idle")),
    "a mirror that lags is hidden": ([viewed(age_ms=400), viewed(age_ms=401, shows=False)], viewed(age_ms=401)),
    "only a difference ends a mirror": (
        [viewed(), h.Planted(1, "a"), viewed(status="diverged"), viewed(status="diverged"), IMAGED, viewed()],
        viewed(status="diverged"),
    ),
    "a mirror claims nothing": ([DECIDED, began(), h.Claimed(HERE, 5, 0, 1)], h.Claimed(HERE, 6, 0, 2)),
    "a mirror never goes back": (
        [h.Decided("a", 3, 0, "77", "a"), h.Decided("a", 4, 0, "77", "a"), IMAGED, h.Imaged(1, "a", 4, 6, 0, ())],
        IMAGED,
    ),
    "a mirror catches up": ([h.CaughtUp("a", 9, 9)], h.CaughtUp("a", 9, 8)),
}


def history(records: Sequence[Record]) -> History:
    made = History()
    for at, record in enumerate(records):
        made.add(at, record)
    return made


def test_every_rule_has_a_planted_violation():
    assert list(BROKEN) == list(RULES)


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_finds_its_planted_violation(rule):
    kept, breach = BROKEN[rule]
    assert list(RULES[rule](history(kept))) == []
    assert len(list(RULES[rule](history([*kept, breach])))) == 1


def test_rule_finds_further_violations():
    executed = [*STORED, h.Executed(BESIDE, 5, 3), key(h.Published)]
    assert list(RULES["executed"](history(executed))) == []
    assert list(RULES["executed"](history([*CLAIMED, h.Claimed(HERE, 5, 2, 1), *executed[2:]]))), (
        "the engine counts two ahead"
    )
    claims: list[Record] = [*CLAIMED, h.Claimed(HERE, 4, 0, 1)]
    assert list(RULES["the epoch lives where the pages live"](history(claims)))
    assert list(RULES["epochs never go back"](history([h.Opened("a", 5, 5)])))
    late: list[Record] = [h.Invalidated(BESIDE, 4, (1,)), h.Began(1, "a", 5, 1, 0, ((1, 8),), (), (), ((0, 8), (0, 0)))]
    assert not list(RULES["the stamp table belongs to the memory"](history(late))), "an opening that was given up"
    assert not list(RULES["the stamp table belongs to the memory"](history([*late, carried(1, life=2)])))
    assert list(RULES["the stamp table belongs to the memory"](history([*late, carried(1)])))
    assert list(RULES["the stamp table belongs to the memory"](history(late[1:])))
    wrong = began(kept=((1, 7),))
    assert not list(RULES["the stamp table belongs to the memory"](history([carried(1, life=2), wrong])))
    assert list(RULES["the stamp table belongs to the memory"](history([wrong, carried(1, life=2)])))
    assert list(RULES["the stamp table belongs to the memory"](history([carried(1), wrong])))
    assert list(RULES["orders run once"](history([carried(1), h.Executed(HERE, 5, 2)])))
    assert list(RULES["a repeat gets the same answer"](history([APPLIED, APPLIED])))


def test_a_step_is_applied_once_while_a_service_has_the_replica():
    rule = RULES["a repeat gets the same answer"]
    assert list(rule(history([began(), APPLIED, began(entered=9), APPLIED]))) == []
    assert len(list(rule(history([began(), APPLIED, APPLIED])))) == 1
    assert len(list(rule(history([began(entered=9), APPLIED, began(entered=9), APPLIED])))) == 1


def test_history_without_violations_has_no_findings():
    assert findings(history([*CLAIMED, carried(1), h.Executed(HERE, 5, 1)])) == []
    assert findings(history([h.Wrong("a page")])) == ["never a wrong hit: a page"]
