"""Stage the kernels as a branch of a PyTorch checkout, ready to be read by PyTorch's reviewers.

    python tools/stage_upstream.py --pytorch CHECKOUT [--branch NAME]
    python tools/stage_upstream.py --pytorch CHECKOUT --dry-run   # says what it would do
    python tools/stage_upstream.py --pytorch CHECKOUT --check     # fails unless that is there
    python tools/stage_upstream.py --check                        # on checkouts made up for it

The branch starts at the commit that is checked out; the checkout's files and index are not touched.
What is staged is described by codegen/group_norm.yaml under `upstream`, and verified before any of
it is written: operator definitions, launch checks, format; with --compile, also by nvcc. The text
of the pull request is put beside the branch, in the repository's git folder. The same checkout
gives the same commits, so a second run changes nothing.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_table
import render_readme

sys.path.append(str(render_readme.ROOT))
from codegen import model, upstream, verify
from codegen.checkout import Checkout, git_environment
from codegen.upstream import Rendered, StagingError
from gn_override import _bench

BRANCH = "channels-last-group-norm"
TEMPLATE = render_readme.ROOT / "aten_patch" / "PR.md"

KERNELS = "kernels-shared-h200"
# The same kernels where they may take the whole GPU, which is an option in-tree.
WHOLE_CHIP = "kernels-h200"
# In its rows, who stands for the kernels before the change, by base.
BEFORE = {
    "main": kernel_table.CHECKOUT,
    # That 2.11 makes X contiguous outside of the op, and 2.14 inside, is the same work.
    "2.14": "stock_channels_last",
}
SWEEP = "sweep-shared-h200"
PARALLEL = "ddp-h200"
CODE_SIZE = "size-cuda13.0"
MEASURED_PLANS = "native/plan/measured_cuda.h"
# What decides how fast a call is, of this repository.
SOURCES = ("native/kernels", "native/launch", "native/plan")


def pull_request(base: str) -> str:
    """The text of the pull request, with the measured tables."""
    kernels, whole, sweep, parallel, code = (
        json.loads((render_readme.RESULTS / f"{name}.json").read_text())
        for name in (KERNELS, WHOLE_CHIP, SWEEP, PARALLEL, CODE_SIZE)
    )
    before, rows = BEFORE[base], kernels["rows"]
    values = {
        "before and after": kernel_table.before_after(rows, before).strip(),
        "source of kernels": render_readme.source(kernels).strip(),
        "blob": kernels["pytorch"]["git blob"][:12],
        "source of sweep": render_readme.source(sweep).strip(),
        "beside all-reduce": render_readme.ddp(parallel).strip(),
        "source of beside all-reduce": render_readme.source(parallel).strip(),
        "random shapes": str(sweep["summary"]["served"]),
        "measured plans": measured_plans(kernels),
        "gains of whole chip": gains(kernels, whole),
        "size": size(base),
        "machine code": machine_code(code),
        "source of machine code": render_readme.source(code).strip(),
    }
    for what in _bench.DIRECTIONS:
        values[f"before, {what}"] = kernel_table.over_copy(rows, what, before)
        values[f"after, {what}"] = kernel_table.over_copy(rows, what, _bench.OURS)
        for name, other in {"stock": "stock", "main": "PyTorch's checkout"}.items():
            slower = sweep["summary"][f"slower than {other} by more than 5%"][what]
            values[f"slower than {name}, {what}"] = str(slower)

    def of_base(block: re.Match[str]) -> str:
        texts = dict(re.findall(r"<!-- base: (\S+) -->\n(.*?)(?=<!-- )", block[0], re.DOTALL))
        assert texts.keys() <= BEFORE.keys()
        return texts.get(base, "")

    block = r"<!-- base: .*?<!-- end base -->\n"
    text = re.sub(block, of_base, TEMPLATE.read_text(), flags=re.DOTALL)
    return re.sub(r"\{\{(.*?)\}\}", lambda match: values[match[1]], text)


def change_of(base: str) -> tuple[dict[str, str], dict[str, str]]:
    """The files that the change edits as they were, as far as it looks at them, and all that it
    stages: texts by their paths."""
    change = model.load().upstream
    assert change is not None
    before = upstream.skeleton(change, base)
    after: dict[str, str] = {}
    for commit in upstream.render(change, base, before.get):
        after |= commit.files
    return before, after


@functools.cache
def size(base: str) -> str:
    """How many lines the change adds, and to how many files."""
    before, after = change_of(base)
    lines = 0
    for path, text in after.items():
        compared = difflib.ndiff(before.get(path, "").splitlines(), text.splitlines())
        lines += sum(line.startswith("+ ") for line in compared)
    new = len(after.keys() - before.keys())
    return f"{lines} lines, in {new} new files and {len(after) - new} that are edited"


def machine_code(content: dict[str, Any]) -> str:
    """What tools/code_size.py found, as the end of a sentence."""
    sizes = [f"{row['bytes'] / 1e6:.1f} MB of {row['name']}" for row in content["rows"]]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]} code by nvcc {content['nvcc']}"


def _history(*command: str) -> str | None:
    """What git says of this repository; None where that is no success, as without the commit."""
    git = ["git", "-C", str(render_readme.ROOT), *command]
    done = subprocess.run(git, capture_output=True, text=True, env=git_environment())
    return done.stdout if done.returncode == 0 else None


def gains(kernels: dict[str, Any], whole: dict[str, Any]) -> str:
    """By how much rows gain by plans of the whole chip, as a sentence; "" where the results files
    are of different kernels."""
    one, other = kernels["commit"], whole["commit"]
    if one != other and _history("diff", "--quiet", one, other, "--", *SOURCES) is None:
        return ""
    by_case = {(row["name"], row["dtype"]): row for row in whole["rows"]}
    said = []
    for what, title in _bench.DIRECTIONS.items():
        ours = [
            row[what][_bench.OURS] / by_case[row["name"], row["dtype"]][what][_bench.OURS]
            for row in kernels["rows"]
        ]
        gained = [ratio for ratio in ours if ratio > render_readme.SLOWER]
        if gained:
            span = f"{min(gained):.2f} to {max(gained):.2f}"
            said.append(f"{title} {span} in {len(gained)} of {len(ours)} rows")
    source = render_readme.source(whole).strip()
    return f" With them times are shorter by a factor: {'; '.join(said) or 'no rows'} ({source})."


def measured_plans(kernels: dict[str, Any]) -> str:
    """The rows with a plan of the table of their commit, which is not staged, by direction, and how
    many times as long the planner's own plan takes at most, as a sentence."""
    table = _history("show", f"{kernels['commit']}:{MEASURED_PLANS}")
    if table is None:
        return f"Which of these rows it holds, `{MEASURED_PLANS}` of the commit above says."
    plans = {
        (direction, *map(int, sizes.split(", "))): float(share)
        for direction, sizes, share in re.findall(
            r"\{k(Forward|Backward), kIdentity, ([\d, ]+), "
            # that does not take the whole chip: no cluster of more than eight blocks
            r"\{k(?:Registers|Resident), \d+, [0-8], \d+\}, ([\d.]+)\}",
            table,
        )
    }
    names: dict[str, list[str]] = {"Forward": [], "Backward": []}
    most = 1.0
    for row in kernels["rows"]:
        N, C, *spatial = row["shape"]
        for direction in names:
            share = plans.get((direction, N, C, math.prod(spatial), row["groups"]))
            if share is not None and row["dtype"] in ("float16", "bfloat16"):
                names[direction].append("x".join(map(str, row["shape"])))
                most = max(most, 1 / share)
    assert plans, f"{MEASURED_PLANS} is not written as its rows are read here"
    held = [f"{direction.lower()} {', '.join(of)}" for direction, of in names.items() if of]
    if not held:
        return "It holds none of these rows."
    return (
        f"In these rows it holds {'; '.join(held)}; there the planner's own plan takes up to "
        f"{most:.2f} times as long."
    )


