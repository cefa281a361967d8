"""A place: one engine's cache, as its events describe it, in cells of the index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvplane.base.errors import InvalidArgument
from kvplane.base.events import GroupDigest
from kvplane.base.groups import CommitRule, GroupKind, GroupSpec, MambaMode, ReplicaSpec, TierKind
from kvplane_core.face.setup import check_spec
from kvplane_fleet.domains import Domain, DomainProof
from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.hits import Asked, HitRule
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex
from kvplane_fleet.returns import Returns
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.slices import SLICE, Sliced
from kvplane_fleet.wire.events import (
    KEY_BYTES,
    WHOLE_KEY_BYTES,
    Batch,
    Cleared,
    Event,
    GroupFormat,
    Removed,
    Stored,
    Tier,
)
from kvplane_fleet.wire.msgpack import BatchDecoder

Watcher = Callable[[str, Event], None]  # takes the place's name and what was applied
MAX_KEYS = 1 << 20  # of a place; a prompt beyond it is not expected
MAX_ENTRIES = 1 << 22  # of a place: at 60 bytes each, 250 MB
_WINDOWS = (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
_MAX_MODEL_LEN = 1 << 20
_UNCACHED = frozenset(("encoder_only_attention", "cross_attention"))


class Expected:
    """The expected entries of one place."""

    def __init__(self, index: Index | NativeIndex) -> None:
        self._index = index
        self._cells: dict[int, int] = {}
        self._prompts: dict[str, Mapping[int, Sequence[int]]] = {}
        self._num_keys = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def cells(self, groups: Sequence[int]) -> list[int]:
        """Return the cells of groups."""
        return [self._cell(group) for group in groups]

    def add(self, name: str, keys: Mapping[int, Sequence[int]]) -> None:
        """Expect the keys of a prompt, by group, unless they are too many or its name is known."""
        number = sum(map(len, keys.values()))
        if name in self._prompts or self._num_keys + number > MAX_KEYS:
            return
        self._prompts[name] = keys
        self._num_keys += number
        for group, each in keys.items():
            self._index.add(self._cell(group), each)

    def forget(self, name: str) -> None:
        """Expect a prompt no longer."""
        for group, each in self._prompts.pop(name, {}).items():
            self._num_keys -= len(each)
            self._index.remove(self._cells[group], each)

    def release(self) -> None:
        """Forget all prompts, and give the cells back to the index."""
        for cell in self._cells.values():
            self._index.release(cell)
        self._cells, self._prompts, self._num_keys = {}, {}, 0

    def _cell(self, group: int) -> int:
        if group not in self._cells:
            self._cells[group] = self._index.new_cell()
        return self._cells[group]


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of a place as the hit rule needs them.

    Attributes:
        groups: the engine's number of each group of the rule.
        rule: computes hits.
        inexact: why claims may differ from the engine's hits; "" if they do not.
    """

    groups: tuple[int, ...]
    rule: HitRule
    inexact: str


