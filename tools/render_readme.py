"""Fills the tables of README.md and docs/ from the files in benchmarks/results.

    python tools/render_readme.py           # rewrites them
    python tools/render_readme.py --check   # fails if that would change one

A block between `<!-- results: NAME -->` and `<!-- end results -->` shows
benchmarks/results/NAME.json: every row of it, also those that are slower than stock. With
`<!-- results: NAME only ROW,ROW -->` it shows the rows of these names.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from results import RESULTS, ROOT

from gn_override._bench import speed_up

FILES = tuple(ROOT / name for name in ("README.md", "docs/benchmarks.md", "docs/reliability.md"))
TITLES = {"fwd": "forward", "fwd_bwd": "forward and backward"}

_BLOCK = re.compile(
    r"(<!-- results: ([\w.-]+)(?: only ([\w:,]+))? -->\n)(.*?)(<!-- end results -->)", re.DOTALL
)

# How a results file that is not there is made.
_COMMANDS = {
    "models": "python tools/bench_models.py --output {name}",
    "kernels": "python tools/bench.py --output {name}",
    "fused": "python tools/bench.py --activation silu --output {name}",
    "cpu": "python tools/bench_cpu.py --output {name}",
    "sweep": "python tools/sweep.py --output {name}",
    "host": "python tools/bench_host.py --output {name}",
    "ddp": "python tools/bench_ddp.py --output {name}",
    "verify": "python tools/verify_gpu.py --output {name}",
    "convergence": "python tools/convergence.py --device cuda --output {name}",
    "demo": "python -m gn_override demo",
    "size": "python tools/code_size.py --output {name}",
    "counters": "python tools/counters.py --output {name}",
    "tune": "python tools/tune.py --output {name}",
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


# What whole models are held against besides stock, and the title of its column.
_LIMITS = {"stock_nchw": "stock NCHW", "floor": "no such norms", "copies": "norms as copies"}
# What tools/neighbours.py finds, and the title of its column.
_COMPILED = {
    "graphs": "graphs",
    "graph_breaks": "graph breaks",
    "norms": "norm calls",
    "copies": "generated kernels that only copy",
    "copies_at_norms": "of these, next to a norm",
    "layout_kernels": "library kernels that change the layout",
    "layout_kernels_at_norms": "of these, next to a norm",
}


def models(content: dict[str, Any]) -> str:
    """Rows of tools/bench_models.py."""
    rows = []
    for row in content["rows"]:
        if not row["times"]:
            why = "not timed" if row["parity"] else "parity failed"
            rows.append([row["name"], why, *["-"] * (len(_LIMITS) + 4), row["commit"]])
            continue
        times, peak = row["times"], row["peak_gb"]
        rows.append(
            [
                row["name"],
                number(times["stock"]),
                number(times["override"]),
                _ratio(times["stock"], times["override"]),
                *(number(times[key]) if key in times else "-" for key in _LIMITS),
                f"{peak['stock']:.2f} / {peak['override']:.2f}" if peak else "-",
                row["commit"],
            ]
        )
    compiled = [
        [row["name"].partition(",")[0], *(str(row["compiled"][key]) for key in _COMPILED)]
        for row in content["rows"]
        if row["parity"] and row.get("compiled")
    ]
    header = ["model, milliseconds", "stock", "gn_override", "speed-up", *_LIMITS.values()]
    models_of: dict[str, dict[str, None]] = {}
    for row in content["rows"]:
        if row["floor"]:
            models_of.setdefault(row["floor"], {})[row["name"].partition(",")[0]] = None
    floors = "; ".join(f"of {' and '.join(names)}, {floor}" for floor, names in models_of.items())
    legend = f"No such norms: {floors}. "
    if "BatchNorm" in legend:
        legend += "The time with BatchNorm is a comparison, not a bound. "
    return (
        table([*header, "peak GB, stock / ours", "commit"], rows)
        + f"\nStock and gn_override run in channels_last. {legend}"
        + "Norms as copies: each norm only copies its input.\n"
        + (f"\n{table(['compiled model', *_COMPILED.values()], compiled)}" if compiled else "")
    )


def _losses(rows: Sequence[dict[str, Any]]) -> str:
    """Which of all rows, shown or not, stock's better layout is faster in."""
    slower = [
        f"{row['name']} {_shape(row)} {row['dtype']} {title}"
        for row in rows
        for what, title in TITLES.items()
        if speed_up(row.get("median", row), what) < 1
    ]
    names = ", ".join(slower) or "none"
    return f"\nOf {len(rows)} rows, slower than stock's better layout: {names}.\n"