def stage(
    folder: Path,
    *,
    branch: str = BRANCH,
    base: str = "auto",
    allow_dirty: bool = False,
    dry_run: bool = False,
    check: bool = False,
    compiled: bool = False,
) -> list[str]:
    """Stages onto a checkout and returns lines that say what was done.

    Raises StagingError, and leaves the checkout as it was, where anything does not fit; with
    ``check``, also where the branch is not there yet or holds something else.
    """
    change = model.load().upstream
    assert change is not None
    checkout = Checkout(folder)
    changes = checkout.changes()
    if changes and not allow_dirty:
        raise StagingError(
            f"{folder} has uncommitted changes, which the branch would not have: "
            f"{', '.join(changes[:5])}\n  commit them, or pass --allow-dirty"
        )
    if base == "auto":
        base = upstream.recognise(change, checkout.read)
    commits = upstream.render(change, base, checkout.read)
    notes = verify.verify(commits, checkout.read)
    if compiled:
        with tempfile.TemporaryDirectory() as objects:
            files = {path: text for commit in commits for path, text in commit.files.items()}
            verify.compile_units(files, Path(objects), ["-arch=sm_90"])
    lines = [f"base {base}, at {checkout.base[:12]}"]
    lines += [f"not checked: {note}" for note in notes]
    lines += [line for commit in commits for line in _describe(commit)]
    if dry_run:
        return lines
    last = checkout.write(commits)
    present = checkout.branch(branch)
    text = pull_request(base)
    page = checkout.path_in_repository(f"{branch.replace('/', '-')}.md")
    same = present == last and page.is_file() and page.read_text() == text
    if check and not same:
        raise StagingError(f"{folder}: branch {branch} is not what would be staged")
    if present not in (None, last):
        raise StagingError(
            f"branch {branch} is there and holds something else\n"
            f"  name another with --branch, or delete it: git branch -D {branch}"
        )
    if not same:
        if present is None:
            checkout.create_branch(branch, last)
        page.write_text(text)
    state = "is there already" if same else "is ready"
    return [*lines, f"branch {branch} {state}, at {last[:12]}; the pull request's text: {page}"]


