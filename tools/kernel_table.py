"""What the rows of tools/bench.py say: rates, text, rows that we lose, a picture.

Bytes are the least that must move, the same for every provider: X is read and Y written forward;
X, dY and X again are read, Y and dX written, forward and backward together. A copy moves two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import render_readme
import torch

from gn_override import _picture
from gn_override._bench import DIRECTIONS, OURS, STOCK, Row, speed_up

CHECKOUT = "pytorch"  # the kernels of a checkout, see tools/pytorch_kernels.py
OPERANDS = {"copy": 2, "fwd": 2, "fwd_bwd": 5}  # of the size of X


def least_bytes(row: Row, what: str) -> int:
    """The least traffic of a copy ("copy") or a direction, in bytes."""
    return OPERANDS[what] * math.prod(row["shape"]) * getattr(torch, row["dtype"]).itemsize


def speed(row: Row, what: str, time: float) -> float:
    """Effective GB/s: the least traffic over a time in microseconds."""
    return least_bytes(row, what) / time / 1e3


def rates(row: Row) -> Row:
    """{"GB/s": {"copy": of it, direction: by provider}, "share": {direction: by provider}}."""
    copy = speed(row, "copy", row["copy"])
    speeds: Row = {"copy": round(copy, 1)}
    shares: Row = {}
    for what in DIRECTIONS:
        found = {name: speed(row, what, time) for name, time in row[what].items()}
        speeds[what] = {name: round(value, 1) for name, value in found.items()}
        shares[what] = {name: round(value / copy, 3) for name, value in found.items()}
    return {"GB/s": speeds, "share": shares}


def over(row: Row, what: str, names: Sequence[str] = STOCK) -> float | None:
    """speed_up(), or None if none of the names was measured."""
    return speed_up(row, what, names) if any(name in row[what] for name in names) else None


def providers_of(rows: Sequence[Row]) -> list[str]:
    """Everyone that was asked, ours first, also those that failed on every row."""
    names = [OURS]
    for row in rows:
        names += [*row["fwd"], *row["fwd_bwd"], *row.get("failed", ())]
    return list(dict.fromkeys(names))


def _title(name: str) -> str:
    return {
        OURS: "ours",
        "stock_channels_last": "stock NHWC",
        "stock_nchw": "stock NCHW",
        CHECKOUT: "checkout NHWC",
    }.get(name, name)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one block a direction.

    Of each provider the microseconds and the share of the copy's rate; "-" where it failed, "!"
    where its result is wrong.
    """
    others = [name for name in providers_of(rows) if name != OURS]
    lines = []
    for what, title in DIRECTIONS.items():
        head = f"{'case':<10}{'dtype':<10}{'MB':>8}{'copy us':>9}{'GB/s':>7}"
        head += f"{'ours us':>10}{'GB/s':>7}{'share':>7}"
        lines += [title, head + "".join(f"{_title(name):>16}" for name in others)]
        for row in rows:
            rate = rates(row)
            line = f"{row['name']:<10}{row['dtype']:<10}{least_bytes(row, 'copy') / 2e6:>8.1f}"
            line += f"{row['copy']:>9.1f}{rate['GB/s']['copy']:>7.0f}{row[what][OURS]:>10.1f}"
            line += f"{rate['GB/s'][what][OURS]:>7.0f}{rate['share'][what][OURS]:>7.0%}"
            for name in others:
                if name in row[what]:
                    mark = "!" if what in row.get("differs", {}).get(name, ()) else " "
                    share = f"{rate['share'][what][name]:.0%}"
                    line += f"{row[what][name]:>10.1f}{share:>5}{mark}"
                else:
                    line += f"{'-':>10}{'':6}"
            lines.append(line.rstrip() + (f"  WRONG: {row['wrong']}" if "wrong" in row else ""))
        lines.append("")
    lines.append("share: of the copy's rate, by the least traffic: 2 X forward, 5 X with backward")
    if any(row.get("differs") for row in rows):
        lines.append("!: the result differs from stock's by more than rounding")
    return "\n".join(lines)


