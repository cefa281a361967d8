"""The requests of one replica, in columns by slot."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.hashing import RequestHasher

MAX_SLOTS = 1 << 14
QUIET_NEVER = 0


@dataclass(slots=True)
class Content:
    """What a request is made of, as far as the core must know.

    Attributes:
        digests: block hash of each full hash block, chained.
        hasher: makes them from tokens, when the service hashes; None when the engine sends hashes.
    """

    digests: list[bytes]
    hasher: RequestHasher | None = None


class Requests:
    """One entry per slot and column; a slot is live from its news row until it ends.

    `quiet_until` bounds the quiet zone of a running request: as long as its slots end there or before, no manager has
    anything to do, and a step only adds numbers. It is the lowest of three bounds: up to `blocks_until` slots no block
    starts, below `window_until` processed tokens (fewer than slots) none leaves a window, and below `keys_from` known
    tokens none becomes registrable.
    """

    def __init__(self) -> None:
        self.live: list[bool] = []
        self.running: list[bool] = []
        self.held: list[bool] = []
        self.serial: list[int] = []  # counts lives of the slot
        self.request_id: list[str] = []
        self.domain: list[str] = []
        self.skip_reading: list[bool] = []
        self.by_service: list[bool] = []  # the service hashes its tokens
        self.limit: list[int] = []  # most tokens it may reach
        self.num_prompt: list[int] = []
        self.num_tokens: list[int] = []
        self.computed: list[int] = []
        self.in_flight: list[int] = []
        self.single_group_hit: list[int] = []
        self.granted_step: list[int] = []  # last step that granted tokens
        self.load_after: list[int] = []  # step before which the load of its external tokens must not start
        self.content: list[Content] = []
        self.ends_at: list[int] = []  # tokens whose state the last launch leaves, drafts included; see `launch_end`
        self.quiet_until: list[int] = []
        self.blocks_until: list[int] = []
        self.window_until: list[int] = []
        self.keys_from: list[int] = []
        self.asked: dict[int, tuple[int, int]] = {}  # by slot: last step whose row had drafts, tokens it would reach
        self.unserved: dict[int, int] = {}  # by slot: rows in sequence that had room, but for less than a state block
        self.num_running = 0
        self.loading: set[int] = set()  # slots whose pages a transfer still fills, running or preempted meanwhile
        self.not_zeroed: set[int] = set()  # running slots with a load, over or not, and no grant since: it may fail yet

    def is_live(self, slot: int) -> bool:
        """Whether the slot names a request, running or not."""
        return 0 <= slot < len(self.live) and self.live[slot]

    def grow(self, slot: int) -> None:
        """Make room for the slot."""
        missing = slot + 1 - len(self.live)
        if missing <= 0:
            return
        for flags in (self.live, self.running, self.held, self.skip_reading, self.by_service):
            flags.extend([False] * missing)
        for numbers in self._numbers():
            numbers.extend([0] * missing)
        for texts in (self.request_id, self.domain):
            texts.extend([""] * missing)
        self.content.extend(Content([]) for _ in range(missing))

    def _numbers(self) -> tuple[list[int], ...]:
        return (
            self.serial,
            self.limit,
            self.num_prompt,
            self.num_tokens,
            self.computed,
            self.in_flight,
            self.single_group_hit,
            self.granted_step,
            self.load_after,
            self.ends_at,
            self.quiet_until,
            self.blocks_until,
            self.window_until,
            self.keys_from,
        )

    def add(self, slot: int, num_tokens: int, limit: int, content: Content) -> None:
        """Begin a life of the slot."""
        self.grow(slot)
        assert not self.live[slot], f"slot {slot} is taken"
        self.live[slot] = True
        self.running[slot] = self.held[slot] = self.skip_reading[slot] = False
        self.serial[slot] += 1
        self.request_id[slot] = self.domain[slot] = ""
        self.limit[slot] = limit
        self.num_prompt[slot] = self.num_tokens[slot] = num_tokens
        self.content[slot] = content
        self.by_service[slot] = content.hasher is not None
        self.single_group_hit[slot] = self.load_after[slot] = 0
        self.stop(slot)

    def launch_end(self, slot: int) -> int:
        """Tokens whose state the last launch leaves; `ends_at` is not kept up in the quiet zone, where none go back."""
        return max(self.ends_at[slot], self.computed[slot])

    def start(self, slot: int) -> None:
        """The request was admitted."""
        assert not self.running[slot]
        self.running[slot] = True
        self.num_running += 1

    def stop(self, slot: int) -> None:
        """The request lost its blocks, or never had any."""
        if self.running[slot]:
            self.running[slot] = False
            self.num_running -= 1
        self.computed[slot] = self.in_flight[slot] = self.granted_step[slot] = 0
        self.not_zeroed.discard(slot)
        self.unserved.pop(slot, None)
        self.wake(slot)

    def wake(self, slot: int) -> None:
        """Forget the quiet zone: the next row asks every manager."""
        self.quiet_until[slot] = self.blocks_until[slot] = self.keys_from[slot] = QUIET_NEVER
        self.window_until[slot] = QUIET_NEVER

    def wake_keys(self, slot: int) -> None:
        """Something may have become registrable; tables and windows are as they were."""
        self.quiet_until[slot] = self.keys_from[slot] = QUIET_NEVER

    def wake_all(self) -> None:
        """Forget every quiet zone."""
        for slot in self.slots():
            self.wake(slot)

    def end(self, slot: int) -> None:
        """End the life of the slot."""
        self.stop(slot)
        self.live[slot] = self.held[slot] = False
        self.loading.discard(slot)
        self.content[slot] = Content([])
        self.asked.pop(slot, None)

    def slots(self) -> list[int]:
        """Live slots, ascending."""
        return [slot for slot, live in enumerate(self.live) if live]
