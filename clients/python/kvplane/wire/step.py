"""Conversion of Step and its parts to and from protobuf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.prefetch import Prefetch
from kvplane.base.retain import Retain
from kvplane.base.step import (
    NO_EXTRA_KEYS,
    UNLIMITED,
    Admit,
    Budget,
    Cache,
    ExtraKeys,
    Facts,
    Multimodal,
    News,
    OnRefusal,
    Part,
    Peek,
    Resume,
    Run,
    Step,
)
from kvplane.base.typed import check
from kvplane.base.when_read import given_fields
from kvplane.v1 import step_pb2 as pb
from kvplane.wire.columns import (
    I32,
    LONG,
    SHORT,
    U64,
    Column,
    Columns,
    build,
    cannot_build,
    pack_section,
    unpack_section,
    wrong_rows,
    wrong_total,
)

FACTS = Columns(
    Column("slot"),
    Column("computed", I32),
    Column("appended"),
    Column("tokens", by_row=False, packed_from=LONG),
    Column("num_hashes"),
    Column("commit", I32),
    Column("end", highest=3),
    Column("fence", U64),
    Column("release_skipped", I32),
    Column("hint", I32),
)
_CACHE = Columns(
    Column("failed_steps", U64, by_row=False),
    Column("evicted", by_row=False),
    Column("released", by_row=False),
    Column("loads_over", by_row=False),
    Column("jobs_done", U64, by_row=False, packed_from=SHORT),
    Column("jobs_failed", U64, by_row=False, packed_from=SHORT),
    Column("costs_ns", U64, by_row=False),
    Column("mismatched", by_row=False),
)
_NEWS = Columns(
    Column("slot"),
    Column("num_tokens"),
    Column("tokens", by_row=False, packed_from=LONG),
    Column("num_hashes"),
    Column("skip_reading", highest=1),
    Column("max_tokens"),
    Column("hint"),
)
_RESUME = Columns(
    Column("slot"),
    Column("computed"),
    Column("launch_end"),
    Column("num_prompt"),
    Column("single_group_hit"),
    Column("loading", highest=2),
    Column("num_cached_blocks", by_row=False),
    Column("num_blocks", by_row=False),
    Column("blocks", by_row=False),
    Column("held_slot", by_row=False),
    Column("held_count", by_row=False),
    Column("held_blocks", by_row=False),
    Column("held_loading", by_row=False, highest=1),
)
RUN = Columns(
    Column("slot"),
    Column("extra", I32),
    Column("cap"),
    Column("lookahead"),
    Column("in_flight", I32),
    Column("flags"),
    Column("victims", by_row=False),
    Column("reserved"),
)
_ADMIT = Columns(
    Column("slot"),
    Column("extra", I32),
    Column("cap"),
    Column("lookahead"),
    Column("external"),
    Column("expected_hit", I32),
    Column("encoder_tokens"),
    Column("reserved"),
    Column("watermark", highest=2),
    Column("flags"),
    Column("hit_limit"),
    Column("min_new"),
    Column("skip_zero_groups", U64),
    Column("single_group_hit"),
)
_PEEK = Columns(Column("slot"), Column("limit"))
_PREFETCH = Columns(Column("slot"), Column("num_hashes"), Column("within_ns", U64))
_RETAIN = Columns(
    Column("num_hashes"),
    Column("priority"),
    Column("until_ns", U64),
    Column("percent"),
    Column("now_ns", U64, by_row=False),
)
_ON_RUN_REFUSAL = tuple(OnRefusal)
_ON_ADMIT_REFUSAL = (OnRefusal.STOP, OnRefusal.SKIP)


def encode_step(step: Step) -> pb.Step:
    """Return the message of a step. Raises InvalidArgument for a value that cannot be sent; the error's field names the
    value.
    """
    try:
        return pb.Step(
            epoch=step.epoch,
            seq=step.seq,
            part=step.part,
            more=not step.last,
            executed_through=step.executed_through,
            parts=[_encode_part(part, f"parts[{index}]") for index, part in enumerate(step.parts)],
            traceparent=step.traceparent,
        )
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        check(step, Step, "")  # finds and names the wrong value; too slow to do for every step
        raise cannot_build("step", error) from error


def decode_step(message: pb.Step, digest_size: int) -> Step:
    """Return the step of a message whose hashes have `digest_size` bytes each.

    The function checks the form only: element sizes, one entry per row, valid enum values, and the totals of tokens and
    hashes. The service's core checks what the rows mean. Raises InvalidArgument; the error's field is, for instance,
    "parts[0].run.cap".
    """
    if not message.parts:
        raise InvalidArgument(
            "the step has no parts, but needs at least one",
            field="parts",
            remedy="send an empty part for a step without rows",
        )
    return Step(
        epoch=message.epoch,
        seq=message.seq,
        parts=[_decode_part(part, digest_size, f"parts[{index}]") for index, part in enumerate(message.parts)],
        part=message.part,
        last=not message.more,
        executed_through=message.executed_through,
        traceparent=message.traceparent,
    )


def encode_extra_keys(keys: ExtraKeys, where: str = "extra_keys") -> pb.ExtraKeys:
    """Return the message of extra keys. Raises InvalidArgument; the error's field is `where` and the name of the wrong
    value.
    """
    check(keys, ExtraKeys, where)
    name, path = keys.lora or ("", "")
    items = [
        build(
            pb.MultimodalItem,
            f"{where}.multimodal[{at}]",
            {"identifier": item.identifier, "offset": item.offset, "length": item.length},
        )
        for at, item in enumerate(keys.multimodal)
    ]
    fields = {"salt": keys.salt, "multimodal": items, "prompt_embeds": keys.prompt_embeds}
    return build(pb.ExtraKeys, where, {"lora_name": name, "lora_path": path, **fields})


def decode_extra_keys(message: pb.ExtraKeys) -> ExtraKeys:
    """Return the extra keys of a message; the object NO_EXTRA_KEYS if the message has none."""
    if not message.ByteSize():
        return NO_EXTRA_KEYS
    has_lora = bool(message.lora_name or message.lora_path)
    return ExtraKeys(
        lora=(message.lora_name, message.lora_path) if has_lora else None,
        salt=message.salt,
        multimodal=tuple(Multimodal(item.identifier, item.offset, item.length) for item in message.multimodal),
        prompt_embeds=tuple(message.prompt_embeds),
    )


# Sections are passed as dicts: to build a message from messages, protobuf would copy the columns at each level.
def _encode_part(part: Part, where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    given = given_fields(part)  # a section that is missing is empty
    for name, encode in _SECTIONS.items():
        if name in given and (section := encode(given[name], f"{where}.{name}")):
            fields[name] = section
    if part.resume is not None:
        fields["resume"] = pack_section(part.resume, _RESUME, f"{where}.resume")
    if part.with_tables:
        fields["with_tables"] = part.with_tables
    if part.with_hashes:
        fields["with_hashes"] = part.with_hashes
    return fields


def _encode_facts(facts: Facts, where: str) -> dict[str, Any]:
    fields = pack_section(facts, FACTS, where)
    if facts.hashes:
        fields["hashes"] = facts.hashes
    return fields


def _encode_cache(cache: Cache, where: str) -> dict[str, Any]:
    fields = pack_section(cache, _CACHE, where)
    if cache.reset:
        fields["reset"] = cache.reset
    if cache.jobs_before:
        fields["jobs_before"] = cache.jobs_before
    if cache.hits_checked:
        fields["hits_checked"] = _u32(cache.hits_checked, f"{where}.hits_checked")
    return fields


def _encode_news(news: News, where: str) -> dict[str, Any]:
    fields = pack_section(news, _NEWS, where)
    if news.hashes:
        fields["hashes"] = news.hashes
    for name in ("request_id", "domain", "traceparent"):
        if names := getattr(news, name):
            fields[name] = _texts(names, name)
    if news.extra_keys:
        fields["extra_keys"] = [
            encode_extra_keys(keys, f"{where}.extra_keys[{at}]") for at, keys in enumerate(news.extra_keys)
        ]
    return fields


def _encode_run(run: Run, where: str) -> dict[str, Any]:
    fields = pack_section(run, RUN, where)
    if run.on_refusal != OnRefusal.PREEMPT:
        fields["on_refusal"] = run.on_refusal + 1
    return fields


def _encode_admit(admit: Admit, where: str) -> dict[str, Any]:
    fields = pack_section(admit, _ADMIT, where)
    if admit.on_refusal != OnRefusal.STOP:
        fields["on_refusal"] = admit.on_refusal + 1
    if admit.max_running != UNLIMITED:
        fields["max_running"] = _u32(admit.max_running, f"{where}.max_running")
    if admit.only_if_no_preemption:
        fields["only_if_no_preemption"] = admit.only_if_no_preemption
    return fields


def _encode_peek(peek: Peek, where: str) -> dict[str, Any]:
    fields = pack_section(peek, _PEEK, where)
    if peek.with_blocks:
        fields["with_blocks"] = peek.with_blocks
    return fields


def _encode_prefetch(prefetch: Prefetch, where: str) -> dict[str, Any]:
    fields = pack_section(prefetch, _PREFETCH, where)
    if prefetch.hashes:
        fields["hashes"] = prefetch.hashes
    if prefetch.domain:
        fields["domain"] = _texts(prefetch.domain, "domain")
    return fields


def _encode_retain(retain: Retain, where: str) -> dict[str, Any]:
    fields = pack_section(retain, _RETAIN, where)
    if retain.hashes:
        fields["hashes"] = retain.hashes
    for name in ("domain", "owner"):
        if names := getattr(retain, name):
            fields[name] = _texts(names, name)
    return fields


def _texts(names: object, name: str) -> list[str]:
    """Return a list of texts. Raises TypeError for others: a str would become a list of letters, and bytes would count
    as text.
    """
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        raise TypeError(name)
    return list(names)


def _encode_budget(budget: Budget, where: str) -> dict[str, Any]:
    fields = {}
    if budget.tokens != UNLIMITED:
        fields["tokens"] = _u32(budget.tokens, f"{where}.tokens")
    if budget.input != UNLIMITED:
        fields["input"] = _u32(budget.input, f"{where}.input")
    if budget.overhead:
        fields["overhead"] = _u32(budget.overhead, f"{where}.overhead")
    return fields


_SECTIONS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "facts": _encode_facts,
    "cache": _encode_cache,
    "news": _encode_news,
    "run": _encode_run,
    "admit": _encode_admit,
    "peek": _encode_peek,
    "prefetch": _encode_prefetch,
    "retain": _encode_retain,
    "budget": _encode_budget,
}


def _u32(value: int, name: str) -> int:
    if not 0 <= value <= UNLIMITED:
        raise InvalidArgument(f"{value} is not a u32", field=name, remedy=f"give an integer from 0 to {UNLIMITED}")
    return value


def _decode_part(message: pb.Part, digest_size: int, where: str) -> Part:
    fields: dict[str, Any] = {}
    if message.HasField("facts"):
        fields["facts"] = _decode_facts(message.facts, digest_size, f"{where}.facts")
    if message.HasField("cache"):
        columns = unpack_section(message.cache, _CACHE, f"{where}.cache")
        numbers = {name: getattr(message.cache, name) for name in ("reset", "jobs_before", "hits_checked")}
        fields["cache"] = Cache(**numbers, **columns)
    if message.HasField("news"):
        fields["news"] = _decode_news(message.news, digest_size, f"{where}.news")
    if message.HasField("resume"):
        fields["resume"] = Resume(**unpack_section(message.resume, _RESUME, f"{where}.resume"))
    if message.HasField("run"):
        fields["run"] = _decode_run(message.run, f"{where}.run")
    if message.HasField("admit"):
        fields["admit"] = _decode_admit(message.admit, f"{where}.admit")
    if message.HasField("peek"):
        columns = unpack_section(message.peek, _PEEK, f"{where}.peek")
        fields["peek"] = Peek(with_blocks=message.peek.with_blocks, **columns)
    if message.HasField("prefetch"):
        fields["prefetch"] = _decode_prefetch(message.prefetch, digest_size, f"{where}.prefetch")
    if message.HasField("retain"):
        fields["retain"] = _decode_retain(message.retain, digest_size, f"{where}.retain")
    if message.HasField("budget"):
        fields["budget"] = _decode_budget(message.budget)
    return Part(with_tables=message.with_tables, with_hashes=message.with_hashes, **fields)


def _decode_facts(message: pb.Facts, digest_size: int, where: str) -> Facts:
    facts = Facts(hashes=message.hashes, **unpack_section(message, FACTS, where))
    _check_content(facts, facts.appended, "appended", digest_size, where)
    return facts


def _decode_news(message: pb.News, digest_size: int, where: str) -> News:
    columns = unpack_section(message, _NEWS, where)
    news = News(
        hashes=message.hashes,
        request_id=list(message.request_id),
        domain=list(message.domain),
        traceparent=list(message.traceparent),
        extra_keys=[decode_extra_keys(keys) for keys in message.extra_keys],
        **columns,
    )
    rows = len(news.slot)
    for name, entries in (
        ("request_id", len(news.request_id)),
        ("domain", len(news.domain)),
        ("traceparent", len(news.traceparent)),
        ("extra_keys", len(news.extra_keys)),
    ):
        if entries not in (0, rows):
            raise wrong_rows(f"{where}.{name}", entries, rows)
    _check_content(news, news.num_tokens, "num_tokens", digest_size, where)
    return news


def _check_content(section: Facts | News, counts: Sequence[int], count_name: str, digest_size: int, where: str) -> None:
    given = len(section.tokens)
    if given and given != sum(counts):
        raise wrong_total(f"{where}.tokens", given, "token ids", sum(counts), f"{where}.{count_name}")
    _check_hashes(section, digest_size, where)


def _check_hashes(section: Facts | News | Prefetch | Retain, digest_size: int, where: str) -> None:
    num_bytes = sum(section.num_hashes) * digest_size
    if num_bytes != len(section.hashes):
        source = f"{where}.num_hashes x {digest_size}"
        raise wrong_total(f"{where}.hashes", len(section.hashes), "bytes", num_bytes, source)


def _decode_prefetch(message: pb.Prefetch, digest_size: int, where: str) -> Prefetch:
    columns = unpack_section(message, _PREFETCH, where)
    prefetch = Prefetch(hashes=message.hashes, domain=list(message.domain), **columns)
    _check_texts(prefetch.domain, len(prefetch.slot), f"{where}.domain")
    _check_hashes(prefetch, digest_size, where)
    return prefetch


def _decode_retain(message: pb.Retain, digest_size: int, where: str) -> Retain:
    columns = unpack_section(message, _RETAIN, where)
    retain = Retain(hashes=message.hashes, domain=list(message.domain), owner=list(message.owner), **columns)
    for name in ("domain", "owner"):
        _check_texts(getattr(retain, name), len(retain.num_hashes), f"{where}.{name}")
    _check_hashes(retain, digest_size, where)
    return retain


def _check_texts(names: Sequence[str], rows: int, where: str) -> None:
    if len(names) not in (0, rows):
        raise wrong_rows(where, len(names), rows)


def _decode_run(message: pb.Run, where: str) -> Run:
    columns = unpack_section(message, RUN, where)
    on_refusal = _decode_on_refusal(message.on_refusal, OnRefusal.PREEMPT, _ON_RUN_REFUSAL, where)
    return Run(on_refusal=on_refusal, **columns)


def _decode_admit(message: pb.Admit, where: str) -> Admit:
    columns = unpack_section(message, _ADMIT, where)
    return Admit(
        max_running=message.max_running if message.HasField("max_running") else UNLIMITED,
        on_refusal=_decode_on_refusal(message.on_refusal, OnRefusal.STOP, _ON_ADMIT_REFUSAL, where),
        only_if_no_preemption=message.only_if_no_preemption,
        **columns,
    )


def _decode_on_refusal(value: int, default: OnRefusal, allowed: Sequence[OnRefusal], where: str) -> OnRefusal:
    if value == pb.ON_REFUSAL_UNSPECIFIED:
        return default
    if value - 1 not in allowed:
        names = ", ".join(choice.name for choice in allowed)
        found = f"{value} is not valid for this section"
        raise InvalidArgument(found, field=f"{where}.on_refusal", remedy=f"use one of {names}")
    return OnRefusal(value - 1)


def _decode_budget(message: pb.Budget) -> Budget:
    return Budget(
        tokens=message.tokens if message.HasField("tokens") else UNLIMITED,
        input=message.input if message.HasField("input") else UNLIMITED,
        overhead=message.overhead,
    )