def _checkout(rows: Sequence[dict[str, Any]]) -> str:
    """How the kernels of a checkout of PyTorch, if they were run, compare where ours serve."""
    said = []
    for what, title in TITLES.items():
        ratios = [
            row[what]["pytorch"] / row[what]["gn_override"]
            for row in rows
            if "pytorch" in row.get(what, ()) and not row.get("one_layout")
        ]
        if ratios:
            shown = (f"{number(f(ratios))}x" for f in (min, max, statistics.median))
            said.append("{} {} to {}, median {}".format(title, *shown))
    if not said:
        return ""
    return f"\nChannels-last kernels of a PyTorch checkout / ours: {'; '.join(said)}.\n"


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


# What a fused activation is to cost a forward at most.
_FUSED_GOAL = 1.03


def fused(content: dict[str, Any]) -> str:
    """Rows of tools/bench.py --activation: our norm alone, and with the activation in two ways."""
    rows = content["rows"]
    steps = {"fwd": "forward", "fwd_bwd": "fwd+bwd"}
    ratios = {step: [row[step]["fused"] / row[step]["alone"] for row in rows] for step in steps}
    lines = []
    for i, row in enumerate(rows):
        line = [
            f"{row['name']} {_shape(row)}" + (" (wrong)" if "wrong" in row else ""),
            row["dtype"],
        ]
        for step in steps:
            line += [number(row[step][name]) for name in ("alone", "followed", "fused")]
            line.append(f"{ratios[step][i]:.3f}x")
        lines.append(line)
    columns = ("alone, us", f"then {content['activation']}", "fused", "fused / alone")
    header = [f"{step} {column}" for step in steps.values() for column in columns]
    within = sum(ratio <= _FUSED_GOAL for ratio in ratios["fwd"])

    def spread(of: Sequence[float]) -> str:
        largest = lines[of.index(max(of))]
        return (
            f"median {statistics.median(of):.3f}x, largest {max(of):.3f}x ({' '.join(largest[:2])})"
        )

    return table(["case", "dtype", *header], lines) + (
        f"\nForward within {_FUSED_GOAL - 1:.0%}, the goal: {within} of {len(rows)} rows; "
        f"{spread(ratios['fwd'])}. Forward and backward: {spread(ratios['fwd_bwd'])}.\n"
    )


def cpu(content: dict[str, Any]) -> str:
    """Rows of tools/bench_cpu.py: medians."""
    copies = {"copy": "copy, ms", "copy_new": "copy to a new tensor, ms"}
    if all("moved" in row["median"] for row in content["rows"]):
        copies["moved"] = "moved, ms"
    rows = []
    for row in content["rows"]:
        median = row["median"]
        line = [f"{_shape(row)}, G={row['groups']}", row["dtype"]]
        line += [number(median[key]) for key in copies]
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
    header = ["shape", "dtype", *copies.values(), *(f"forward {p}" for p in parts)]
    text = table([*header, *(f"fwd+bwd {p}" for p in parts)], rows)
    means = "; ".join(
        f"{title} {content['summary'][f'{what} over stock channels-last, mean']}x"
        for what, title in (TITLES | {"moved": "forward over moved"}).items()
        if f"{what} over stock channels-last, mean" in content["summary"]
    )
    return text + f"\nStock's time in channels-last over ours, mean of all rows: {means}.\n"


# Rows of tools/sweep.py above this size are large: the copy's time is not that of its launch.
LARGE_MB = 16
# Times stock's, from which on a row counts as slower: less is noise.
SLOWER = 1.05


def is_large(row: dict[str, Any]) -> bool:
    """Of a row of tools/sweep.py."""
    return bool(row["MB"] > LARGE_MB)


