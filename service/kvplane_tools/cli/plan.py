"""The command `plan`: compute the cache capacity of a model without a service, as tables, JSON, YAML or a plot; and
`models`: list what it can plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Drafter, SavePolicy, TierKind
from kvplane.base.units import parse_bytes
from kvplane_tools.cli import plots
from kvplane_tools.cli.options import TABLE, DiskSave, DiskSize, HostSave, HostSize, Output, Plot, Ranks, Shape
from kvplane_tools.cli.output import columns, size, text_of

if TYPE_CHECKING:
    from kvplane_plan.models.sizing import Figures, Sizing
    from kvplane_plan.models.tiers import TierFigures, TierSize
    from kvplane_plan.planner import CachePlan, Comparison

_BAR_CELLS = 40
_TEXT_COLUMNS = 100
_UNIT = typer.Option(min=0, help="Prefix hits are multiples of this number of tokens. 0 = the most possible.")
_CHECKPOINTS = typer.Option(
    min=0, max=100, help="Percentage of the other blocks that windows and states inside prompts take in tiers."
)


def _complete_model(incomplete: str) -> list[str]:
    """Return the names of the model catalogue that begin with `incomplete`, for shell completion."""
    from kvplane_plan.models.catalogue import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model of the catalogue, a config.json, or a directory with one.", autocompletion=_complete_model
        ),
    ],
    memory: Annotated[
        str, typer.Option(help="Memory of one rank for cache and --weights, such as 80GB. 40GiB without it and --gpu.")
    ] = "",
    gpu: Annotated[str, typer.Option(help="GPU of a rank, such as h100, instead of --memory.")] = "",
    utilization: Annotated[
        float, typer.Option(help="Part of the GPU's memory that the engine uses (vLLM: --gpu-memory-utilization).")
    ] = 0.92,
    weights: Annotated[
        str, typer.Option(help="Weights of the whole model, such as 70GB, which the ranks divide; add activations.")
    ] = "0",
    context: Annotated[int, typer.Option(min=1, help="Longest request in tokens.")] = 32768,
    tensor_parallel: Ranks = 1,
    cache_dtype: Annotated[str, typer.Option(help="auto (of the checkpoint), bfloat16, float16 or fp8.")] = "auto",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per attention block.")] = 16,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one step.")] = 8192,
    concurrent_batches: Annotated[int, typer.Option(min=1, help="Steps in flight.")] = 1,
    speculative_tokens: Annotated[int, typer.Option(min=0, help="Most draft tokens of a decode step.")] = 0,
    drafter: Annotated[Drafter, typer.Option(help="Drafter with a layer in the pool.")] = Drafter.NONE,
    prefix_caching: Annotated[bool, typer.Option(help="Cache prompts, and states at block boundaries.")] = True,
    prefix_match_unit: Annotated[int, _UNIT] = 0,
    plot: Plot = None,
    host_size: HostSize = None,
    disk_size: DiskSize = None,
    host_save: HostSave = SavePolicy.BEHIND,
    disk_save: DiskSave = SavePolicy.BEHIND,
    checkpoints: Annotated[int, _CHECKPOINTS] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with the planners best and split, and with the ideal.")
    ] = False,
    pipeline_parallel: Annotated[
        int, typer.Option(min=1, help="Pipeline stages, with --compare: each has the memory of a rank.")
    ] = 1,
    mix: Annotated[str, typer.Option(help="Compare for requests of these lengths and weights: 2048:3,32768.")] = "",
    output: Output = TABLE,
) -> None:
    """Plan capacity without a service: groups, bytes per token, blocks, and how many requests fit concurrently.

    Compares a hybrid cache, where window and state layers free what they no longer need, with a uniform one, where
    every layer keeps every token; also for other data types, numbers of ranks and context lengths.
    """
    from kvplane_plan.models.shapes import ModelOptions
    from kvplane_plan.models.sizing import Sizing, find_model

    options = ModelOptions(
        tensor_parallel,
        cache_dtype,
        block_size,
        context,
        speculative_tokens=speculative_tokens,
        drafter=drafter,
        state_checkpoints=prefix_caching,
    )
    given = (_memory(memory, gpu, utilization), batched_tokens, concurrent_batches, prefix_caching, prefix_match_unit)
    sizing = Sizing(find_model(model), options, *given, parse_bytes(weights, "weights"))
    if compare or mix:
        staged = replace(sizing, pipeline_parallel=pipeline_parallel)
        return print(_comparison(staged.comparison(_mix(mix)), staged.cache_bytes, output))
    if pipeline_parallel > 1:
        what = f"it is {pipeline_parallel}, and the figures are those of one stage"
        raise InvalidArgument(what, field="pipeline_parallel", remedy="add --compare, which reports each stage")
    tiers = _tier_sizes(((TierKind.HOST, host_size, host_save), (TierKind.DISK, disk_size, disk_save)), checkpoints)
    return print(_capacity(model, sizing, tiers, plot, output))


def _capacity(model: str, sizing: Sizing, tier_sizes: Sequence[TierSize], plot: Path | None, output: Shape) -> str:
    """Return the capacity of a plan; also plot it, if there is a file for that."""
    from kvplane_plan.models.sizing import figures_of
    from kvplane_plan.models.tiers import tier_figures

    figures, tiers = figures_of(sizing), [tier_figures(sizing, tier) for tier in tier_sizes]
    where = f"{sizing.cache_bytes / (1 << 30):.4g}GiB per rank"
    _plot(f"{model} in {where}", sizing, plot)

    def table() -> str:
        head = _head(f"{model} in {where}", sizing, figures)
        return "\n\n".join((head, _groups(figures), *_tiers(sizing, tiers), _variants(sizing), _lengths(sizing)))

    return text_of(lambda: {**_plain(sizing, figures), **_plain_tiers(tiers)}, output, table=table)


def _mix(text: str) -> dict[int, int]:
    """Return the weights of lengths that a text such as "2048:3,32768" states. Raises InvalidArgument."""
    mix = dict[int, int]()
    for one in text.split(",") if text else ():
        found = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", one)
        if found is None or int(found[1]) in mix:
            remedy = "write each length once, with its weight if that is not 1: 2048:3,32768"
            raise InvalidArgument(f"{one[:40]!r} is no length with a weight", field="mix", remedy=remedy)
        mix[int(found[1])] = int(found[2] or 1)
    return mix


def models_command(output: Output = TABLE) -> None:
    """List the models of the catalogue, by which a replica can be registered, and the model types of which a
    config.json is read.
    """
    from kvplane_plan.models.catalogue import MODELS
    from kvplane_plan.models.model_types import READERS
    from kvplane_plan.models.shapes import ModelOptions

    rows = [("MODEL", "LAYERS", "CACHES")]
    for name, model in MODELS.items():
        kinds = Counter(layer.spec.kind.value for layer in model.layers(ModelOptions()))
        rows.append((name, str(model.num_layers), ", ".join(f"{count} {kind}" for kind, count in kinds.items())))
    listed = [{"name": name, "layers": int(layers), "caches": caches} for name, layers, caches in rows[1:]]
    types = fill(", ".join(sorted(READERS)), width=_TEXT_COLUMNS, break_on_hyphens=False)
    print(
        text_of(
            lambda: {"models": listed, "model_types": sorted(READERS)},
            output,
            table=lambda: f"{columns(rows)}\n\na config.json with one of the model types\n{types}",
            name=lambda: "\n".join(MODELS),
        )
    )


_BINDS = {
    "cell": "a plan that is cheaper on the whole holds fewer requests of some length",
    "admission": "a plan that is cheaper on the whole admits fewer of the longest requests",
    "hit unit": "a cheaper plan has coarser prefix hits",
    "groups": "a cheaper plan has too many groups, each with a block table",
    "": "no plan with pages of one pool is cheaper: the rest is padding and parts of blocks",
}


def _comparison(found: Comparison, stage_bytes: int, output: Shape) -> str:
    """Return how many decoding requests of each length fit with the reference plan, the best plan, split pages, and
    ideally; the groups of the plans, and what their blocks take of the memory of each pipeline stage.
    """
    plans = {"reference": found.reference, "best": found.best} | ({"split": found.split} if found.split else {})
    stages = {name: list(_stages_of(plan, stage_bytes)) for name, plan in plans.items()}

    def plain() -> dict[str, object]:
        facts = {
            name: {
                "layout": plan.options.layout.value,
                "groups": len(plan.groups),
                "hit_unit": plan.hit_alignment,
                "by_group": [
                    {"kind": one.kind.value, "num_layers": len(one.layer_names), "block_size": one.block_size}
                    for one in plan.groups
                ],
                "by_stage": [stage._asdict() for stage in stages[name]],
            }
            for name, plan in plans.items()
        }
        if found.split:
            facts["split"]["blocks_per_state"] = found.split.blocks_per_state
        return {**facts, "cells": [asdict(cell) for cell in found.cells], "binds": found.binds}

    def table() -> str:
        names = [*plans, "ideal"]
        rows = [["TOKENS", *map(str.upper, names), "GAIN", *(f"{name.upper()} GAIN" for name in names[2:])]]
        for cell in found.cells:
            fitting = [getattr(cell, name) for name in names]
            gains = [f"{count / cell.reference - 1:+.1%}" for count in fitting[1:]]
            rows.append([f"{cell.length:,}", *(f"{count:.1f}" for count in fitting), *gains])
        lines = [
            f"{name}: {len(plan.groups)} groups, layout {plan.options.layout.value}, "
            f"prefix hits are multiples of {plan.hit_alignment:,} tokens"
            for name, plan in plans.items()
        ]
        if found.split:
            from kvplane_core.face.setup import SLACK

            lines.append(
                f"split: {found.split.blocks_per_state} blocks of attention have the memory of a state; about "
                f"1/{SLACK} of all blocks may be free and of no use for states"
            )
        parts = ("decoding requests that fit\n" + columns(rows), _groups_of(plans), _table_of(stages))
        return "\n\n".join(("\n".join((*lines, _BINDS[found.binds])), *parts))

    return text_of(plain, output, table=table)


def _groups_of(plans: Mapping[str, CachePlan]) -> str:
    """Return a table of the groups of plans; equal groups have one row."""
    rows = [("PLAN", "GROUPS", "KIND", "LAYERS", "BLOCK")]
    for name, plan in plans.items():
        equal = Counter((one.kind.value, len(one.layer_names), one.block_size) for one in plan.groups)
        for (kind, num_layers, block_size), count in equal.items():
            rows.append((name, str(count), kind, str(num_layers), f"{block_size:,}"))
    return columns(rows)


class _Stage(NamedTuple):
    """A pipeline stage: the stage with the most bytes per block limits the blocks of all."""

    num_layers: int
    bytes_per_block: int
    memory_share: float  # that the blocks take
    padding_share: float  # of a block, on the average of the groups


def _stages_of(plan: CachePlan, stage_bytes: int) -> Iterator[_Stage]:
    content = {  # of a layer in a block; with split pages, a state takes several
        name: spec.content_bytes / (plan.blocks_per_state if spec.is_state else 1)
        for group in plan.groups
        for name, spec in zip(group.layer_names, group.specs, strict=True)
    }
    for worker in plan.workers:
        names = [name for tensor in worker.tensors for name in tensor.layer_names]
        used = sum(content[name] for name in names) / (len(plan.groups) * worker.bytes_per_block)
        yield _Stage(len(names), worker.bytes_per_block, worker.size_bytes / stage_bytes, 1 - used)


def _table_of(stages: Mapping[str, Sequence[_Stage]]) -> str:
    rows = [("PLAN", "STAGE", "LAYERS", "BLOCK", "MEMORY TAKEN", "PADDING")]
    for name, of_plan in stages.items():
        for number, one in enumerate(of_plan):
            counts = (str(number), str(one.num_layers), size(one.bytes_per_block))
            rows.append((name, *counts, f"{one.memory_share:.1%}", f"{one.padding_share:.1%}"))
    return columns(rows)


def _memory(memory: str, gpu: str, utilization: float) -> int:
    from kvplane_plan.models.sizing import gpu_bytes

    if gpu and memory:
        raise InvalidArgument("--gpu and --memory are both given", field="gpu", remedy="give one of them")
    return gpu_bytes(gpu, utilization) if gpu else parse_bytes(memory or "40GiB")


def _head(title: str, sizing: Sizing, figures: Figures) -> str:
    uniform = []
    if figures.uniform_concurrency and figures.gain:
        gains = f"{figures.gain:.2f} x and {figures.decoding_concurrency / figures.uniform_concurrency:.2f} x"
        uniform = [f"{figures.uniform_concurrency:.2f} in a uniform cache, so the gain is {gains}"]
    hits = [f"prefix hits are multiples of {figures.hit_unit:,} tokens"] if figures.hit_unit else []
    return "\n".join(
        (
            f"{title}: {figures.num_blocks:,} blocks of {size(figures.bytes_per_block)}",
            f"{size(round(figures.bytes_per_token))} per token while every token is kept",
            f"{figures.blocks_per_request:,} blocks per request of {sizing.options.max_model_len:,} tokens: "
            f"{figures.concurrency:.2f} concurrent requests if each is in a prefill of {sizing.max_batched_tokens:,} "
            f"tokens (engines admit by this), {figures.decoding_concurrency:.2f} while all decode",
            *uniform,
            *hits,
            *(f"warning: {warning}" for warning in figures.warnings),
        )
    )


def _groups(figures: Figures) -> str:
    rows = [("GROUP", "KIND", "LAYERS", "BLOCK", "PAGE", "PER TOKEN")]
    for number, group in enumerate(figures.groups):
        sizes = (
            str(group.num_layers),
            str(group.block_size),
            size(group.page_bytes),
            size(round(group.bytes_per_token)),
        )
        rows.append((str(number), group.kind.value, *sizes))
    return columns(rows)


def _tier_sizes(asked: Iterable[tuple[TierKind, int | None, SavePolicy]], checkpoints: int) -> list[TierSize]:
    """Return the tiers that have a size. Raises InvalidArgument for settings of others."""
    from kvplane_plan.models.tiers import TierSize

    sizes = []
    for kind, num_bytes, save in asked:
        if num_bytes is not None:
            sizes.append(TierSize(kind, num_bytes, save, checkpoints))
        elif save is not SavePolicy.BEHIND:
            what, remedy = f"there is no {kind.value} tier to save into", f"give --{kind.value}-size, or leave it out"
            raise InvalidArgument(what, field=f"--{kind.value}-save", remedy=remedy)
    if checkpoints and not sizes:
        what, remedy = (
            "checkpoints are settings of a tier, and there is none",
            "give --host-size or --disk-size, or leave it out",
        )
        raise InvalidArgument(what, field="--checkpoints", remedy=remedy)
    return sizes


def _tiers(sizing: Sizing, tiers: Sequence[TierFigures]) -> Iterator[str]:
    """Yield a table of all tiers, what checkpoints cost, and a table of what the tiers hold by group."""
    if not tiers:
        return
    length = f"{sizing.options.max_model_len:,}"
    rows = [("TIER", "SLOTS", "SLOT", "SAVE", "BLOCKS/PROMPT", f"PROMPTS OF {length}", "TOKENS")]
    of_groups = [("TIER", "GROUP", "KIND", "BLOCKS/PROMPT", "SLOTS", "TOKENS")]
    for tier in tiers:
        sizes = (f"{tier.num_blocks:,}", size(tier.slot_bytes), tier.save.value)
        blocks = f"{tier.blocks_per_prompt + tier.checkpoint_blocks:,}"
        rows.append((tier.kind.value, *sizes, blocks, f"{tier.prompts:,.2f}", f"{tier.prompt_tokens:,}"))
        for number, one in enumerate(tier.groups):
            counts = (f"{one.blocks_per_prompt + one.checkpoint_blocks:,}", f"{one.slots:,}", f"{one.tokens:,}")
            of_groups.append((tier.kind.value, str(number), one.kind.value, *counts))
    yield columns(rows)
    if any(tier.checkpoints_apart for tier in tiers):
        yield "\n".join(_checkpoints(tier, sizing.max_batched_tokens) for tier in tiers)
    yield columns(of_groups)


def _checkpoints(tier: TierFigures, batched_tokens: int) -> str:
    """Return what the checkpoints of a tier are, and what they cost."""
    return (
        f"{tier.kind.value}: {tier.checkpoint_blocks:,} blocks of a prompt are checkpoints, each "
        f"{tier.checkpoints_apart:,} tokens (states: where the next chunk of {batched_tokens:,} ends); without them "
        f"{tier.prompts_without:,.2f} prompts fit"
    )


def _plain_tiers(tiers: Sequence[TierFigures]) -> dict[str, object]:
    plain = [asdict(tier) | {"kind": tier.kind.value, "save": tier.save.value} for tier in tiers]
    for one in plain:
        one["groups"] = [{**group, "kind": group["kind"].value} for group in one["groups"]]
    return {"tiers": plain} if tiers else {}


def _variants(sizing: Sizing) -> str:
    from kvplane_plan.models.sizing import figures_by_layout

    rows = [("DTYPE", "TP", "PER TOKEN", "BLOCKS", "CONCURRENT", "UNIFORM")]
    for options, figures in figures_by_layout(sizing):
        uniform = "-" if figures.uniform_concurrency is None else f"{figures.uniform_concurrency:.2f}"
        counts = (
            size(round(figures.bytes_per_token)),
            f"{figures.num_blocks:,}",
            f"{figures.concurrency:.2f}",
            uniform,
        )
        rows.append((options.cache_dtype, str(options.tensor_parallel), *counts))
    return columns(rows)


def _lengths(sizing: Sizing) -> str:
    """Return a table with a bar chart: concurrent requests by context length."""
    from kvplane_plan.models.sizing import figures_by_length

    by_length = figures_by_length(sizing)
    most = max((figures.concurrency for _, figures in by_length), default=1.0)
    rows = [("CONTEXT", "CONCURRENT", "")]
    for length, figures in by_length:
        count = figures.concurrency
        rows.append((f"{length:,}", f"{count:.2f}", "█" * round(count / most * _BAR_CELLS)))
    return columns(rows)


def _plain(sizing: Sizing, figures: Figures) -> dict[str, object]:
    """Return the contents of all tables as dictionaries and lists, for JSON and YAML."""
    from kvplane_plan.models.sizing import figures_by_layout, figures_by_length

    layouts = [
        {"cache_dtype": options.cache_dtype, "tensor_parallel": options.tensor_parallel, **_counts(one)}
        for options, one in figures_by_layout(sizing)
    ]
    lengths = [{"max_model_len": length, **_counts(one)} for length, one in figures_by_length(sizing)]
    groups = [{**asdict(group), "kind": group.kind.value} for group in figures.groups]
    return {**_counts(figures), "groups": groups, "by_layout": layouts, "by_length": lengths}


def _counts(figures: Figures) -> dict[str, object]:
    return {**{name: value for name, value in asdict(figures).items() if name != "groups"}, "gain": figures.gain}


def _plot(title: str, sizing: Sizing, path: Path | None) -> None:
    from kvplane_plan.models.sizing import figures_by_length

    if path is None:
        return
    plots.check_path(path)
    _draw(title, figures_by_length(sizing), path)


def _draw(title: str, by_length: Sequence[tuple[int, Figures]], path: Path) -> None:
    """Plot concurrent requests over context length, for the hybrid and the uniform cache, with two logarithmic axes.

    Raises:
        FailedPrecondition: matplotlib is not installed.
        InvalidArgument: the file cannot be written.
    """
    figure = plots.new_figure()
    axes = figure.add_subplot()
    axes.plot(*zip(*((length, one.concurrency) for length, one in by_length), strict=True), "o-", label="hybrid")
    uniform = [(length, one.uniform_concurrency) for length, one in by_length if one.uniform_concurrency is not None]
    if uniform:
        axes.plot(*zip(*uniform, strict=True), "s--", label="uniform: every layer keeps every token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([length for length, _ in by_length], [f"{length // 1024}k" for length, _ in by_length])
    axes.set(title=title, xlabel="context length, tokens", ylabel="concurrent requests")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    plots.save(figure, path)
