"""The rules of the life of a page, each checked over the records of one run.

The first line of a rule's docstring is its promise; it yields one line per violation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.sim.history import (
    RANKS,
    Answered,
    Applied,
    Asked,
    Began,
    Broken,
    CarriedOut,
    Claimed,
    Emptied,
    Executed,
    History,
    Imaged,
    Invalidated,
    Lapsed,
    Lost,
    Misled,
    Moved,
    Opened,
    Owned,
    Place,
    Published,
    Stored,
    Waited,
    Wrong,
    Wrote,
)
from tests.sim.mirror_rules import MIRROR_RULES


def never_a_wrong_hit(history: History) -> Iterator[str]:
    """Every page that a launch reads, or that a published key names, has exactly that content on every rank."""
    yield from (record.what for record in history.of(Wrong))


def sound(history: History) -> Iterator[str]:
    """No block is both free and held, in two tables, or without a holder; no process ends by a bug."""
    yield from (record.what for record in history.of(Broken))


def no_block_is_leaked(history: History) -> Iterator[str]:
    """When every request has ended, every block is free."""
    for record in history.of(Emptied):
        if record.free != record.usable:
            yield f"{record.replica}: {record.free} of {record.usable} blocks are free"


def executed(history: History) -> Iterator[str]:
    """A key is published only after the step that registered it has been executed on all ranks."""
    done: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # (replica, epoch) -> rank -> the service's number
    ahead: dict[tuple[str, int], int] = {}
    stored: dict[tuple[object, ...], list[int]] = defaultdict(list)
    proven: dict[tuple[int, str, int], set[int]] = {}
    for _, record in history.records:
        match record:
            case Claimed((replica, _, _), epoch, ahead_by):
                ahead[replica, epoch] = ahead_by
            case Executed((replica, rank, _), epoch, seq):
                done[replica, epoch][rank] = seq - ahead[replica, epoch]
            case Stored(service, replica, epoch, seq, group, block, digest):
                stored[service, replica, epoch, group, block, digest].append(seq)
            case Began(service, replica, epoch, _, _, kept):
                proven[service, replica, epoch] = {block for block, _ in kept}
            case Imaged(service, replica, _, epoch, _, kept):
                proven[service, replica, epoch] = {block for block, _ in kept}
            case Published(service, replica, epoch, group, block, digest):
                steps = stored.get((service, replica, epoch, group, block, digest), [])
                ranks = done[replica, epoch]
                through = min(ranks.values()) if len(ranks) == RANKS else 0
                was_proven = not steps and block in proven.get((service, replica, epoch), ())
                if not was_proven and not any(seq <= through for seq in steps):
                    yield f"{replica}, block {block}: a key of step {steps} is shown, ranks stand at {dict(ranks)}"


def what_is_shown_is_what_is_published(history: History) -> Iterator[str]:
    """When nothing is in flight a subscriber has every published key; it never has a removed one."""
    yield from (record.what for record in history.of(Misled))


def stamps_version_content(history: History) -> Iterator[str]:
    """No stamp is used twice in an incarnation."""
    given: dict[tuple[Place, int], int] = {}
    for record in history.of(CarriedOut):
        for block, stamp in record.stamped:
            if (record.place, stamp) in given:
                before = given[record.place, stamp]
                yield f"{record.place}: stamp {stamp:x} of block {before} is given again, to block {block}"
            given[record.place, stamp] = block


def the_stamp_table_belongs_to_the_memory(history: History) -> Iterator[str]:
    """A new engine life keeps a key only if every rank's table has its stamp.

    Exceptions: an opening that its engine abandoned and that a service reads late has old stamps if no worker could be
    claimed: from before a launch without an answer, or from before the steps of another life, which a service began
    with the same epoch for the next attempt. No rank carries out orders of such a life, also if ranks obey the other
    one: services and this rule identify a life by the nonce of its opening (tests/store/test_equal_epochs.py).
    """
    obeyed = {(record.place[0], record.epoch, record.life) for record in history.of(CarriedOut)}
    invalid = defaultdict[str, set[int]](set)
    life_of: dict[tuple[str, int], int] = {}
    for _, record in history.records:
        if isinstance(record, Invalidated):
            invalid[record.place[0]].update(record.blocks)
        if isinstance(record, CarriedOut):
            life_of[record.place[0], record.epoch] = record.life
        if not isinstance(record, Began):
            continue
        life = record.replica, record.epoch
        if life_of.get(life, record.life) != record.life:
            continue
        given_up = invalid[record.replica] if (*life, record.life) not in obeyed else set()
        for block, stamp in record.kept:
            says = {table[block] for table in record.shown}
            if not stamp or (says != {stamp} and not (block in given_up and says <= {0, stamp})):
                shown = " ".join(f"{table[block]:x}" for table in record.shown)
                yield f"{record.replica}, epoch {record.epoch}: block {block} is kept under {stamp:x}, not {shown}"


def an_engine_restart_keeps_its_cache(history: History) -> Iterator[str]:
    """A new engine life on the same service and memory keeps every published key that every rank's stamps verify."""
    for record in history.of(Began):
        lost = set(record.due) - set(record.kept)
        if lost:
            yield f"{record.replica}, epoch {record.epoch}: {len(lost)} keys are lost, such as block {min(lost)[0]}"


