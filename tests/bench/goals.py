"""Figures that have goals: each is a row of a table, with its reference from the same run and whether it is reached."""

from __future__ import annotations

HEAD = ("| figure | measured, and its reference | value | goal | |", "|---|---|---|---|---|")


def goal(figure: str, text: str, value: float, least: float | None = None, most: float | None = None) -> bool:
    """Print a figure; returns whether it reaches its goal, at least or at most this."""
    is_reached = (least is None or value >= least) and (most is None or value <= most)
    bound = f">= {least:,g}" if least is not None else f"<= {most:,g}"
    print(f"| {figure} | {text} | {value:,.3f} | {bound} | {'reached' if is_reached else '**missed**'} |", flush=True)
    return is_reached
