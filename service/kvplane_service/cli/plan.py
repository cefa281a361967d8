"""`kvplane plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.base.groups import Drafter
from kvplane_service.cli.asking import Form, Output, columns, plain_text

if TYPE_CHECKING:
    from kvplane_service.models.sizing import Figures, Sizing

_BAR_CELLS = 40


def _complete_model(incomplete: str) -> list[str]:
    """Names of the catalogue for the shell."""
    from kvplane_service.models.catalogue import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="name of the catalogue, a config.json, or the folder of one", autocompletion=_complete_model
        ),
    ],
    memory: Annotated[str, typer.Option(help="cache memory of one rank, such as 40GiB")] = "40GiB",
    context: Annotated[int, typer.Option(min=1, help="longest request in tokens")] = 32768,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="ranks that divide the heads")] = 1,
    cache_dtype: Annotated[str, typer.Option(help="bfloat16, float16 or fp8")] = "bfloat16",
    block_size: Annotated[int, typer.Option(min=1, help="tokens per attention block")] = 16,
    batched_tokens: Annotated[int, typer.Option(min=1, help="most tokens of one step")] = 8192,
    concurrent_batches: Annotated[int, typer.Option(min=1, help="steps in flight")] = 1,
    speculative_tokens: Annotated[int, typer.Option(min=0, help="draft tokens of a decode step at most")] = 0,
    drafter: Annotated[Drafter, typer.Option(help="that has a layer in the pool")] = Drafter.NONE,
    prefix_caching: Annotated[bool, typer.Option(help="cache prompts, and states at block boundaries")] = True,
    plot: Annotated[Path | None, typer.Option(help="also draw requests at once by length: .png, .svg, .pdf")] = None,
    output: Output = Form.TABLE,
) -> None:
    """Plan capacity without a service: groups, bytes per token, blocks, and requests of a length that fit at once.

    Hybrid (window and state layers give back what they no longer need) beside uniform, where every layer keeps every
    token; other data types and numbers of ranks; other context lengths.
    """
    from kvplane_service.models.catalogue import ModelOptions
    from kvplane_service.models.sizing import Sizing, figures_of, find_model, parse_bytes

    options = ModelOptions(
        tensor_parallel, cache_dtype, block_size, context, speculative_tokens=speculative_tokens, drafter=drafter
    )
    sizing = Sizing(find_model(model), options, parse_bytes(memory), batched_tokens, concurrent_batches, prefix_caching)
    figures = figures_of(sizing)
    if plot is not None:
        _draw(f"{model} in {memory} per rank", sizing, plot)
    if output is not Form.TABLE:
        print(plain_text(_plain(sizing, figures), output))
        return
    print("\n\n".join((_head(model, memory, figures, context), _groups(figures), _variants(sizing), _lengths(sizing))))


def _head(model: str, memory: str, figures: Figures, context: int) -> str:
    gain = ""
    if figures.gain is not None:
        gain = f"; uniform {figures.uniform_concurrency:.2f}, hybrid is {figures.gain:.2f} x"
    return "\n".join(
        (
            f"{model} in {memory} per rank: {figures.num_blocks:,} blocks of {figures.bytes_per_block:,} bytes",
            f"{figures.bytes_per_token:,.0f} bytes per token while every token is kept",
            f"{figures.blocks_per_request:,} blocks per request of {context:,} tokens: "
            f"{figures.concurrency:.2f} at once{gain}",
        )
    )


def _groups(figures: Figures) -> str:
    rows = [("GROUP", "KIND", "LAYERS", "BLOCK", "PAGE BYTES", "BYTES/TOKEN")]
    for number, group in enumerate(figures.groups):
        sizes = (str(group.num_layers), str(group.block_size), f"{group.page_bytes:,}", f"{group.bytes_per_token:,.0f}")
        rows.append((str(number), group.kind.value, *sizes))
    return columns(rows)


def _variants(sizing: Sizing) -> str:
    from kvplane_service.models.sizing import figures_by_layout

    rows = [("DTYPE", "TP", "BYTES/TOKEN", "BLOCKS", "AT ONCE", "UNIFORM")]
    for options, told in figures_by_layout(sizing):
        uniform = "-" if told.uniform_concurrency is None else f"{told.uniform_concurrency:.2f}"
        counts = (f"{told.bytes_per_token:,.0f}", f"{told.num_blocks:,}", f"{told.concurrency:.2f}", uniform)
        rows.append((options.cache_dtype, str(options.tensor_parallel), *counts))
    return columns(rows)


def _lengths(sizing: Sizing) -> str:
    """Requests at once by context length, as bars."""
    from kvplane_service.models.sizing import figures_by_length

    told = figures_by_length(sizing)
    most = max((figures.concurrency for _, figures in told), default=1.0)
    rows = [("CONTEXT", "AT ONCE", "")]
    for length, figures in told:
        count = figures.concurrency
        rows.append((f"{length:,}", f"{count:.2f}", "█" * round(count / most * _BAR_CELLS)))
    return columns(rows)


def _plain(sizing: Sizing, figures: Figures) -> dict[str, object]:
    """All that the table shows, as plain data."""
    from kvplane_service.models.sizing import figures_by_layout, figures_by_length

    layouts = [
        {"cache_dtype": options.cache_dtype, "tensor_parallel": options.tensor_parallel, **_counts(told)}
        for options, told in figures_by_layout(sizing)
    ]
    lengths = [{"max_model_len": length, **_counts(told)} for length, told in figures_by_length(sizing)]
    groups = [{**asdict(group), "kind": group.kind.value} for group in figures.groups]
    return {**_counts(figures), "groups": groups, "by_layout": layouts, "by_length": lengths}


def _counts(figures: Figures) -> dict[str, object]:
    return {**{name: value for name, value in asdict(figures).items() if name != "groups"}, "gain": figures.gain}


def _draw(title: str, sizing: Sizing, path: Path) -> None:
    from kvplane_service.cli.plan_plot import check_path, draw
    from kvplane_service.models.sizing import figures_by_length

    check_path(path)
    draw(title, figures_by_length(sizing), path)