def a_drain_loses_nothing(history: History) -> Iterator[str]:
    """Keys that a service had stored when it released a replica are available to the service that adopts it."""
    for record in history.of(Began):
        lost = set(record.flushed) - set(record.kept)
        if lost:
            yield f"{record.replica}, epoch {record.epoch}: {len(lost)} keys are lost, such as block {min(lost)[0]}"


def the_epoch_lives_where_the_pages_live(history: History) -> Iterator[str]:
    """The owner epoch of a memory never decreases, and a rank carries out orders of the owner only."""
    owner: dict[Place, int] = {}
    for _, record in history.records:
        match record:
            case Claimed(place, epoch):
                if epoch < owner.get(place, 0):
                    yield f"{place}: epoch {epoch} claims after {owner[place]}"
                owner[place] = epoch
            case CarriedOut(place, epoch):
                if not epoch == record.owner == owner.get(place):
                    yield f"{place}: orders of epoch {epoch} are obeyed, {record.owner} owns the memory"


def orders_run_once(history: History) -> Iterator[str]:
    """Each rank carries out the orders of each part once, in order, and before the launch of their step."""
    position: dict[tuple[Place, int], tuple[int, int]] = {}
    for _, record in history.records:
        match record:
            case CarriedOut(place, epoch, _, seq, part):
                done = position.get((place, epoch))
                if done is not None and (seq, part) not in ((done[0] + 1, 0), (done[0], done[1] + 1)):
                    yield f"{place}, epoch {epoch}: part {part} of step {seq} is carried out after {done}"
                position[place, epoch] = (seq, part)
            case Executed(place, epoch, seq):
                if position.get((place, epoch), (0, 0))[0] < seq:
                    yield f"{place}, epoch {epoch}: step {seq} is launched before its orders"


def a_launch_without_an_answer_ends_its_engine_life(history: History) -> Iterator[str]:
    """After it a rank carries out no orders of this life, and the pages that it may have overwritten have stamp 0."""
    ended = set[tuple[Place, int]]()
    for _, record in history.records:
        match record:
            case Invalidated(place, epoch):
                ended.add((place, epoch))
            case CarriedOut(place, epoch, _, seq, part) if (place, epoch) in ended:
                yield f"{place}, epoch {epoch}: step {seq}, part {part} is obeyed behind a launch without an answer"


def a_lease_that_lapses_takes_nothing(history: History) -> Iterator[str]:
    """An expired lease takes no block from any request."""
    for record in history.of(Lapsed):
        if record.before != record.after:
            yield f"{record.replica}: {record.before} became {record.after}"


def who_gave_up_writes_nothing_more(history: History) -> Iterator[str]:
    """A service starts no write for a replica that it has released or given up."""
    for record in history.of(Wrote):
        if not record.is_owned:
            yield f"service {record.service} writes of {record.replica}"


def ownership_converges(history: History) -> Iterator[str]:
    """If several services claim a replica, soon only one does."""
    for record in history.of(Owned):
        if len(record.services) > 1:
            yield f"{record.replica} is owned by {' and '.join(record.services)}"


def resume(history: History) -> Iterator[str]:
    """A session that resumes keeps its state: blocks held for a transfer stay held."""
    yield from (f"{record.replica}: the pages of held slot {record.slot} have changed" for record in history.of(Lost))


def copies_out_of_a_page_are_bracketed(history: History) -> Iterator[str]:
    """Bytes that a transfer reads under equal stamps are the bytes that were held."""
    yield from (f"{record.replica}: a transfer read something else" for record in history.of(Moved) if not record.right)