def sweep(content: dict[str, Any]) -> str:
    """Rows of tools/sweep.py by what decides their speed, and those that are slower than stock."""
    rows = [row for row in content["rows"] if not row["one_layout"] and "error" not in row]
    half = [row for row in rows if row["dtype"] in ("float16", "bfloat16")]
    kinds = {
        "all": rows,
        "half precision, 8 divides C": [row for row in half if row["shape"][1] % 8 == 0],
        "half precision, odd C": [row for row in half if row["shape"][1] % 2],
    }
    lines = []
    for name, found in kinds.items():
        large = sorted(row["fwd"]["gn_override"] / row["copy"] for row in found if is_large(row))
        line = [name, str(len(found)), str(len(large))]
        line += [f"{value:.2f}x" for value in (large[0], statistics.median(large), large[-1])]
        for what in ("fwd", "fwd_bwd"):
            line.append(f"{statistics.median(speed_up(row, what) for row in found):.2f}x")
            line.append(str(sum(speed_up(row, what) < 1 / SLOWER for row in found)))
        lines.append(line)
    header = ["random shapes", "shapes", f"above {LARGE_MB} MB"]
    header += [
        f"forward / copy above {LARGE_MB} MB, {word}" for word in ("least", "median", "most")
    ]
    for title in ("forward", "fwd+bwd"):
        header += [f"{title} stock / ours, median", f"{title} slower by over 5%"]
    slower = [
        f"{_shape(row)}, G={row['groups']}, {row['dtype']}, {title} {speed_up(row, what):.2f}x"
        for what, title in TITLES.items()
        for row in rows
        if speed_up(row, what) < 1 / SLOWER
    ]
    return table(header, lines) + (
        f"\nStock is its better layout. Slower: {'; '.join(slower) or 'none'}.\n"
    )


def host(content: dict[str, Any]) -> str:
    """Rows of tools/bench_host.py."""
    rows = [
        [
            f"{row['layout']}, {row['call']}",
            *(number(row[name]) for name in ("stock", "off", "on")),
            *(f"{row['ratio'][name]:.2f}x" for name in ("off", "on")),
        ]
        for row in content["rows"]
    ]
    return table(["host us a call", "stock", "off", "on", "off / stock", "on / stock"], rows)


def ddp(content: dict[str, Any]) -> str:
    """Rows of tools/bench_ddp.py."""
    rows = [
        [
            row["name"],
            *(number(row[name]) for name in ("alone", "together")),
            f"{row['ratio']:.2f}x",
            *(number(row[name]) for name in ("host", "all-reduce")),
        ]
        for row in content["rows"]
    ]
    header = ["milliseconds a step", "alone", "DDP", "DDP / alone", "of the host", "of all-reduce"]
    return table(header, rows) + (
        f"\n{content['processes']} GPUs, a batch of {content['batch']} on each; "
        "the figures are those of the slowest process.\n"
    )


def size(content: dict[str, Any]) -> str:
    """Rows of tools/code_size.py."""
    rows = [[row["name"], f"{row['bytes'] / 1e6:.1f}"] for row in content["rows"]]
    return table([f"by nvcc {content['nvcc']}", "MB"], rows)


def verify(content: dict[str, Any]) -> str:
    """Rows of tools/verify_gpu.py: levels, which may be of several commits."""
    rows = []
    for row in content["rows"]:
        numbers = (str(row.get(key, "-")) for key in ("passed", "failed", "skipped", "seconds"))
        source = f"{row['commit']}, {row['date']}"
        what = f"{row['level']}: {row['what']}"
        if "norm_calls" in row:
            what += f": {row['norm_calls']:,} made"
        rows.append([what, row["result"], *numbers, source])
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


def demo(content: dict[str, Any]) -> str:
    """What the demo printed: milliseconds, and errors of its worst layer."""
    rows = [
        [
            row["network"],
            number(row["off"]),
            number(row["on"]),
            f"{row['speed-up']:.2f}x",
            *(f"{row[f'worst layer error {switch}']:.1e}" for switch in ("off", "on")),
            row["parity"],
        ]
        for row in content["rows"]
    ]
    header = ["network, milliseconds", "off", "on", "speed-up", "worst layer error, off", "on"]
    return table([*header, "parity"], rows)


