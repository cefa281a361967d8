"""The frames of a ZeroMQ publisher of vLLM's form, and of its replay socket.

live       topic | sequence number, u64 big-endian | payload
replay     empty | topic | sequence number | payload       vLLM; SGLang leaves out the topic
its end    empty | empty | -1 | empty
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane_fleet.faults import Fault, Faults

SEQUENCE_BYTES = 8
END = b"\xff" * SEQUENCE_BYTES  # -1
MAX_SEQUENCE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Frame:
    """One published batch."""

    sequence: int
    payload: bytes


def parse_live(parts: Sequence[bytes], faults: Faults) -> Frame | None:
    """Return the frame of a message from the publisher; None, and a fault is counted, if it is none."""
    if len(parts) != 3:
        faults.count(Fault.FRAME_COUNT)
        return None
    return _frame(parts[1], parts[2], faults)


def is_replay_end(parts: Sequence[bytes]) -> bool:
    """Whether a message from the replay socket ends the replay."""
    return len(parts) in (3, 4) and parts[-2] == END and not parts[-1]


def parse_replay(parts: Sequence[bytes], topic: bytes, faults: Faults) -> Frame | None:
    """Return the frame of a message from the replay socket; None, and a fault is counted, if it is none."""
    if len(parts) not in (3, 4) or parts[0]:
        faults.count(Fault.FRAME_COUNT)
        return None
    if len(parts) == 4 and not parts[1].startswith(topic):
        faults.count(Fault.TOPIC_FOREIGN)
        return None
    return _frame(parts[-2], parts[-1], faults)


def replay_request(start: int) -> list[bytes]:
    """Return the message that asks a replay socket for all frames from `start` on."""
    return [b"", start.to_bytes(SEQUENCE_BYTES, "big")]


def _frame(sequence: bytes, payload: bytes, faults: Faults) -> Frame | None:
    if len(sequence) != SEQUENCE_BYTES:
        faults.count(Fault.SEQUENCE_BYTES)
        return None
    number = int.from_bytes(sequence, "big")
    if number > MAX_SEQUENCE:
        faults.count(Fault.SEQUENCE_RANGE)
        return None
    return Frame(number, payload)
