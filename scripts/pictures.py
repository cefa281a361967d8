"""Draw the pictures of the documents, light and dark: docs/crash-*.svg and docs/system-*.svg (both also in README.md),
and docs/tiers-*.svg.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH = 920


@dataclass(frozen=True)
class Palette:
    """The colours of one picture."""

    text: str
    quiet: str
    line: str
    box: str
    centre: str


PALETTES = {
    "light": Palette(text="#1f2328", quiet="#59636e", line="#0969da", box="#f6f8fa", centre="#ddf4ff"),
    "dark": Palette(text="#f0f6fc", quiet="#9198a1", line="#4493f8", box="#151b23", centre="#10233d"),
}
Box = tuple[int, int, int, int, tuple[str, ...]]  # left, top, width, height, and lines of text: the first is the name
Point = tuple[int, int]
Arrow = tuple[Point, Point, bool, str, Point, str]  # from, to, whether it points both ways; text, its place and anchor


@dataclass(frozen=True)
class Picture:
    """What a picture shows."""

    title: str
    height: int
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


SYSTEM = Picture(
    "Engines send one message per step to the kvplane service; workers hold the pages",
    410,
    (
        (5, 45, 195, 90, ("Routers, indexers", "follow key events")),
        (
            300,
            25,
            320,
            130,
            (
                "kvplane service",
                "a block pool per engine",
                "decides blocks, hits and evictions",
                "explains and replays every decision",
            ),
        ),
        (720, 45, 180, 90, ("Store", "SQLite or Redis")),
        (180, 275, 260, 115, ("Engine", "vLLM, or your own", "schedules and computes", "chooses no block")),
        (560, 275, 260, 115, ("Workers", "one process per rank", "hold pages and their stamps", "survive the engine")),
    ),
    (
        ((300, 90), (200, 90), False, "key events", (250, 78), "middle"),
        ((620, 90), (720, 90), True, "records", (670, 78), "middle"),
        ((345, 275), (345, 155), False, "one message per step", (335, 219), "end"),
        ((395, 155), (395, 275), False, "blocks, hits, orders", (405, 219), "start"),
        ((590, 275), (590, 155), True, "memory plan, claims", (600, 219), "start"),
        ((440, 332), (560, 332), True, "maps pages", (500, 320), "middle"),
    ),
)
TIERS = Picture(
    "What the device evicts next is saved into the host tier and moved to the disk; a hit loads what it lacks",
    400,
    (
        (5, 10, 910, 80, ("kvplane service", "decides what is saved, moved and loaded, in the orders of each step")),
        (
            5,
            160,
            270,
            220,
            ("Device", "pages of the pool", "what runs and was used last", "look-ups see all three"),
        ),
        (620, 160, 295, 90, ("Host tier", "sealed slots in host memory")),
        (620, 290, 295, 90, ("Disk tier", "sealed slots in one file")),
    ),
    (
        ((140, 90), (140, 160), False, "stamps, then copy jobs", (150, 130), "start"),
        ((275, 185), (620, 185), False, "save: what is evicted next", (447, 175), "middle"),
        ((620, 225), (275, 225), False, "load: what the hit lacks, by group", (447, 246), "middle"),
        ((767, 250), (767, 290), False, "move: what the host evicts next", (757, 275), "end"),
        ((620, 335), (275, 335), False, "load", (447, 325), "middle"),
    ),
)

# The figures are those of tests/bench/results/crash.md.
CRASH = Picture(
    "An engine is killed. Without kvplane its prefix cache is lost; with kvplane a worker holds the pages",
    330,
    (
        (5, 20, 200, 90, ("vLLM alone", "KV cache in the engine")),
        (365, 20, 220, 90, ("vLLM starts again", "prefix cache: empty")),
        (685, 20, 230, 90, ("next turn: TTFT 1.18 s", "0 % of the prompt cached")),
        (5, 145, 200, 75, ("vLLM with kvplane", "schedules and computes")),
        (365, 145, 220, 75, ("vLLM starts again", "maps the same pages")),
        (685, 145, 230, 75, ("next turn: TTFT 0.10 s", "98 % of the prompt cached")),
        (5, 255, 910, 60, ("kvplane worker: holds the pages, and proves which content each one has",)),
    ),
    (
        ((205, 65), (365, 65), False, "kill -9", (285, 55), "middle"),
        ((585, 65), (685, 65), False, "", (640, 55), "middle"),
        ((205, 182), (365, 182), False, "kill -9", (285, 172), "middle"),
        ((585, 182), (685, 182), False, "", (640, 172), "middle"),
        ((105, 220), (105, 255), True, "", (105, 240), "start"),
        ((475, 220), (475, 255), True, "", (475, 240), "start"),
        ((805, 220), (805, 255), True, "", (805, 240), "start"),
    ),
)


def drawn(picture: Picture, palette: Palette) -> str:
    """Return the SVG."""
    width, height = WIDTH, picture.height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" role="img">',
        f"<title>{picture.title}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{palette.line}"/></marker></defs>',
    ]
    for left, top, width, height, lines in picture.boxes:
        fill = palette.centre if lines[0].startswith("kvplane") else palette.box
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" fill="{fill}" '
            f'stroke="{palette.line}" stroke-width="1.5"/>'
        )
        first = top + height / 2 - 12 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            name = f'font-weight="600" font-size="16" fill="{palette.text}"'
            style = f'fill="{palette.quiet}"' if number else name
            where = f'x="{left + width / 2:g}" y="{first + 24 * number:g}"'
            parts.append(f'<text {where} text-anchor="middle" {style}>{line}</text>')
    for (x1, y1), (x2, y2), both, text, (x, y), anchor in picture.arrows:
        start = ' marker-start="url(#tip)"' if both else ""
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{palette.line}" stroke-width="1.5"{start} '
            'marker-end="url(#tip)"/>'
        )
        if text:
            style = f'font-size="13" fill="{palette.text}"'
            parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" {style}>{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write all pictures."""
    for name, picture in (("crash", CRASH), ("system", SYSTEM), ("tiers", TIERS)):
        for shade, palette in PALETTES.items():
            (DOCS / f"{name}-{shade}.svg").write_text(drawn(picture, palette), encoding="utf-8")


if __name__ == "__main__":
    main()
