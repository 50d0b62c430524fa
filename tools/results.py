"""What every results file says of where it was measured, and how it is written."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What changes the kernels that are measured.
ENVIRONMENT = ("GN_OVERRIDE_WHOLE_CHIP", "GN_OVERRIDE_KEEP_MEMORY")
# Options that name a folder or a file of the machine.
PLACES = ("--folder", "--plot", "--roofline", "--log", "--pytorch")


def count(text: str) -> int:
    """The type of an argument of which there must be one at least."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return value


class Parser(argparse.ArgumentParser):
    """Of a benchmark's arguments. It has --output and --folder, and looks at once whether they can
    be written; and --from, if asked to, whose file is then `content` of the arguments.

    Options are spelt out, so that command() knows those that name a place.
    """

    def __init__(self, doc: str | None, again: bool = False) -> None:
        super().__init__(description=(doc or "").partition("\n")[0], allow_abbrev=False)
        group = self.add_mutually_exclusive_group()
        group.add_argument("--output", default="", help="name of the results file to write")
        self.add_argument("--folder", type=Path, default=RESULTS, help="its folder")
        self.set_defaults(source=None)
        if again:
            text = "a results file: print and draw it, and measure nothing"
            group.add_argument("--from", dest="source", type=Path, metavar="FILE", help=text)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = super().parse_args(args, namespace)
        try:
            if arguments.source:
                arguments.content = read(arguments.source)
            if arguments.output:
                _try_to_write(arguments.output, arguments.folder)
        except (OSError, ValueError) as error:
            self.error(f"{'--from' if arguments.source else '--output'}: {error}")
        return arguments


def _try_to_write(name: str, folder: Path) -> None:
    """Raises OSError or ValueError where write() or update() would fail."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{name!r} is no name: letters, digits, and any of _ . -")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    if (path := folder / f"{name}.json").exists():
        read(path)


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """The commit that was measured, "-dirty" if the tree differs from it but for its results.

    A copy of the tree without its history takes the name from GN_OVERRIDE_COMMIT.
    """
    if given := os.environ.get("GN_OVERRIDE_COMMIT"):
        return given
    described = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if not described:
        return "unknown"
    measured = (".", f":(exclude){RESULTS.relative_to(ROOT).as_posix()}")
    changed = _output_of("git", "status", "--porcelain", "--untracked-files=no", "--", *measured)
    return f"{described}-dirty" if changed else described


def command() -> str:
    """The command line, with what the environment says of launches, and without the machine's
    folders: those that files are written to are left out, and that of a checkout has a name."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(ROOT)
    words = [str(script.relative_to(ROOT)) if inside else sys.argv[0]]
    given = iter(sys.argv[1:])
    for word in given:
        option, has_value, _ = word.partition("=")
        if option not in PLACES:
            words.append(word)
            continue
        if not has_value:
            next(given, None)
        if option == "--pytorch":
            words += [option, "CHECKOUT"]
    environment = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    return shlex.join([*environment, "python", *words])


def merged(
    old: Sequence[dict[str, Any]],
    new: Sequence[dict[str, Any]],
    key: str,
    order: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """The newest of the rows with the same key: those that `order` names, or all as they came."""
    rows = {row[key]: row for row in (*old, *new)}
    return [rows[name] for name in (rows if order is None else order) if name in rows]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine(device: str) -> dict[str, Any]:
    """Where and from what: the head of a results file. device is "cuda" or "cpu"."""
    described: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        query = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        described |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _output_of(*query),
            "cuda": torch.version.cuda,
        }
    else:
        described["threads"] = torch.get_num_threads()
    return described


def read(path: Path) -> dict[str, Any]:
    """A results file. Raises OSError, or ValueError if it is something else."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if isinstance(content["rows"], list):
            return content
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is no results file")


def write(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write folder/name.json, one row a line, and return its path: all of it, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in content.get("rows", ()))
    text = json.dumps(head, indent=1)
    if rows:
        text = f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}'
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n")
    os.replace(unfinished, path)
    return path


def update(
    name: str,
    content: dict[str, Any],
    key: str,
    folder: Path = RESULTS,
    order: Iterable[str] | None = None,
) -> Path:
    """write(), but the file keeps those of its rows that `content` has not: see merged().

    So each row says by which command it was measured.
    """
    path = folder / f"{name}.json"
    before = read(path)["rows"] if path.exists() else []
    rows = [row | {"command": content["command"]} for row in content["rows"]]
    return write(name, content | {"rows": merged(before, rows, key, order)}, folder)
