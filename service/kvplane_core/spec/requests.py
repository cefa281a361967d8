"""The state of all requests of one replica, in columns by slot."""

from __future__ import annotations

from kvplane_core.face.contents import Content

# The columns that an image has, each with the entry of a free slot.
COLUMNS: dict[str, bool | int | str] = {
    **dict.fromkeys("live running held skip_reading by_service".split(), False),
    **dict.fromkeys("serial limit num_prompt num_tokens computed in_flight single_group_hit".split(), 0),
    **dict.fromkeys("granted_step adopted_step load_after ends_at".split(), 0),
    **dict.fromkeys("request_id domain".split(), ""),
}


class Requests:
    """One entry per slot in each column; a slot is live from its news row until its request ends."""

    def __init__(self) -> None:
        self.live: list[bool] = []
        self.running: list[bool] = []
        self.held: list[bool] = []
        self.serial: list[int] = []  # counts the uses of the slot, see `in_flight.Stay`
        self.request_id: list[str] = []
        self.domain: list[str] = []
        self.skip_reading: list[bool] = []
        self.by_service: list[bool] = []  # the service hashes the request's tokens
        self.limit: list[int] = []  # most tokens that the request may have
        self.num_prompt: list[int] = []
        self.num_tokens: list[int] = []
        self.computed: list[int] = []
        self.in_flight: list[int] = []
        self.single_group_hit: list[int] = []
        self.granted_step: list[int] = []  # last step that granted tokens
        self.adopted_step: list[int] = []  # last of the steps whose tentative keys its hit had
        self.load_after: list[int] = []  # the load of its external tokens must not start before this step is executed
        self.content: list[Content] = []
        self.ends_at: list[int] = []  # position where the last launch ends, drafts included; see `launch_end`
        self.asked: dict[int, tuple[int, int]] = {}  # by slot: last step with drafts, and where its row ended
        self.unserved: dict[int, int] = {}  # by slot: consecutive rows that had room for less than a state block
        self.hit_end: dict[int, int] = {}  # by slot: tokens of the hit of a running request; not with LRU
        self.hints: dict[int, int] = {}  # by slot: what the engine says of later requests; only with HAZARD
        self.num_running = 0
        self.loading: set[int] = set()  # slots whose pages a transfer still writes, running or preempted since
        self.not_zeroed: set[int] = set()  # running slots without a grant since their load began; it may fail

    def is_live(self, slot: int) -> bool:
        """Whether the slot has a request, running or not."""
        return 0 <= slot < len(self.live) and self.live[slot]

    def grow(self, slot: int) -> None:
        """Extend the columns so that they have an entry for this slot."""
        missing = slot + 1 - len(self.live)
        if missing <= 0:
            return
        for name, entry in COLUMNS.items():
            getattr(self, name).extend([entry] * missing)
        self.content.extend(Content([]) for _ in range(missing))

    def add(self, slot: int, num_tokens: int, limit: int, content: Content) -> None:
        """Put a request of `num_tokens` tokens, which may grow to `limit` tokens, into a free slot."""
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
        self.single_group_hit[slot] = self.load_after[slot] = self.ends_at[slot] = 0
        self.stop(slot)

    def launch_end(self, slot: int) -> int:
        """Return the position, in tokens, where the request's last launch ends."""
        return max(self.ends_at[slot], self.computed[slot])

    def shortest_state(self, slot: int, appended: int) -> int:
        """Return below how many tokens the request has no recurrent state, if a row of facts appends this many tokens.

        The last launch left its last state and one behind each draft, and a load or a hit leaves the last one. Drafts
        are no known tokens: a state that is shorter than these, or than those of the row but for the last one, which
        is sampled and not computed, was never written or is overwritten.
        """
        return min(self.computed[slot], self.num_tokens[slot] + max(0, appended - 1))

    def start(self, slot: int) -> None:
        """Mark the request as running, after its admission."""
        assert not self.running[slot]
        self.running[slot] = True
        self.num_running += 1

    def stop(self, slot: int) -> None:
        """Mark the request as not running and without blocks, because it is new, preempted or held for a transfer."""
        if self.running[slot]:
            self.running[slot] = False
            self.num_running -= 1
        self.computed[slot] = self.in_flight[slot] = self.granted_step[slot] = self.adopted_step[slot] = 0
        self.not_zeroed.discard(slot)
        self.unserved.pop(slot, None)
        self.hit_end.pop(slot, None)

    def end(self, slot: int) -> None:
        """End the request and free its slot."""
        self.stop(slot)
        self.live[slot] = self.held[slot] = False
        self.loading.discard(slot)
        self.content[slot] = Content([])
        self.asked.pop(slot, None)
        self.hints.pop(slot, None)

    def hashes(self, slot: int) -> list[bytes]:
        """Return the hashes of the request's full hash blocks."""
        return self.content[slot].digests

    def slot_named(self, name: str) -> int | None:
        """Return the live slot of the first request with this name; None if no request has it."""
        return next((slot for slot in self.slots() if self.request_id[slot] == name), None)

    def slots(self) -> list[int]:
        """Return the live slots, ascending."""
        return [slot for slot, live in enumerate(self.live) if live]