def losses(rows: Sequence[Row]) -> list[str]:
    """Rows where anyone beats us, by name."""
    return [
        f"{row['name']} {row['dtype']} {DIRECTIONS[what]}: ours {row[what][OURS]} us, "
        f"{name} {time} us" + (" (wrong)" if what in row.get("differs", {}).get(name, ()) else "")
        for row in rows
        for what in DIRECTIONS
        for name, time in row[what].items()
        if name != OURS and time < row[what][OURS]
    ]


def before_after(rows: Sequence[Row], before: str) -> str:
    """A Markdown table for PyTorch's reviewers: stock NCHW, and channels-last before and after.

    before   who stands for PyTorch's kernels before the change; ours are those after it
    """
    lines = []
    for row in rows:
        line = [
            "x".join(map(str, row["shape"])),
            row["dtype"],
            f"{row['MB']:.1f}",
            render_readme.number(row["copy"]),
        ]
        for what in DIRECTIONS:
            old, new = row[what][before], row[what][OURS]
            times = (row[what]["stock_nchw"], old, new)
            line += [*map(render_readme.number, times), f"{old / new:.2f}x"]
        lines.append(line)
    header = ["N x C x H x W", "dtype", "MB", "copy us"]
    for title in DIRECTIONS.values():
        header += [f"{title}: NCHW us", "before us", "after us", "speed-up"]
    return render_readme.table(header, lines)


def over_copy(rows: Sequence[Row], what: str, provider: str) -> str:
    """The least and the largest ratio of a provider's times to a copy's: "1.02 to 1.59"."""
    ratios = [row[what][provider] / row["copy"] for row in rows]
    return " to ".join(render_readme.number(ratio) for ratio in (min(ratios), max(ratios)))


def _draw_roofline(axes: Any, rows: Sequence[Row]) -> None:
    """Effective GB/s against the least bytes moved; the copy is the roof."""
    roof = sorted((least_bytes(row, "copy") / 1e6, speed(row, "copy", row["copy"])) for row in rows)
    colours = dict(zip(DIRECTIONS, (_picture.GAIN, _picture.LOSS), strict=True))
    axes.plot(*zip(*roof, strict=True), ".-", color=_picture.INK, linewidth=0.8, label="copy")
    for what, title in DIRECTIONS.items():
        moved = [least_bytes(row, what) / 1e6 for row in rows]
        speeds = [speed(row, what, row[what][OURS]) for row in rows]
        axes.plot(moved, speeds, "o", color=colours[what], label=title)
    for what, mark in zip(DIRECTIONS, "+x", strict=True):
        points = [
            (least_bytes(row, what) / 1e6, speed(row, what, ratio * row[what][OURS]))
            for row in rows
            if (ratio := over(row, what))
        ]
        if points:
            label = f"stock's better, {DIRECTIONS[what]}"
            axes.plot(*zip(*points, strict=True), mark, color=colours[what], label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("least traffic, MB")
    axes.set_ylabel("effective GB/s")
    axes.legend(fontsize="small", framealpha=0)


def pictures(content: dict[str, Any], bars: Path | None, roofline: Path | None) -> None:
    """Draw a results file: speed-ups as bars, and the roofline. Needs matplotlib.

    Paths end in .svg or .png; drawing the same file twice gives the same SVG.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = content["rows"]
    caption = render_readme.source(content).strip().replace("`", "")
    if bars:
        panels = {
            title: [
                (f"{'x'.join(map(str, row['shape']))} {row['dtype']}", ratio)
                for row in rows
                if (ratio := over(row, what))
            ]
            for what, title in DIRECTIONS.items()
        }
        _picture.bars(panels, caption, bars)
    if roofline:
        with matplotlib.rc_context(_picture.STYLE):
            figure = Figure(figsize=(10, 6), layout="constrained")
            figure.patch.set_alpha(0)
            axes = figure.subplots()
            axes.patch.set_alpha(0)
            _draw_roofline(axes, rows)
            _picture.save(figure, caption, roofline)
