"""Everything that must hold on a GPU machine, by one command, level by level.

    python tools/verify_gpu.py --output verify-h200              # all of it
    python tools/verify_gpu.py torch memcheck --output verify-h200
    python tools/verify_gpu.py --list

Each level is a command of its own that takes at most some ten minutes. With --output the rows of
the levels that ran replace theirs in the results file, and the others stay: levels may run one by
one. --jobs runs several levels at a time, then those that cannot share the machine, and so do
pytest's processes in a level of many tests where pytest-xdist is installed. --device cpu runs what
a machine without a GPU can. The table comes last; the exit status is 0 if every level that ran
passed. docs/reliability.md shows the results file.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import progress
import results
import torch

TESTS = results.ROOT / "tests"
TOOLS = results.ROOT / "tools"
SANITIZERS = {
    "memcheck": "accesses out of bounds",
    "racecheck": "races in shared memory",
    "initcheck": "reads of memory that nobody has written",
    "synccheck": "barriers that not all threads reach",
}
# Norm calls of the soak: more than any network in models-h200.json makes in an hour.
HOUR_OF_CALLS = 40_000_000


@dataclass(frozen=True)
class Level:
    """One command. `arguments` of pytest if `tests` are named, else of python."""

    name: str
    what: str
    arguments: tuple[str, ...]
    tests: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    sanitizer: str = ""
    many: bool = False  # tests, which may run in several processes
    alone: bool = False  # it counts what others would change, or takes the memory that they need

    def command(self, report: str = "REPORT") -> list[str]:
        """What runs; pytest writes its counts to the file `report`."""
        if self.tests:
            files = [str(TESTS / test) for test in self.tests]
            options = ["-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
            options += ["-o", "junit_family=xunit1"]  # which has record_property
            options += ["--disable-warnings"]  # run() prints the last of what a failure says
            if self.many and importlib.util.find_spec("xdist"):
                options += ["-n", str(min(12, max(1, (os.cpu_count() or 1) // 2)))]
            return [sys.executable, "-m", "pytest", *files, *self.arguments, *options]
        prefix = []
        if self.sanitizer:
            prefix = ["compute-sanitizer", "--tool", self.sanitizer, "--error-exitcode", "1"]
        return [*prefix, sys.executable, *self.arguments]


def levels(device: str) -> list[Level]:
    """Of a device, in the order in which they run."""
    only = ("-k", device)
    often = {"GN_OVERRIDE_TEST_EXAMPLES": "2000" if device == "cuda" else "300"}
    if device == "cuda":
        faults = "threads, workers, memory that runs out, replays"
        soak_what = "training steps and graph replays, an hour of a network's norm calls"
        soak = {
            "GN_OVERRIDE_TEST_SOAK_SECONDS": "60",
            "GN_OVERRIDE_TEST_SOAK_CALLS": str(HOUR_OF_CALLS),
            "GN_OVERRIDE_TEST_SOAK_LIMIT": "480",
        }
    else:
        faults = "threads, workers, errors"
        soak_what = "training steps for seven minutes"
        soak = {"GN_OVERRIDE_TEST_SOAK_SECONDS": "300"}
    marked = "(cuda or cuda_build) and not large" if device == "cuda" else "not cuda"
    samples = ("test_opinfo.py", "test_operators.py")
    apart = (*samples, "test_properties.py", "test_faults.py", "test_distributed.py")
    rest = sorted(path.name for path in TESTS.glob("test_*.py") if path.name not in apart)
    found = [
        Level(
            "suite",
            "parity, cases, dispatch, compile, schemes, models",
            ("-m", marked),
            tuple(rest),
            many=True,
        ),
        Level(
            "torch",
            "PyTorch's own samples: of group norms, with its checks; of what may come after",
            only,
            samples,
            many=True,
        ),
        Level(
            "properties",
            f"random calls, {often['GN_OVERRIDE_TEST_EXAMPLES']} examples of each property",
            only,
            ("test_properties.py",),
            often,
            many=True,
        ),
        Level(
            "faults",
            faults,
            ("-m", "not large", "-k", f"not soak and (workers or {device})"),
            ("test_faults.py",),
        ),
        Level(
            "soak",
            soak_what,
            ("-k", f"soak and {device}"),
            ("test_faults.py",),
            soak,
            alone=True,
        ),
        Level(
            "distributed",
            "DDP, FSDP2, DTensor in two processes",
            ("-k", f"{device} or whole_chip"),
            ("test_distributed.py",),
        ),
        Level(
            "convergence",
            "training with the override off and on",
            (str(TOOLS / "convergence.py"), "--device", device),
        ),
    ]
    if device == "cuda":
        everything = tuple(sorted(path.name for path in TESTS.glob("test_*.py")))
        large = Level("large", "more than 2^31 elements", ("-m", "large"), everything, alone=True)
        found.insert(1, large)
        for tool, what in SANITIZERS.items():
            # Each tensor a block of its own: a block of the cache has neighbours.
            environ = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            program = (str(TOOLS / "reach_kernels.py"),)
            found.append(Level(tool, f"every kernel and plan: {what}", program, (), environ, tool))
    return found


def counts(report: Path) -> dict[str, int]:
    """Tests that passed, failed and were skipped or expected to fail, of a pytest report.

    And what a test has counted by record_property: norm calls.
    """
    root = ElementTree.parse(report).getroot()
    suites = list(root.iter("testsuite"))
    total, failed, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    recorded = {item.get("name", ""): int(item.get("value", "0")) for item in root.iter("property")}
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped} | recorded


def run(level: Level) -> dict[str, Any]:
    """A row: what ran, with which result. The output of a command that fails is printed."""
    row: dict[str, Any] = {
        "level": level.name,
        "what": level.what,
        "commit": results.commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if level.sanitizer and not shutil.which("compute-sanitizer"):
        return row | {"result": "not run: no compute-sanitizer"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = level.command(str(report))
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,  # not the root, where Python would find the sources
            env={**os.environ, **level.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        row["seconds"] = round(time.monotonic() - started)
        if report.exists():
            row |= counts(report)
        ran = done.returncode == 0 and row.get("passed", 1) > 0
    row["result"] = "passed" if ran else f"failed ({done.returncode})"
    if done.returncode == 0 and not ran:
        row["result"] = "not run: everything was skipped"
    calls = re.findall(r"^(\d+) calls$", done.stdout, re.MULTILINE)
    if calls:
        row["passed"] = int(calls[-1])
    if done.returncode != 0:
        print(f"$ {shlex.join(command)}\n{done.stdout[-6000:]}", flush=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'level':<14}{'result':<36}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}"]
    for row in rows:
        line = f"{row['level']:<14}{row['result']:<36}"
        for key, width in (("passed", 8), ("failed", 8), ("skipped", 8), ("seconds", 9)):
            line += f"{row.get(key, '-'):>{width}}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("levels", nargs="*", help="names of levels; default: all")
    parser.add_argument("--list", action="store_true", help="show the levels and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=results.count, default=1, help="levels at a time")
    arguments = parser.parse_args()
    known = {level.name: level for level in levels(arguments.device)}
    wrong = [name for name in arguments.levels if name not in known]
    if wrong:
        parser.error(f"no level is called {wrong[0]!r}: {', '.join(known)}")
    if arguments.list:
        for level in known.values():
            print(f"{level.name:<14}{level.what}\n{'':<14}{shlex.join(level.command())}")
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is visible; --device cpu runs what needs none")

    chosen = [known[name] for name in arguments.levels] or list(known.values())
    rows = []
    with progress.Progress(len(chosen)) as bar, ThreadPoolExecutor(arguments.jobs) as pool:

        def begin(level: Level) -> dict[str, Any]:
            bar.step(level.name)
            return run(level)

        together = [pool.submit(begin, level) for level in chosen if not level.alone]
        alone = (begin(level) for level in chosen if level.alone)
        for row in itertools.chain((done.result() for done in as_completed(together)), alone):
            rows.append(row)
            if arguments.output:
                content = results.machine(arguments.device) | {"rows": rows}
                results.update(arguments.output, content, "level", arguments.folder, known)
    print(table(rows))
    return int(any(row["result"].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
