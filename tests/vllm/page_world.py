"""vLLM's scheduler on a model of page contents: pages are zeroed, copied, written and read as vLLM's workers do it.

A page is a map from a position in it to the *content* there: a digest of all tokens up to that position, of the salt,
and of the weights, which change whenever the prefix cache was reset. A state has one content. Whatever a request reads
must have the content of its own tokens.

Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

IMAGE = range(8, 20)  # the positions of an image's placeholder tokens, in prompts that have one
STATE = -1  # the position of a state in its page
STOPS = list(range(5, 905, 10))  # tokens that end an answer in a session, while a later launch may run
GARBAGE = b"of a rejected draft"


class WrongContent(Exception):
    """A request read, or a launch ordered, what the pages do not have."""


def output_token(name: str, position: int) -> int:
    """Return the token that the model samples for this request."""
    return int.from_bytes(blake2b(f"{name} {position}".encode(), digest_size=4).digest(), "big") % 900 + 5


def is_accepted(name: str, position: int) -> bool:
    """Whether the model accepts the draft token there."""
    return random.Random(f"{name} {position}").random() < 0.6


class Client:
    """A request as its client sent it, with what the engine has of it."""

    def __init__(self, name: str, prompt: Sequence[int], **options: Any) -> None:
        self.name, self.prompt, self.options = name, list(prompt), options
        self.tables: list[list[int]] = []
        self.computed = 0
        self.length = len(self.prompt)  # with the tokens that launches have sampled
        self.contents: list[bytes] = []
        self.inputs: list[list[int]] = list(options.get("inputs", ()))  # that a session gets later

    def token(self, position: int) -> int:
        """Return the token at a position."""
        return self.prompt[position] if position < len(self.prompt) else output_token(self.name, position)

    def content(self, position: int, weights: int) -> bytes:
        """Return the content after the token at this position."""
        while len(self.contents) <= position:
            salt = f"{self.options['salt']} {self.options.get('adapter')} {weights}".encode()
            before = self.contents[-1] if self.contents else salt
            token = self.token(len(self.contents)).to_bytes(4, "big")
            shows = (
                str(self.options["image"][0]).encode() if len(self.contents) in IMAGE and self.options["image"] else b""
            )
            self.contents.append(blake2b(before + token + shows, digest_size=8).digest())
        return self.contents[position]

    def continue_with(self, prompt: Sequence[int]) -> None:
        """Continue with this prompt: a session keeps all outputs but the last, behind which its next input comes."""
        kept = next((at for at, token in enumerate(prompt) if token != self.token(at)), len(prompt))
        self.prompt, self.length = list(prompt), len(prompt)
        del self.contents[kept:]

    def request(self, hash_block_size: int, prompt: Sequence[int] | None = None, *, goes_on: bool = False) -> Request:
        """Return a new request of vLLM; for a session, the one of an input. `goes_on`: another one may follow."""
        stops = STOPS if "inputs" in self.options else None
        sampling = SamplingParams(max_tokens=self.options["most"], ignore_eos=True, stop_token_ids=stops)
        sampling.update_from_generation_config({}, 50256)
        adapter = self.options.get("adapter", 0)
        image, position = self.options["image"], PlaceholderRange(offset=IMAGE.start, length=len(IMAGE))
        item = MultiModalFeatureSpec(MultiModalKwargsItem.dummy(), "image", image[1], position) if image else None
        return Request(
            self.name,
            list(self.prompt if prompt is None else prompt),
            sampling,
            None,
            priority=self.options["priority"],
            arrival_time=self.options["arrival"],
            cache_salt=self.options["salt"],
            lora_request=LoRARequest(f"adapter {adapter}", adapter, f"/{adapter}") if adapter else None,
            mm_features=[item] if item else None,
            block_hasher=get_request_block_hasher(hash_block_size, sha256),
            resumable=goes_on,
        )


class World:
    """One scheduler, its requests, and the pages.

    Attributes:
        scheduler: of vLLM; may be replaced by one of a new engine process.
        clients: all requests, by name.
        flight: launches without an update: the scheduler's output and the model's.
        weights: how often they changed: with each reset that returned True.
        seen: counts of what happened.
    """

    def __init__(self, scheduler: Any, specs: Sequence[Any], hash_block_size: int, num_drafts: int) -> None:
        self.scheduler, self.specs = scheduler, specs
        self.hash_block_size, self.num_drafts = hash_block_size, num_drafts
        self.pages: dict[int, dict[int, bytes]] = {}
        self.clients: dict[str, Client] = {}
        self.flight: list[tuple[Any, ModelRunnerOutput]] = []
        self.weights = 0
        self.seen: Counter[str] = Counter()
        self.lent: Any = None  # pages of a kvplane worker, see `kvplane_vllm.worker.LentPages`

    # -- clients -----------------------------------------------------------------------------------------------------

    def send(self, client: Client) -> None:
        """Add a request."""
        self.clients[client.name] = client
        self.scheduler.add_request(client.request(self.hash_block_size, goes_on="inputs" in client.options))

    def next_input(self, name: str) -> None:
        """Send the next input of a session, or its end."""
        client = self.clients[name]
        self.seen["inputs"] += bool(client.inputs)
        more = client.inputs.pop(0) if client.inputs else None
        self.scheduler.add_request(client.request(self.hash_block_size, more or [5], goes_on=more is not None))
        self._follow_sessions()

    def _follow_sessions(self) -> None:
        """Let the clients have what the scheduler made of their sessions."""
        for name, request in self.scheduler.requests.items():
            if self.is_session(name) and list(request.prompt_token_ids) != self.clients[name].prompt:
                self.clients[name].continue_with(request.prompt_token_ids)

    def is_session(self, name: str) -> bool:
        """Whether a request is a session, which can get more inputs."""
        return name in self.scheduler.requests and "inputs" in self.clients[name].options

    def give_up(self, name: str) -> None:
        """Abort a request, if it has not ended."""
        if name in self.scheduler.requests:
            self.seen["aborted"] += 1
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool = False) -> None:
        """Reset the prefix cache. If that was done, the weights change: nothing in the pages is right any more."""
        try:
            done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:  # vLLM's, if blocks are still held although no request runs
            done = False
            waiting = any(one.num_computed_tokens for one in self.scheduler.kv_holding_waiting)  # sessions
            self.seen["resets under sessions" if waiting else "resets that raised"] += 1
        self.seen["resets" if done else "refused resets"] += 1
        if done:
            self.weights += 1
            for client in self.clients.values():
                client.contents.clear()

    def restart(self, scheduler: Any) -> None:
        """Continue with the scheduler of a new process, which gets all requests again."""
        alive = [self.clients[name] for name in self.scheduler.requests]
        self.scheduler, self.flight = scheduler, []
        self.seen["processes"] += 1
        for client in alive:
            self.send(Client(client.name, client.prompt, **client.options))

    @property
    def is_busy(self) -> bool:
        """Whether requests or launches have not ended."""
        return bool(self.scheduler.requests or self.flight)

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """Let the scheduler plan a step."""
        self.seen["steps"] += 1
        return self.scheduler.schedule()

    def launch(self, output: Any) -> None:
        """Carry out the orders of a step, and compute its tokens."""
        if self.lent is not None:
            self.lent.carry_out(getattr(output, "kvplane_launch", None))
        self._carry_out(output.new_block_ids_to_zero or [], output.kv_cache_block_copies or [])
        self._extend_tables(output)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            sampled[name] = self._compute(self.clients[name], count, drafts)
        names = list(output.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        rows = [sampled[name] for name in names]
        self.flight.append((output, ModelRunnerOutput(names, index, sampled_token_ids=rows)))

    def _carry_out(self, zeroes: Sequence[int], copies: Sequence[Any]) -> None:
        """Zero, then copy; every source is read before a target is written."""
        for block in zeroes:
            self.pages[block] = {}
        sources, targets = [one.src_block_id for one in copies], [one.dst_block_id for one in copies]
        if set(sources) & {*zeroes, *targets} or len(set(targets)) < len(targets):
            raise WrongContent(f"zeroes {zeroes} and copies {copies} depend on their order")
        self.seen["copies"] += len(copies)
        found = [dict(self.pages.get(source, {})) for source in sources]
        self.pages.update(zip(targets, found, strict=True))

    def _extend_tables(self, output: Any) -> None:
        for one in output.scheduled_new_reqs:
            client = self.clients[one.req_id]
            self.seen["hits"] += 0 if client.tables else one.num_computed_tokens
            self.seen["continued"] += bool(client.tables)
            client.tables, client.computed = [list(ids) for ids in one.block_ids], one.num_computed_tokens
        cached = output.scheduled_cached_reqs
        columns = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens
        for name, blocks, computed, num_outputs in zip(*columns, strict=True):
            client = self.clients[name]
            client.computed = computed
            if name in cached.resumed_req_ids:
                client.tables = [list(ids) for ids in blocks]
                client.length = len(client.prompt) + num_outputs  # a reset drops tokens of launches in flight
                self.seen["resumed"] += 1
            elif blocks is not None:
                for table, ids in zip(client.tables, blocks, strict=True):
                    table.extend(ids)

    def _compute(self, client: Client, count: int, drafts: int) -> list[int]:
        start = client.computed
        end, first_draft = start + count, start + count - drafts
        accepted = 0
        while accepted < drafts and is_accepted(client.name, first_draft + accepted):
            accepted += 1
        for group in range(len(self.specs)):
            self._read(client, group, start)
        for group in range(len(self.specs)):
            self._write(client, group, start, end, first_draft + accepted)
        if first_draft < client.length:
            return []  # a part of the prompt, or tokens that are computed again
        new = [output_token(client.name, client.length + number) for number in range(accepted + 1)]
        client.length += len(new)
        return new

    def _read(self, client: Client, group: int, start: int) -> None:
        spec, table = self.specs[group], client.tables[group]
        if start == 0:
            return
        if isinstance(spec, MambaSpec):
            places = [((start - 1) // spec.block_size, STATE, start - 1)]
        else:
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, start - spec.sliding_window + 1)
            if isinstance(spec, ChunkedLocalAttentionSpec):
                first = start // spec.attention_chunk_size * spec.attention_chunk_size
            size = spec.block_size
            places = [(position // size, position % size, position) for position in range(first, start)]
        for index, inside, position in places:
            block = table[index] if index < len(table) else 0
            self.seen["reads"] += 1
            if not block or self.pages.get(block, {}).get(inside) != client.content(position, self.weights):
                where = f"{client.name}, group {group}, position {position} of {start}"
                raise WrongContent(f"{where}: block {block} has other content; table {table}")

    def _write(self, client: Client, group: int, start: int, end: int, valid_end: int) -> None:
        spec, table = self.specs[group], client.tables[group]
        size = spec.block_size
        if isinstance(spec, MambaSpec):
            self._write_checkpoint(client, spec, table, start, end)
            content = client.content(end - 1, self.weights) if end <= valid_end else GARBAGE
            self.pages[table[(end - 1) // size]] = {STATE: content}
            return
        for position in range(start, end):
            block = table[position // size] if position // size < len(table) else 0
            if not block:
                raise WrongContent(f"{client.name}, group {group}: position {position} has no block; table {table}")
            content = client.content(position, self.weights) if position < valid_end else GARBAGE
            self.pages.setdefault(block, {})[position % size] = content

    def _write_checkpoint(self, client: Client, spec: Any, table: Sequence[int], start: int, end: int) -> None:
        if not spec.num_prefill_checkpoint_blocks:
            return
        unit, size = self.hash_block_size, spec.block_size
        position = get_mamba_prefill_checkpoint_position(end, unit, False, 0)  # by the launch, as vLLM's workers do
        if is_mamba_prefill_checkpoint_valid(start, end, position, unit, size, spec.prefill_checkpoint_alignment):
            index = -(-end // size) - 2
            if table[index]:
                self.pages[table[index]] = {STATE: client.content(position - 1, self.weights)}

    def update(self) -> None:
        """Report the oldest launch to the scheduler."""
        output, result = self.flight.pop(0)
        self.scheduler.update_from_output(output, result)
        self._follow_sessions()
        self._check_keys()
        if self.num_drafts:
            self._draft(result)

    def _check_keys(self) -> None:
        """Compare the keys of the allocator in this process with the tokens that its requests have now."""
        manager, unit = self.scheduler.kv_cache_manager, self.hash_block_size
        for known in getattr(manager, "known", {}).values():
            for block in {block for table in manager.tables_of(known.slot) for block in table if block}:
                key, hashes = manager.pool.key_of(block), known.request.block_hashes
                full = manager.pool.key_tokens[block] // unit if key is not None else 0
                if 0 < full <= len(hashes) and bytes(key[2]) != bytes(hashes[full - 1]):
                    raise WrongContent(f"{known.request.request_id}: block {block} has the key of other tokens")

    def _draft(self, result: ModelRunnerOutput) -> None:
        names, drafts = [], []
        for name in result.req_ids:
            request = self.scheduler.requests.get(name)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            names.append(name)
            drafts.append(
                self._drafts_of(self.clients[name]) if result.sampled_token_ids[result.req_id_to_index[name]] else []
            )
        if names:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _drafts_of(self, client: Client) -> list[int]:
        positions = range(client.length, client.length + self.num_drafts)
        return [output_token(client.name, at) if is_accepted(client.name, at) else 3 for at in positions]


def lend(table: Any, num_groups: int) -> Any:
    """Return the pages of a rank whose stamp table this is, as vLLM's worker has them."""
    from kvplane_vllm.worker import LentPages

    return LentPages(SimpleNamespace(stamps=table), num_groups)  # type: ignore[arg-type]
