"""Commands that change a replica: `deregister`, `reset`, `evict`, which state what is lost and ask; and two others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import typer

from kvplane.base.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvplane_tools.cli.client import calls, client_of, print_call
from kvplane_tools.cli.options import Grpcurl, Replica, Wait, duration
from kvplane_tools.cli.output import counted, word
from kvplane_tools.cli.query.prompt import Domain, Lora, Salt, Tokens, content_of

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, MutationResult

Answer = TypeVar("Answer")
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do it without a question.")]


def deregister_command(replica: Replica, yes: Yes = False, grpcurl: Grpcurl = False) -> None:
    """Remove a replica: its session ends, and its keys and stored records are deleted.

    Of a replica that an engine uses, this needs the scope admin.
    """
    print_call(grpcurl, calls.deregister_replica(replica))
    with client_of() as client:
        answer = client.describe_replica(replica)
        lost = [
            f"{counted(answer.running_requests, 'running request')}, with the blocks",
            counted(_num_cached(answer), "key"),
        ]
        if answer.store.state > 1:
            lost.append("what the store has of them: the keys do not survive a restart of the engine")
        _confirm(f"deregister {_named(answer)}", lost, yes)
        client.deregister_replica(replica, answer.epoch)  # not a life that began after the question
    print(f"{replica}: deregistered")


def reset_command(
    replica: Replica,
    yes: Yes = False,
    wait: Wait = False,
    grpcurl: Grpcurl = False,
) -> None:
    """Remove all keys of a replica's prefix cache, if no request holds a block.

    A replica that an engine uses is changed in the next step of the engine, and needs the scope admin. An engine
    without requests runs no step; only its ranks write the stamps that make the change final.
    """
    print_call(grpcurl, calls.reset_prefix_cache(replica))
    with client_of() as client:
        answer = client.describe_replica(replica)
        lost = [f"{counted(_num_cached(answer), 'key')}: later prompts are computed again"]
        _confirm(f"reset the prefix cache of {_named(answer)}", lost, yes)
        if not _changed(partial(client.reset_prefix_cache, replica), wait).done:
            raise FailedPrecondition(
                f"nothing was changed: requests hold blocks of {replica}",
                remedy=f"wait until they have ended (kvplane requests {replica}), or use kvplane evict",
            )
    print(f"{replica}: the prefix cache is empty")


def evict_command(
    replica: Replica,
    blocks: Annotated[list[int] | None, typer.Argument(help="Numbers of the blocks.")] = None,
    tokens: Tokens = None,
    domain: Domain = "",
    salt: Salt = "",
    lora: Lora = "",
    yes: Yes = False,
    wait: Wait = False,
    grpcurl: Grpcurl = False,
) -> None:
    """Remove the keys of blocks, or with --tokens of the blocks that a prompt hits. Requests keep their blocks.

    A replica that an engine uses is changed in the next step of the engine, as by `kvplane reset`, and needs the scope
    admin. After the engine has left, blocks are not evicted one by one.
    """
    if bool(blocks) == (tokens is not None):
        raise InvalidArgument("it is not clear what to evict", field="BLOCKS", remedy="give blocks, or --tokens")
    with client_of() as client:
        if tokens is not None:
            found = client.find_cache_hit(replica, content_of(tokens, domain, salt, lora), with_blocks=True)
            blocks = sorted({block for group in found.blocks for block in group.block_ids if block})
            if not blocks:
                print(f"{replica}: the prompt hits nothing")
                return
        assert blocks is not None
        print_call(grpcurl, calls.evict_blocks(replica, blocks))
        answer = client.describe_replica(replica)
        lost = [f"the keys of {counted(len(blocks), 'block')}: later prompts do not hit them"]
        _confirm(f"evict from the prefix cache of {_named(answer)}", lost, yes)
        result = _changed(partial(client.evict_blocks, replica, blocks), wait).result
    print(f"{replica}: {counted(_num_dropped(result), 'key')} removed, in step {result.seq}")


def prefetch_command(
    replica: Replica,
    tokens: Tokens = None,
    within: Annotated[float, duration("--within", most=3600, text="Time in which it must end. 0 = any.")] = 0.0,
    domain: Domain = "",
    salt: Salt = "",
    lora: Lora = "",
    wait: Wait = False,
    grpcurl: Grpcurl = False,
) -> None:
    """Copy what only the disk tier has of a prompt to the host tier, before a request with this prompt comes.

    The engine's next step orders it. Only a replica with a host and a disk tier has something to copy.
    """
    content = content_of(tokens, domain, salt, lora)
    print_call(grpcurl, calls.prefetch(replica, content, within_s=within))
    with client_of() as client:
        answer = _changed(partial(client.prefetch, replica, content, within_s=within), wait)
    how = ("", "all that the host lacked", "nothing: it would take too long", "a part: as much as there is room for")
    print(
        f"{replica}: a hit of {answer.hit_tokens} tokens in device and tiers; "
        f"{counted(answer.copied_blocks, 'block')} copied to the host ({how[answer.outcome]}), in step {answer.seq}"
    )


def retain_command(
    replica: Replica,
    tokens: Tokens = None,
    ttl: Annotated[float, duration("--ttl", most=604_800, text="Time from now on. 0 = release it.")] = 3600.0,
    priority: Annotated[int, typer.Option(min=0, max=100, help="Lower ones are evicted first.")] = 0,
    domain: Domain = "",
    salt: Salt = "",
    lora: Lora = "",
    wait: Wait = False,
    grpcurl: Grpcurl = False,
) -> None:
    """Retain the cached prefix of a prompt for a time: its blocks are evicted after all that are not retained.

    Nothing is held: an allocation that needs the blocks still gets them. What is not cached is not retained. With an
    engine, its next step does it.
    """
    content = content_of(tokens, domain, salt, lora)
    print_call(grpcurl, calls.retain(replica, content, ttl_s=ttl, priority=priority))
    with client_of() as client:
        answer = _changed(partial(client.retain, replica, content, ttl_s=ttl, priority=priority), wait)
    left, tokens = counted(answer.left_blocks, "block"), counted(answer.retained_tokens, "token")
    kept = f"{tokens}, {counted(answer.retained_blocks, 'block')}"
    if not ttl:
        print(f"{replica}: released, in step {answer.seq}; {left} left to retain")
        return
    print(f"{replica}: {kept} retained for {ttl:g} s, in step {answer.seq}; {left} left to retain")


def _changed(change: Callable[[], Answer], wait: bool) -> Answer:
    """Return the answer of a change that the engine carries out; with `wait`, ask again while it runs no step."""
    while True:
        try:
            return change()
        except Unavailable as error:
            if not wait or error.field != "replica":
                raise
            print("the engine runs no step: waiting", file=sys.stderr, flush=True)


def _named(answer: DescribeReplicaResponse) -> str:
    from kvplane.v1.allocation_pb2 import ReplicaState

    return f"{answer.replica} ({word(ReplicaState.Name(answer.state), 'REPLICA_STATE_')}, epoch {answer.epoch})"


def _num_cached(answer: DescribeReplicaResponse) -> int:
    return sum(group.cached_blocks for group in answer.counters.groups)


def _num_dropped(result: MutationResult) -> int:
    from kvplane.v1.step_pb2 import REMOVE_REASON_DROPPED

    return sum(len(event.hashes) for event in result.events if event.reason == REMOVE_REASON_DROPPED)


def _confirm(what: str, lost: Sequence[str], yes: bool) -> None:
    """Print what is lost, and ask whether to continue. Raises InvalidArgument without a terminal to ask on."""
    print("\n".join([what, *(f"  lost: {line}" for line in lost)]), flush=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument("nothing was changed, because it was not confirmed", field="--yes", remedy="give --yes")
    typer.confirm("continue?", abort=True)
