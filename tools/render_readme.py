"""Fills the tables of README.md and docs/reliability.md from the files in benchmarks/results.

    python tools/render_readme.py           # rewrites them
    python tools/render_readme.py --check   # fails if that would change them

A block of a page between `<!-- results: NAME -->` and `<!-- end results -->` shows
benchmarks/results/NAME.json: every row of it, also those that are slower than stock.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "reliability.md")
RESULTS = ROOT / "benchmarks" / "results"

_BLOCK = re.compile(r"(<!-- results: ([\w.-]+) -->\n)(.*?)(<!-- end results -->)", re.DOTALL)

# How a results file that is not there is made.
_COMMANDS = {
    "models": "python tools/bench_models.py --output {name}",
    "kernels": "python tools/bench.py --output {name}",
    "cpu": "python tools/bench_cpu.py --output {name}",
    "verify": "python tools/verify_gpu.py --output {name}",
    "convergence": "python tools/convergence.py --device cuda --output {name}",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float | None) -> str:
    """Three digits at least, no more than the measurement is worth."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(slow: float | None, fast: float | None) -> str:
    return "-" if slow is None or fast is None else f"{slow / fast:.2f}x"


def _shape(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["shape"]))


def models(content: dict[str, Any]) -> str:
    """Rows of tools/bench_models.py."""
    rows = []
    for row in content["rows"]:
        if not row["parity"]:
            rows.append([row["name"], "parity failed", "-", "-", "-", "-", "-"])
            continue
        times, peak = row["times"], row["peak_gb"]
        rows.append(
            [
                row["name"],
                number(times["stock"]),
                number(times["override"]),
                _ratio(times["stock"], times["override"]),
                number(times["stock_nchw"]),
                number(times["floor"]),
                f"{peak['stock']:.2f} / {peak['override']:.2f}" if peak else "-",
            ]
        )
    header = ["model, milliseconds", "stock", "gn_override", "speed-up", "stock NCHW", "floor"]
    floors = sorted({row["floor"] for row in content["rows"]})
    return (
        table([*header, "peak GB, stock / ours"], rows)
        + f"\nStock and gn_override run in channels_last. Floor: {'; '.join(floors)}.\n"
    )


def kernels(content: dict[str, Any]) -> str:
    """Rows of tools/bench.py; the limits are 1x a copy forward and 2.5x with the backward."""
    rows = []
    for row in content["rows"]:
        line = [f"{row['name']} {_shape(row)}", row["dtype"], number(row["copy"])]
        for what in ("fwd", "fwd_bwd"):
            times = row[what]
            ours, stock = times["gn_override"], times.get("stock_channels_last")
            nchw = times.get("stock_nchw")
            line += [number(ours), _ratio(ours, row["copy"]), _ratio(stock, ours)]
            line += [_ratio(nchw, ours)]
        rows.append(line)
    parts = ["us", "/ copy", "stock / ours", "stock NCHW / ours"]
    header = ["case", "dtype", "copy, us", *(f"forward {p}" for p in parts)]
    return table([*header, *(f"fwd+bwd {p}" for p in parts)], rows)


def cpu(content: dict[str, Any]) -> str:
    """Rows of tools/bench_cpu.py: medians."""
    rows = []
    for row in content["rows"]:
        median = row["median"]
        line = [f"{_shape(row)}, G={row['groups']}", row["dtype"], number(median["copy"])]
        for what in ("fwd", "fwd_bwd"):
            times = median[what]
            ours = times["gn_override"]
            line += [
                number(ours),
                _ratio(times["stock_channels_last"], ours),
                _ratio(times["stock_nchw"], ours),
            ]
        rows.append(line)
    parts = ["ms", "stock / ours", "stock NCHW / ours"]
    header = ["shape", "dtype", "copy, ms", *(f"forward {p}" for p in parts)]
    return table([*header, *(f"fwd+bwd {p}" for p in parts)], rows)


def verify(content: dict[str, Any]) -> str:
    """Rows of tools/verify_gpu.py: levels, which may be of several commits."""
    rows = []
    for row in content["rows"]:
        numbers = (str(row.get(key, "-")) for key in ("passed", "failed", "skipped", "seconds"))
        source = f"{row['commit']}, {row['date']}"
        rows.append([f"{row['level']}: {row['what']}", row["result"], *numbers, source])
    header = ["level", "result", "passed", "failed", "skipped or as stock", "seconds", "commit"]
    return table(header, rows)


def convergence(content: dict[str, Any]) -> str:
    """Rows of tools/convergence.py: the largest differences of smoothed losses."""
    keys = ("between two seeds", "ours to stock", "last loss")
    rows = [
        [row["dtype"], *(str(row[key]) for key in keys), "passed" if row["good"] else "failed"]
        for row in content["rows"]
    ]
    header = ["dtype", "two stock seeds differ by", "ours and stock differ by", "last loss"]
    return table([*header, "result"], rows)


_RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "models": models,
    "kernels": kernels,
    "cpu": cpu,
    "verify": verify,
    "convergence": convergence,
}


def source(content: dict[str, Any]) -> str:
    """Where the numbers come from: machine, versions, commit, command."""
    if "gpu" in content:
        machine = f"{content['gpu']}, driver {content['driver']}, CUDA {content['cuda']}"
    else:
        machine = f"{content['cpu']}, {content['threads']} threads"
    return (
        f"{machine}, torch {content['torch']}, commit {content['commit']}, {content['date']}: "
        f"`{content['command']}`\n"
    )


def render(text: str, results: Path = RESULTS) -> str:
    """A page's text with every results block filled anew.

    Raises ValueError for a block whose kind, the part of its name before the "-", is unknown.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        kind = name.partition("-")[0]
        if kind not in _RENDERERS:
            raise ValueError(
                f"results block {name!r} is of no known kind ({', '.join(_RENDERERS)})"
            )
        path = results / f"{name}.json"
        if not path.exists():
            body = f"Not measured yet: `{_COMMANDS[kind].format(name=name)}`\n"
        else:
            content = json.loads(path.read_text())
            body = _RENDERERS[kind](content) + "\n" + source(content)
        return f"{match[1]}\n{body}\n{match[4]}"

    return _BLOCK.sub(fill, text)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    options = parser.parse_args(argv)
    stale = 0
    for page in PAGES:
        text = page.read_text()
        rendered = render(text)
        if options.check and rendered != text:
            print(f"{page.name}: run python tools/render_readme.py", file=sys.stderr)
            stale = 1
        elif rendered != text:
            page.write_text(rendered)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