def counters(content: dict[str, Any]) -> str:
    """Rows of tools/counters.py: each step's, and what its traffic takes at elementwise's rate."""
    rates = {
        (row["name"], row["dtype"]): (row["read"] + row["written"]) / row["us"]
        for row in content["rows"]
        if row["step"] == "elementwise"
    }
    header = ["step", "dtype", "us", "at elementwise's rate", "read MB", "least", "written MB"]
    shares = {"dram": "DRAM %", "issue": "issue %", "special": "special functions %"}
    return table(
        [*header, *shares.values(), "waits"],
        (
            [
                f"{row['name']} {_shape(row)}, {row['step'].replace('fwd_bwd', 'fwd+bwd')}",
                row["dtype"],
                number(row["us"]),
                number((row["read"] + row["written"]) / rates[row["name"], row["dtype"]]),
                *(number(row[key]) for key in ("read", "least", "written", *shares)),
                ", ".join(f"{name} {share}%" for name, share in row["stalls"].items()),
            ]
            for row in content["rows"]
        ),
    )


def tune(content: dict[str, Any]) -> str:
    """Rows of tools/tune.py: what moving alone takes, the best plan, the policy's."""
    rows = []
    for row in content["rows"]:
        moved = min(row["moved"].values(), default=None)
        taken = (moved, min(row["plans"].values()), row["plans"][row["policy"]])
        given = ":" in row["name"]  # on the command line, with its groups and type
        name = _shape(row) if given else f"{row['name']} {_shape(row)}"
        rows.append(
            [
                f"{name}, {row['direction']}",
                row["dtype"],
                number(row["copy"]),
                *map(number, taken),
                *(_ratio(time, row["copy"]) for time in taken),
            ]
        )
    times = ["moved", "best plan", "the policy's"]
    return table(["step", "dtype", "copy", *times, *(f"{time} / copy" for time in times)], rows)


_RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "models": models,
    "kernels": kernels,
    "fused": fused,
    "cpu": cpu,
    "sweep": sweep,
    "host": host,
    "ddp": ddp,
    "verify": verify,
    "convergence": convergence,
    "demo": demo,
    "size": size,
    "counters": counters,
    "tune": tune,
}


# A list of shapes that is this long is printed in part; the results file has all of it.
_LONG_WORD = 160


def source(content: dict[str, Any]) -> str:
    """Where the numbers come from: machine, versions, commit, commands."""
    if "gpu" in content:
        machine = f"{content['gpu']}, driver {content['driver']}, CUDA {content['cuda']}"
    else:
        machine = f"{content['cpu']}, {content['threads']} threads"

    def shown(command: str) -> str:
        words = command.split(" ")
        return " ".join(w if len(w) < _LONG_WORD else f"{w[: _LONG_WORD // 2]}..." for w in words)

    def command_of(row: dict[str, Any]) -> str | None:
        # The head's is the last run's, which made no row of another commit.
        last = row.get("commit", content["commit"]) == content["commit"]
        return row.get("command", content["command"] if last else None)

    rows = content["rows"]
    of_rows = [f"`{shown(command)}`" for command in dict.fromkeys(map(command_of, rows)) if command]
    unknown = [row.get("level") or row["name"] for row in rows if not command_of(row)]
    if unknown:
        of_rows.append(f"command not recorded: {', '.join(unknown)}")
    return (
        f"{machine}, torch {content['torch']}, commit {content['commit']}, {content['date']}: "
        f"{'; '.join(of_rows)}\n"
    )


def render(text: str, results: Path = RESULTS) -> str:
    """A file's text with every results block filled anew.

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
            losses = _losses(content["rows"]) if kind in ("kernels", "cpu") else ""
            losses += _checkout(content["rows"]) if kind in ("kernels", "sweep") else ""
            if match[3]:
                only = match[3].split(",")
                missing = set(only) - {row["name"] for row in content["rows"]}
                if missing:
                    raise ValueError(f"results block {name!r}: no rows {sorted(missing)}")
                content["rows"] = [row for row in content["rows"] if row["name"] in only]
            body = _RENDERERS[kind](content) + losses + "\n" + source(content)
        return f"{match[1]}\n{body}\n{match[5]}"

    return _BLOCK.sub(fill, text)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    options = parser.parse_args(argv)
    different = False
    for path in FILES:
        text = path.read_text()
        rendered = render(text)
        if rendered != text and options.check:
            name = path.relative_to(ROOT)
            print(f"{name}: run python tools/render_readme.py", file=sys.stderr)
            different = True
        elif rendered != text:
            path.write_text(rendered)
    return int(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
