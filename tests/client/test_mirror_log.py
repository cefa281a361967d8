"""The log of a mirrored engine: what is sent, repeated, dropped, and when an image is needed."""

from __future__ import annotations

from kvplane.base.session import Progress
from kvplane.base.step import Step, StepResult
from kvplane.session.mirror_log import PIECE_BYTES, Iteration, MirrorLog, Piece


class Log(MirrorLog):
    """A log whose steps are numbers, with an image of the state after step 0."""

    def __init__(self, most=100):
        super().__init__(most)
        self.begin_image(0, iter([b"state"]))

    def step(self, *numbers):
        self.add(Iteration(tuple((Step(1, number, []), StepResult(number, 0, [])) for number in numbers), numbers[0]))

    def sent(self):
        """Everything that can be sent now: step numbers, or the data of a piece."""
        found = []
        while (message := self.next_message()) is not None:
            found.append(message.data if isinstance(message, Piece) else [step.seq for step, _ in message.steps])
        return found


def following(most=100, window=9):
    log = Log(most)
    log.opened(0, True, window)
    assert log.sent() == [b"state"]
    log.answered(Progress(0))
    return log


def test_steps_follow_the_image_and_stay_until_they_are_applied():
    log = following()
    log.step(1)
    log.step(2, 3)
    assert log.sent() == [[1], [2, 3]]
    assert len(log) == 2
    log.answered(Progress(1))
    assert (len(log), log.applied_through, log.newest) == (1, 1, 3)


def test_the_window_limits_messages_without_an_answer():
    log = following(window=2)
    for number in range(1, 5):
        log.step(number)
    assert log.sent() == [[1], [2]]
    log.answered(Progress(1))
    assert log.sent() == [[3]]


def test_a_new_stream_repeats_what_the_service_has_not_applied():
    log = following()
    for number in range(1, 5):
        log.step(number)
    log.sent()
    log.opened(2, False, 9)
    assert log.sent() == [[3], [4]]
    assert not log.image_wanted


def test_a_service_without_the_state_needs_an_image():
    log = following()
    log.step(1)
    log.opened(0, True, 9)
    assert log.image_wanted
    assert log.sent() == []
    log.step(2)
    log.begin_image(2, iter([b"after 2"]))
    log.step(3)
    assert log.sent() == [b"after 2", [3]]
    assert log.num_images == 2


def test_an_image_is_sent_again_on_a_new_stream():
    log = Log()
    log.opened(0, True, 9)
    log.step(1)
    assert log.sent() == [b"state", [1]]
    log.opened(0, True, 9)
    assert log.sent() == [b"state", [1]]


def test_a_long_image_is_cut_into_pieces():
    log = MirrorLog(9)
    log.begin_image(0, iter([b"a" * PIECE_BYTES, b"b" * 10]))
    log.opened(0, True, 9)
    first, second = log.next_message(), log.next_message()
    assert (first, second) == (Piece(b"a" * PIECE_BYTES, True, False), Piece(b"b" * 10, False, True))
    assert log.next_message() is None


def test_a_full_log_is_emptied_and_the_service_gets_an_image():
    log = following(most=3)
    log.sent()
    for number in range(1, 4):
        log.step(number)
    assert not log.image_wanted
    log.step(4)
    assert log.image_wanted
    assert len(log) == 0


def test_late_answers_to_messages_before_an_image_want_no_other_image():
    log = following()
    for number in range(1, 4):
        log.step(number)
    assert len(log.sent()) == 3
    log.answered(Progress(0, True, "DIVERGED"))
    log.begin_image(3, iter([b"after 3"]))
    assert log.sent() == [b"after 3"]
    for _ in range(2):
        log.answered(Progress(0, True, "DIVERGED"))
    assert not log.image_wanted
    log.answered(Progress(3))
    assert log.applied_through == 3
    log.step(4)
    log.sent()
    log.answered(Progress(3, True, "DIVERGED"))
    assert log.image_wanted


def test_a_gap_between_service_and_log_needs_an_image():
    log = following()
    for number in range(1, 4):
        log.step(number)
    log.sent()
    log.answered(Progress(2))
    log.opened(1, False, 9)
    assert log.image_wanted