def a_repeat_gets_the_same_answer(history: History) -> Iterator[str]:
    """A service applies a step once, and its engine gets that result, however often the step is sent.

    A service that gave the replica up and gets it again is as another service, as in `epochs_never_go_back`.
    """
    applied: dict[tuple[object, ...], set[str]] = defaultdict(set)
    once, entered = set[tuple[object, ...]](), dict[tuple[int, str], int]()
    for _, record in history.records:
        match record:
            case Began(service, replica, _, _, entered_ns):
                entered[service, replica] = entered_ns
            case Applied(service, replica, epoch, seq, part, answer):
                step = service, entered.get((service, replica), 0), replica, epoch, seq, part
                if step in once:
                    yield f"{replica}, epoch {epoch}: part {part} of step {seq} is applied twice"
                once.add(step)
                applied[replica, epoch, seq, part].add(answer)
            case Answered(replica, epoch, seq, part, answer):
                if answer not in applied[replica, epoch, seq, part]:
                    yield f"{replica}, epoch {epoch}: the answer to step {seq} is another one"


def epochs_never_go_back(history: History) -> Iterator[str]:
    """Each engine life of a memory, and of a service while it has the replica, has a higher epoch than the last one.

    A service that gave the replica up and gets it again is as another service: its store may have become older, and
    lives that claimed no memory left no trace. What may be confused then, `one_life_per_epoch` forbids.
    """
    last: dict[tuple[int, str, int], int] = {}
    for _, record in history.records:
        match record:
            case Began(service, replica, epoch, _, entered_ns):
                before = last.get((service, replica, entered_ns), 0)
                if epoch <= before:
                    yield f"{replica}: epoch {epoch} after {before}"
                last[service, replica, entered_ns] = epoch
            case Opened(replica, epoch, owner) if epoch <= owner:
                yield f"{replica}: epoch {epoch} on memory of epoch {owner}"


def one_life_per_epoch(history: History) -> Iterator[str]:
    """Of all engine lives of an epoch, ranks carry out the orders of one only.

    Further lives of the same epoch begin where no worker can be claimed: in another service, or in one whose store
    became older, for an attempt to open that was not answered. No session continues them.
    """
    life_of: dict[tuple[Place, int], int] = {}
    for record in history.of(CarriedOut):
        first = life_of.setdefault((record.place, record.epoch), record.life)
        if first != record.life:
            yield f"{record.place}: lives {first:x} and {record.life:x} of epoch {record.epoch} are obeyed"


def allocation_never_waits_for_the_store(history: History) -> Iterator[str]:
    """A service answers a step immediately, whatever its store does."""
    for record in history.of(Waited):
        if record.seconds:
            yield f"an answer took {record.seconds} s"


def nothing_hung_takes_its_neighbours_along(history: History) -> Iterator[str]:
    """A client that does not depend on a hung part is answered within its deadline."""
    for record in history.of(Asked):
        if not record.is_answered or record.seconds > DEADLINES_S[record.what]:
            ending = "was answered" if record.is_answered else "had no answer"
            yield f"service {record.service}: a {record.what} {ending} after {record.seconds:.2f} s"


# Time is virtual: only waits take time. A start and a registration may call the store several times, with half a
# second for each call.
DEADLINES_S = {"start": 2.5, "registration": 2.0, "unary call": 1.0, "step": 1.0, "new session": 2.0}

RULES: dict[str, Callable[[History], Iterator[str]]] = {
    rule.__name__.replace("_", " "): rule
    for rule in (
        never_a_wrong_hit,
        sound,
        no_block_is_leaked,
        executed,
        what_is_shown_is_what_is_published,
        stamps_version_content,
        the_stamp_table_belongs_to_the_memory,
        an_engine_restart_keeps_its_cache,
        a_drain_loses_nothing,
        the_epoch_lives_where_the_pages_live,
        orders_run_once,
        a_launch_without_an_answer_ends_its_engine_life,
        a_lease_that_lapses_takes_nothing,
        who_gave_up_writes_nothing_more,
        ownership_converges,
        resume,
        copies_out_of_a_page_are_bracketed,
        a_repeat_gets_the_same_answer,
        epochs_never_go_back,
        one_life_per_epoch,
        allocation_never_waits_for_the_store,
        nothing_hung_takes_its_neighbours_along,
        *MIRROR_RULES,
    )
}


def findings(history: History) -> list[str]:
    """Everything that breaks a rule."""
    return [f"{name}: {what}" for name, rule in RULES.items() for what in rule(history)]
