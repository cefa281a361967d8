"""What both cores do alike, by the other methods of a `ReplicaCore`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvplane.base.groups import CommitRule
from kvplane.base.hashing import HashScheme, PackedHashes
from kvplane.base.step import CacheEvent, EventKind, News, Part
from kvplane_core.face.contents import hash_alone
from kvplane_core.face.entries import MAX_HASHES, Entries, KeyRun
from kvplane_core.face.interface import INSIDE, ReplicaCore
from kvplane_core.face.recovery import RecoveryOutcome


class CommonCore:
    """The methods that both cores have from here."""

    # -- engine lives ------------------------------------------------------------------------------------------------

    def begin_epoch(
        self: ReplicaCore,
        epoch: int,
        stamp_table: Sequence[int] = (),
        busy: Iterable[int] = (),
        memory_is_new: bool = False,
    ) -> int:
        """Begin a new engine life: free all requests, and keep keys whose content is still in memory.

        Blocks that a load of the ended life may still write are held until a step names them in `Cache.loads_over`.

        Args:
            epoch: number of the new life, above the current one.
            stamp_table: stamps of the page memory, one per block, then the versions of the slots of tiers. A key is
                kept if the stamp of its block is that of the pool, and the step that registered the key was executed.
                Empty: no key is kept.
            busy: further blocks that a load of an earlier life may still write, as movers and the engine report.
            memory_is_new: the pages were allocated again, so no load of an earlier life writes to them.

        Returns:
            Number of keys kept. `take_events` returns the REMOVED events of all other keys.
        """
        for _ in self.end_epoch(stamp_table):
            pass
        return self.enter_epoch(epoch, stamp_table, busy, memory_is_new)

    def recover(
        self: ReplicaCore,
        epoch: int,
        tables: Sequence[Sequence[int]],
        stored: Iterable[Entries],
        busy: Iterable[int] = (),
    ) -> RecoveryOutcome:
        """Begin the first engine life of this object, on page memory that an earlier core managed.

        Args:
            epoch: a number above every epoch in which stamps were issued for this memory.
            tables: for each rank, the stamps in its memory, one per block.
            stored: what a store has of the results of `entries`, in any order.
            busy: as in `begin_epoch`.
        """
        outcome = self.install_recovered(self.verify_entries(tables, stored))
        self.enter_epoch(epoch, tables[0] if len(tables) == 1 else (), busy)
        return outcome

    # -- keys --------------------------------------------------------------------------------------------------------

    def cached_columns(self: ReplicaCore, digests: Sequence[bytes], domain: str) -> list[bytes]:
        """Return, by group, a byte for each hash block: 1 where `lookup` would find its key. Changes nothing."""
        horizon = self.executed_through if self.spec.commit is CommitRule.SAFE else INSIDE
        find, groups = self.first_blocks, range(len(self.spec.groups))
        return [bytes(find(domain, [one], digest, horizon) is not None for digest in digests) for one in groups]

    def digests_of(self: ReplicaCore, content: News) -> PackedHashes:
        """Return the block hashes of a `News` with one row, computed from its tokens, or its hashes. Raises
        InvalidArgument.
        """
        self.check_alone(Part(news=content))
        return hash_alone(HashScheme.of(self.spec), content)

    def entries(self: ReplicaCore, blocks: Iterable[int] | None = None) -> Entries:
        """Return the published keys (those that other clients may see) of these blocks, and of these slots of tiers,
        whose ids are above the pool's; by default of all: first the free blocks in eviction order, then the others,
        then the slots. Rows are sorted by domain (name space of keys) and group, then in the order of `blocks`.
        """
        if blocks is None:
            free = self.free_order()
            held = sorted(set(range(1, self.spec.num_blocks)).difference(free))
            blocks = [*free, *held, *range(self.spec.num_blocks, self.spec.num_stamps)]
        blocks, bare, rows = list(blocks), list[tuple[int, int]](), dict[Any, list[tuple[int, int, int, bytes]]]()
        name, horizon = self.pair_names(), self.executed_through
        for block, (stamp, step, keys, _) in zip(blocks, self.key_rows(blocks), strict=True):
            if not keys or step > horizon:
                bare.append((block, stamp))
                continue
            for number, ((pair, digest), num_tokens) in enumerate(keys):
                rows.setdefault(pair, []).append((block, stamp, 0 if number else num_tokens, digest))
        flat = [row for run in rows.values() for row in run]
        return Entries(
            self.digest_size,
            runs=[KeyRun(*name(pair), len(run)) for pair, run in rows.items()],
            block=[block for block, _, _, _ in flat],
            stamp=[stamp for _, stamp, _, _ in flat],
            num_tokens=[num_tokens for _, _, num_tokens, _ in flat],
            age=[0] * len(flat),
            digests=b"".join([digest for _, _, _, digest in flat]),
            unkeyed_block=[block for block, _ in bare],
            unkeyed_stamp=[stamp for _, stamp in bare],
        )

    def stored_events(self: ReplicaCore) -> Iterator[tuple[int, CacheEvent]]:
        """Yield STORED events of all keys, each with the step in flight that registered the keys; 0: they are
        published. The events of second and further keys of a block have no `block_starts`. Changes nothing.
        """
        name, horizon = self.pair_names(), self.executed_through
        for start in range(1, self.spec.num_blocks, MAX_HASHES):
            rows: dict[tuple[bool, int, Any], list[tuple[bytes, int, int]]] = {}
            blocks = range(start, min(start + MAX_HASHES, self.spec.num_blocks))
            for block, (_, step, keys, _) in zip(blocks, self.key_rows(blocks), strict=True):
                for number, ((pair, digest), num_tokens) in enumerate(keys):
                    kind = (number > 0, step if step > horizon else 0, pair)
                    rows.setdefault(kind, []).append((digest, block, num_tokens))
            for (is_further, step, pair), found in rows.items():
                domain, group = name(pair)
                size = self.spec.groups[group].block_size
                for at in range(0, len(found), MAX_HASHES):
                    hashes, of_blocks, tokens = zip(*found[at : at + MAX_HASHES], strict=True)
                    starts = () if is_further else tuple((count - 1) // size * size for count in tokens)
                    form = EventKind.STORED, group, hashes, of_blocks, domain
                    yield step, CacheEvent(*form, block_size=size, block_starts=starts)
