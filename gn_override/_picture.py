"""Speed-ups as bars, for light and for dark pages. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# On a transparent ground: all of these can be read on white and on nearly black.
INK = "#737d89"
GAIN = "#2f81f7"
LOSS = "#d1622b"

# Text stays text. The same figure gives the same SVG.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gn_override",
    "font.family": ["DejaVu Sans", "sans-serif"],
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


def path(text: str) -> Path:
    """The argument of --plot: a path that ends in .svg or .png, in a folder that is there."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError("a picture's name ends in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a picture needs matplotlib, the extra gn_override[plot]: pip install matplotlib"
        )
    target = Path(text)
    if not target.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {target.parent}")
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{target} cannot be written")
    return target


def bars(panels: Mapping[str, Sequence[tuple[str, float]]], caption: str, target: Path) -> None:
    """Draw speed-ups, a panel each with a bar for every row; those below 1 in another colour.

    Args:
        panels: title -> (label, time of stock's faster layout over ours) of each row, the same
            rows in all.
        caption: where the numbers come from.
        target: ends in .svg or .png.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = max(len(values) for values in panels.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 0.9 + 0.19 * rows), layout="constrained")
        figure.patch.set_alpha(0)
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, values) in zip(all_axes, panels.items(), strict=True):
            places = range(len(values), 0, -1)
            ratios = [ratio for _, ratio in values]
            colours = [GAIN if ratio >= 1 else LOSS for ratio in ratios]
            drawn = axes.barh(places, ratios, height=0.7, color=colours)
            axes.bar_label(drawn, [f"{ratio:.1f}x" for ratio in ratios], padding=3, fontsize=8)
            axes.set_yticks(places, [label for label, _ in values], fontsize=8)
            axes.axvline(1, color=INK, linewidth=0.8)
            axes.set_xlim(0, 1.12 * max(ratios))
            axes.set_ylim(0.4, len(values) + 0.6)
            axes.set_title(f"{title}, times as fast as PyTorch", fontsize=9)
            axes.tick_params(length=0, labelsize=8)
            axes.patch.set_alpha(0)
            for side in ("top", "right", "bottom"):
                axes.spines[side].set_visible(False)
            axes.xaxis.set_visible(False)
        meaning = "The line: PyTorch's own kernels, in the faster of NCHW and channels-last."
        save(figure, f"{meaning} {caption}", target)


def save(figure: Any, caption: str, target: Path) -> None:
    """Write a matplotlib figure with its caption; the same one gives the same bytes."""
    figure.supxlabel("\n".join(textwrap.wrap(caption, 130)), fontsize=7)
    metadata = {"Date": None} if target.suffix == ".svg" else None
    figure.savefig(target, metadata=metadata, dpi=150)