def _describe(commit: Rendered) -> list[str]:
    return [commit.title, *(f"    {path}" for path in commit.files)]


def make_up_checkout(folder: Path, base: str) -> None:
    """A git repository with the least that a base needs: the operator definitions of the installed
    torch, and of each file that is edited the texts that its edits look for."""
    change = model.load().upstream
    assert change is not None
    installed = model.installed_torch()
    files = {
        verify.NATIVE_FUNCTIONS: installed.native_functions_yaml.read_text(),
        verify.TAGS: installed.tags_yaml.read_text(),
        verify.DERIVATIVES: installed.derivatives_yaml.read_text(),
    }
    for path, text in (files | upstream.skeleton(change, base)).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for command in (
        ["init", "--quiet"],
        ["config", "user.name", "nobody"],
        ["config", "user.email", "nobody@example.com"],
        ["config", "commit.gpgsign", "false"],
        ["add", "--all"],
        ["commit", "--quiet", "--message", f"A checkout with the anchors of {base}"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True, env=git_environment())


def check_made_up() -> list[str]:
    """Stages onto a made-up checkout of every base, twice."""
    change = model.load().upstream
    assert change is not None
    lines = []
    for base in change.bases:
        with tempfile.TemporaryDirectory() as folder:
            make_up_checkout(Path(folder), base)
            stage(Path(folder))
            lines += stage(Path(folder), check=True)[:1]
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--pytorch", type=Path, help="a git checkout of PyTorch")
    parser.add_argument("--branch", default=BRANCH, help="name of the branch")
    parser.add_argument("--base", default="auto", help="PyTorch version of the checkout")
    parser.add_argument("--allow-dirty", action="store_true", help="ignore uncommitted changes")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--dry-run", action="store_true", help="verify and say what it would do")
    group.add_argument("--check", action="store_true", help="make no branch; fail on a difference")
    parser.add_argument("--compile", action="store_true", help="also compile for sm_90, with nvcc")
    options = parser.parse_args(argv)
    if options.pytorch is None and options != parser.parse_args(["--check"]):
        parser.error("--pytorch CHECKOUT is needed, except for --check alone")
    try:
        change = model.load().upstream
        assert change is not None
        if options.base not in ("auto", *change.bases):
            parser.error(f"--base: auto, {', '.join(change.bases)}")
        if options.pytorch is None:
            lines = check_made_up()
        else:
            lines = stage(
                options.pytorch,
                branch=options.branch,
                base=options.base,
                allow_dirty=options.allow_dirty,
                dry_run=options.dry_run,
                check=options.check,
                compiled=options.compile,
            )
    except (StagingError, model.CodegenError) as error:
        print(f"stage_upstream: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