class Place:
    """Applies the batches of one engine to the index, and claims hits."""

    def __init__(self, settings: PlaceSettings, index: Index | NativeIndex) -> None:
        self.settings = settings
        self.faults = Faults()
        self._index = index
        self._decoder = BatchDecoder(self.faults)
        self.cells: dict[tuple[Tier, int], int] = {}
        self.formats: dict[int, GroupFormat] = {}
        self.proof = self._new_proof()
        self.batches = self.events = self.stores = self.removals = self.comparisons = 0
        self.watchers: list[Watcher] = []
        self.expected = Expected(index)
        self.returns = Returns()
        self.withdrawn = False  # the engine's cache must not be used for now
        self.reads_peers = False  # it may load what no event of it states
        self.namespace = b""  # equal for places that may read each other's host memory; empty if none is known
        self._most_blocks = 0
        self._rank: int | None = None
        self.key_bytes = 0  # of each key; 0 until one was seen
        self._time_s = -math.inf
        self._layout: Layout | InvalidArgument | None = None

    # -- ingest ------------------------------------------------------------------------------------------------------

    def applying(self, payload: bytes) -> Sliced[None]:
        """Apply the next batch. If it cannot be read, any entry may have been removed, and all are."""
        self._decoder.want_tokens, self._decoder.want_extra = self.proof.wants_tokens, self.proof.wants_extra
        batch = yield from self._decoder.decoding(payload)
        if batch is None:
            self._remove_all()
        else:
            yield from self.applying_batch(batch)

    def applying_batch(self, batch: Batch) -> Sliced[None]:
        """Apply a batch that is decoded."""
        self.batches += 1
        self.events += len(batch.events)
        if batch.time_s < self._time_s:
            self.faults.count(Fault.CLOCK_BACKWARDS)
        self._time_s = batch.time_s
        if batch.rank is not None:
            if self._rank not in (None, batch.rank):
                self.faults.count(Fault.RANK_CHANGED)
            self._rank = batch.rank
        for number, event in enumerate(batch.events, 1):
            if number % SLICE == 0:
                yield
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                assert isinstance(event, Cleared)
                self._remove_all()

    def clear(self, life_ended: bool) -> None:
        """Forget all entries; if `life_ended`, also what is known of the engine."""
        self._remove_all()
        if life_ended:
            for cell in self.cells.values():
                self._index.release(cell)
            self.expected.release()
            self._most_blocks = 0
            self.cells, self.formats, self._layout, self.namespace = {}, {}, None, b""
            self.proof = self._new_proof()
            self._rank, self._time_s, self.key_bytes = None, -math.inf, 0

    def _new_proof(self) -> DomainProof:
        return DomainProof(self.settings.hash_algorithms, self.settings.hash_seed, self.settings.adapters)

    def _check_keys(self, event: Stored | Removed) -> None:
        """Clear the place if its keys have changed: a removal would not find an entry under its other key."""
        if event.keys and event.key_bytes != self.key_bytes:
            if self.key_bytes:
                self.faults.count(Fault.HASH_CHANGED)
                self.clear(life_ended=True)
            self.key_bytes = event.key_bytes

    def _store(self, event: Stored) -> None:
        self._check_keys(event)
        if event.tier is Tier.DEVICE:
            self._learn(event)
        cell = self.cells.get((event.tier, event.group))
        if cell is None:
            cell = self.cells[event.tier, event.group] = self._index.new_cell()
        if self.entries + len(event.keys) > MAX_ENTRIES:
            self.faults.count(Fault.TOO_MANY_ENTRIES)
            return
        self.stores += 1
        self._index.add(cell, event.keys)
        self._notify(event)

    def _learn(self, event: Stored) -> None:
        known = self.formats.get(event.group)
        if known != event.form:
            if known is not None:
                self.faults.count(Fault.GROUP_CHANGED)
                self.clear(life_ended=True)
                self._check_keys(event)
            self.formats[event.group] = event.form
            self._layout = None
        if event.evidence is not None:
            fits = self.proof.observe(event.keys, event.form.block_size, event.evidence)
            self.faults.count(Fault.ADAPTER_DIFFERS, not fits)
            self._layout = None

    def _remove(self, event: Removed) -> None:
        self._check_keys(event)
        if event.tier is Tier.DEVICE:
            self._most_blocks = max(self._most_blocks, self.device_entries)
        cell = self.cells.get((event.tier, event.group))
        unknown = len(event.keys) if cell is None else self._index.remove(cell, event.keys)
        self.faults.count(Fault.REMOVAL_UNKNOWN, unknown)
        self.removals += 1
        self.returns.removed(event.keys)
        self._notify(event)

    def _notify(self, event: Event) -> None:
        for watcher in self.watchers:
            watcher(self.settings.name, event)

    def _remove_all(self) -> None:
        self.removals += 1
        self._notify(Cleared())
        for cell in self.cells.values():
            self._index.clear(cell)

    def release(self) -> None:
        """Remove the place from the index."""
        self.clear(life_ended=True)

    def use(self, spec: ReplicaSpec, namespace: bytes = b"") -> None:
        """Take the groups and the hashes from a replica's spec, instead of from its events."""
        self.proof.domain = Domain(
            spec.hash_algorithm, spec.hash_seed, spec.hash_block_size, spec.hash_lookahead_tokens, WHOLE_KEY_BYTES
        )
        self.formats = {
            number: GroupFormat(group.kind.value, group.block_size, group.window)
            for number, group in enumerate(spec.groups)
        }
        for named in product((Tier.DEVICE, Tier.HOST) if namespace else (Tier.DEVICE,), self.formats):
            if named not in self.cells:
                self.cells[named] = self._index.new_cell()
        self._layout = Layout(tuple(self.formats), HitRule(spec), "")
        self._most_blocks = spec.num_blocks
        self.reads_peers = any(tier.kind is TierKind.PEERS for tier in spec.tiers)
        self.namespace = namespace
        self.withdrawn = False

    def agrees(self, digests: Sequence[GroupDigest]) -> bool:
        """Compare the entries with digests of the engine's. A difference is a fault: events were missed or misread."""
        self.comparisons += 1
        cells = {one.group: self.cells.get((Tier.DEVICE, one.group)) for one in digests}
        own = {group: (0, 0) if cell is None else self._index.digest(cell) for group, cell in cells.items()}
        is_equal = own == {one.group: (one.keys, one.sum) for one in digests}
        self.faults.count(Fault.ENTRIES_DIFFER, not is_equal)
        return is_equal

    def packed_content(self, first: int, end: int) -> dict[tuple[Tier, int], bytes]:
        """Return the keys in parts of the index, by tier and group, each of `key_bytes` as often as it has copies."""
        width = self.key_bytes or KEY_BYTES
        return {named: self._index.packed_keys(cell, width, first, end) for named, cell in self.cells.items()}

    # -- claims ------------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Number of different keys, summed over groups and tiers."""
        return sum(self._index.size(cell) for cell in self.cells.values())

    @property
    def device_entries(self) -> int:
        """Number of different keys on the device, summed over groups."""
        return sum(self._index.size(cell) for (tier, _), cell in self.cells.items() if tier is Tier.DEVICE)

    @property
    def domain(self) -> Domain | None:
        """How the engine hashes blocks of its model; None until it is proven."""
        return self.proof.domain

    def serves(self, model: str) -> bool:
        """Return whether a name is that of its model, another name of it, or an adapter."""
        return model == self.settings.model or model in self.settings.aliases or model in self.settings.adapters

    def domain_of(self, model: str) -> Domain:
        """Return how the engine hashes blocks of a model that it serves. Raises the errors of `layout`, and
        InvalidArgument for an adapter that was loaded from elsewhere.
        """
        self.layout()
        assert self.proof.domain is not None, "a layout has a domain"
        path = self.settings.adapters.get(model)
        if path is None:
            return self.proof.domain
        if model in self.proof.differing:
            raise InvalidArgument(
                f"the engine does not hash the blocks of adapter {model!r} with path {path!r}",
                field="adapters",
                remedy="name the path from which it was loaded",
            )
        return replace(self.proof.domain, lora=(model, path))

    def layout(self) -> Layout:
        """Return the groups as the hit rule needs them. Raises InvalidArgument if they contradict each other."""
        if self._layout is None:
            try:
                self._layout = self._make_layout()
            except InvalidArgument as error:
                self._layout = error
        if isinstance(self._layout, InvalidArgument):
            raise self._layout.with_traceback(None)  # with each prompt: frames would be added to it without end
        return self._layout

    def has(self, tier: Tier) -> bool:
        """Return whether a tier has an entry."""
        return any(self._index.size(cell) for (each, _), cell in self.cells.items() if each is tier)

    def asked(self, with_expected: bool = False, tiers: Sequence[Tier] = (), shared: Sequence[int] = ()) -> Asked:
        """Return what a look-up needs. Raises the errors of `layout`.

        Args:
            with_expected: count what prompts that are sent to the place will leave there.
            tiers: count what is in these, as if it were on the device.
            shared: count what is in these cells, one or more for each group; one object for all places that share them.
        """
        layout = self.layout()
        cells = [self.cells[Tier.DEVICE, number] for number in layout.groups]
        others = list(self.expected.cells(layout.groups)) if with_expected else []
        for tier in tiers:
            others += [self.cells.get((tier, number), cell) for number, cell in zip(layout.groups, cells, strict=True)]
        return Asked(layout.rule, cells, others, shared)

    @property
    def lent(self) -> Asked:
        """What a look-up in its host memory alone needs, if it has a namespace. Raises the errors of `layout`."""
        layout = self.layout()
        return Asked(layout.rule, [self.cells[Tier.HOST, number] for number in layout.groups])

    def expect(self, name: str, keys: Sequence[int], num_tokens: int, single_group: int = 0) -> None:
        """Expect the entries that a prompt will leave, until `expected.forget(name)`: where it ends, and where the hit
        of a single group ended. Raises the errors of `layout`.
        """
        layout = self.layout()
        kept = zip(layout.groups, layout.rule.kept(num_tokens, single_group), strict=True)
        self.expected.add(name, {group: [keys[at] for at in units if at < len(keys)] for group, units in kept})

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return how many entries a prompt of this length leaves. Raises the errors of `layout`."""
        return sum(map(len, self.layout().rule.kept(num_tokens)))

    @property
    def capacity(self) -> int:
        """Blocks of the engine; where it is not stated, the most entries that it had when it removed one."""
        return self.settings.num_blocks or self._most_blocks

    def _make_layout(self) -> Layout:
        numbers = tuple(sorted(group for group, form in self.formats.items() if form.kind not in _UNCACHED))
        forms = [self.formats[group] for group in numbers]
        domain = self.proof.domain
        if not forms or domain is None:
            raise InvalidArgument("how the engine hashes blocks is not known yet", field="domain")
        inexact = "" if all(form.kind for form in forms) else "the engine does not state its kinds of attention"
        if any(_kind(form) is GroupKind.CHUNKED_LOCAL for form in forms) and self.settings.attention_chunk is None:
            raise InvalidArgument(
                "the chunk of chunked local attention is not known",
                field="attention_chunk",
                remedy="name it for this place: no event states it",
            )
        groups = [self._group(number, form, forms) for number, form in zip(numbers, forms, strict=True)]
        spec = ReplicaSpec(
            groups=tuple(groups),
            num_blocks=1 << 20,
            max_model_len=_MAX_MODEL_LEN,
            hash_block_size=domain.block_size,
            scheduler_block_size=math.lcm(*(group.block_size for group in groups)),
            max_in_flight_tokens=1,
            partial_hits=self._partial_hits(groups, domain.block_size),
            commit=CommitRule.REFERENCE,
            hash_lookahead_tokens=domain.lookahead,
        )
        check_spec(spec)
        return Layout(numbers, HitRule(spec), inexact)

    def _group(self, number: int, form: GroupFormat, forms: Sequence[GroupFormat]) -> GroupSpec:
        kind = _kind(form)
        return GroupSpec(
            kind=kind,
            block_size=form.block_size,
            window=form.window if kind in _WINDOWS else 0,
            chunk=self.settings.attention_chunk or 0 if kind is GroupKind.CHUNKED_LOCAL else 0,
            mamba_mode=MambaMode.ALIGN if kind is GroupKind.MAMBA else MambaMode.NONE,
            sink_tokens=form.block_size if kind is GroupKind.SINK_FULL else 0,
            drops_last_block=number in self.settings.draft_groups,
            lookup_class=forms.index(form),
        )

    def _partial_hits(self, groups: Sequence[GroupSpec], hash_block_size: int) -> bool:
        if self.settings.partial_hits is not None:
            return self.settings.partial_hits
        fine = (GroupKind.FULL_ATTENTION, GroupKind.MLA, GroupKind.SINK_FULL, GroupKind.MAMBA)
        states = any(one.kind is GroupKind.MAMBA and one.block_size > hash_block_size for one in groups)
        return states and all(one.kind in fine or one.block_size == hash_block_size for one in groups)


def _kind(form: GroupFormat) -> GroupKind:
    return GroupKind(form.kind) if form.kind else GroupKind.FULL_ATTENTION
