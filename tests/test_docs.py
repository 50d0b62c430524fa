"""README.md, CONTRIBUTING.md and docs/: what they name exists, what they command runs.

Every command in them has an entry in HOW, which says where it is run: here, by .ci/run, or only on
a machine with a GPU, where the least is tried that needs none.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import render_readme
import torch
import torch.nn.functional as F
from measured import HEAD
from processes import run_python
from torch import nn

import gn_override
from gn_override import _bench, _explain
from gn_override.__main__ import main

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN = [p for p in PAGES if p.name != "reliability.md"]

if not (ROOT / "README.md").exists():
    pytest.skip("the tests run without the source tree", allow_module_level=True)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RESULTS = re.compile(r"<!-- results: .*?<!-- end results -->", re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
STARTS = r"(python|pip|pytest|mypy|ruff|git|\.ci/|compute-sanitizer|pre-commit|PYTHONPATH=)"
COMMAND = re.compile(rf"{STARTS}(?=\b|\w)(?!\.md)")


def prose(path: Path) -> str:
    """A page without its code blocks and generated tables."""
    return FENCE.sub("", RESULTS.sub("", path.read_text()))


def blocks(path: Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(path.read_text()) if name == language]


def lines(block: str) -> list[str]:
    return [re.sub(r"\s+#.*| &&$", "", line).strip(" ()") for line in block.splitlines()]


def commands() -> list[str]:
    """All of them: lines of shell blocks, lines after "$ ", and code in the text."""
    found = []
    for path in OWN:
        for block in blocks(path, "bash"):
            found += lines(block)
        for _, block in FENCE.findall(path.read_text()):
            found += re.findall(r"^\$ (.+)", block, re.MULTILINE)
        spans = (" ".join(span.split()) for span in CODE.findall(prose(path)))
        found += [span for span in spans if COMMAND.match(span) and " " in span]
        found += [span for span in CODE.findall(prose(path)) if span in (".ci/run", ".ci/format")]
    return sorted(set(found))


def in_process(command: str, tmp_path: Path) -> None:
    assert main(shlex.split(command)[3:]) == 0


def tool(*more: str, status: int = 0, said: str = "") -> Callable[[str, Path], None]:
    """Run a tool of the tree, with `more` arguments, in a folder where it can do no harm."""

    def run(command: str, tmp_path: Path) -> None:
        for name in ("tools", "tests", "benchmarks"):
            (tmp_path / name).symlink_to(ROOT / name)
        (tmp_path / "docs").mkdir()
        done = run_python(*shlex.split(command)[1:], *more, cwd=tmp_path, status=status)
        assert said in done.stderr

    return run


def needs_gpu(status: int = 2) -> Callable[[str, Path], None]:
    """Says so where there is none; where there is one, it would take minutes."""

    def run(command: str, tmp_path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("it would measure")
        tool(status=status, said="GPU")(command, tmp_path)

    return run


def by_ci(text: str = "") -> Callable[[str, Path], None]:
    """A line of .ci/run, or of a block of README.md that it runs, is the command, or `text`."""

    def look(command: str, tmp_path: Path) -> None:
        ran = lines((ROOT / ".ci" / "run").read_text())
        marked = re.findall(r"<!-- ci: (\w+) -->\n```bash\n(.*?)```", read_me(), re.DOTALL)
        assert all(f"run_readme_block {name}" in ran for name, _ in marked)
        ran += [line for _, block in marked for line in lines(block)]
        ran += [part for line in ran for part in line.split(" && ")]
        assert (text or command) in ran or f".venv/bin/{command}" in ran

    return look


def names_tests(command: str, tmp_path: Path) -> None:
    """The files are there, and each word of -k is in the name of a test or of a case."""
    words = shlex.split(command)
    files = [ROOT / word for word in words if word.startswith("tests/")]
    assert files and all(file.exists() for file in files)
    if "-k" in words:
        text = "".join(file.read_text() for file in files)
        for word in words[words.index("-k") + 1].split(" or "):
            assert f'"{word}"' in text


def by_test(test: str) -> Callable[[str, Path], None]:
    """A test of that name, which has the command's options, does the same on paths of its own."""

    def look(command: str, tmp_path: Path) -> None:
        text = "\n".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
        (body,) = re.findall(rf"^def {test}\(.*?(?=^[^\s)])", text, re.MULTILINE | re.DOTALL)
        for word in shlex.split(command):
            assert not word.startswith("-") or f'"{word}"' in body, word

    return look


def read_me() -> str:
    return (ROOT / "README.md").read_text()


BRIEFLY = "--seconds", "0.01", "--no-check", "--folder", "."

# By the beginning of the command; the first that fits.
HOW: dict[str, Callable[[str, Path], None]] = {
    "python3 -m venv": by_ci(),
    ".venv/bin/": by_ci(),
    "cd .venv": by_ci(),
    "python -m gn_override demo": by_ci("run_readme_block demo"),
    "python -m gn_override bench": in_process,
    "python -m gn_override explain 2": in_process,
    "python -m gn_override explain 1": in_process,
    "python -m gn_override": in_process,
    "python -m codegen": by_ci("python -m codegen --check"),
    "python tools/render_readme.py": tool("--check"),
    "python tools/bench.py --from": tool(),
    "python tools/bench_cpu.py --cases model": tool(*BRIEFLY, "--only", "sd15_unet_2560_8x8"),
    "python tools/bench_cpu.py --moved": tool(*BRIEFLY, "--only", "cpu1,cpu3"),
    "python tools/bench_host.py": needs_gpu(),
    "python tools/bench_ddp.py": needs_gpu(),
    "python tools/bench_models.py": needs_gpu(),
    "python tools/bench.py": needs_gpu(),
    "python tools/sweep.py": needs_gpu(),
    "python tools/counters.py": needs_gpu(),
    "python tools/code_size.py": by_test("test_code_size"),
    "python tools/tune.py": needs_gpu(status=1),
    "python tools/verify_gpu.py": tool("--list"),
    "python tools/stage_upstream.py --check": by_ci(),
    "python tools/stage_upstream.py": by_test("test_command"),
    "pip install --no-build-isolation -e": by_test("test_editable_install"),
    "pip install --no-build-isolation": by_ci(),
    "python setup.py -q build_ext --inplace": by_test("test_build_in_place"),
    "python setup.py -q build --build-base": by_test("test_build_elsewhere"),
    "PYTHONPATH=$(echo /tmp/build-2.14/lib.*) pytest": by_test("test_intact_copy_loads"),
    "pre-commit install": by_test("test_pre_commit_runs_what_ci_runs"),
    "pytest tests/": names_tests,
    "pytest": by_ci(),
    "mypy": by_ci(),
    ".ci/format": by_ci(".ci/format --check"),
    ".ci/run": lambda command, tmp_path: None,
}


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_bench, "CASES", {name: rows[:1] for name, rows in _bench.CASES.items()})
    if "matplotlib" in command or "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    start = next((start for start in HOW if command.startswith(start)), None)
    assert start is not None, f"no test runs: {command}"
    HOW[start](command, tmp_path)


def test_every_way_to_run_is_used():
    found = commands()
    first = {next((s for s in HOW if command.startswith(s)), "") for command in found}
    assert first == set(HOW), set(HOW) - first


def test_python_of_the_readme_runs(capsys):
    names = {
        "torch": torch,
        "model": nn.Sequential(nn.Conv2d(3, 320, 3), nn.GroupNorm(32, 320), nn.SiLU()),
        "x": torch.randn(2, 320, 8, 8).to(memory_format=torch.channels_last),
        "weight": torch.randn(320),
        "bias": torch.randn(320),
    }
    found = blocks(ROOT / "README.md", "python")
    assert len(found) >= 2
    for block in found:
        exec(block, names)
    assert names["model"](torch.randn(1, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)


def test_new_calls_do_what_the_old_ones_did():
    table = read_me().partition("## Coming from")[2].partition("\n## ")[0]
    x, w, b = torch.randn(2, 320, 4, 4), torch.randn(320), torch.randn(320)
    new = [span for row in table.splitlines()[4:] for span in CODE.findall(row)]
    names = {"nn": nn, "gn_override": gn_override, "x": x, "w": w, "b": b, "eps": 1e-5}
    ran = 0
    for span in new:
        if span.startswith(("nn.GroupNorm(", "gn_override.nn", "gn_override.functional")):
            result = eval(span, names)
            result = result(x) if isinstance(result, nn.Module) else result
            assert result.shape == x.shape
            ran += 1
    assert ran == 4
    expected = F.silu(F.group_norm(x, 32, w, b))
    torch.testing.assert_close(
        gn_override.functional.group_norm(x, 32, w, b, 1e-5, "silu"), expected
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="explain() speaks of the GPU that is there")
def test_what_explain_says_in_the_readme(capsys):
    ((command, said),) = re.findall(r"^```\n\$ (python -m .*)\n((?:.+\n)+)```", read_me(), re.M)
    assert main(shlex.split(command)[3:]) == 0
    assert capsys.readouterr().out == said


# Names.

TIE = re.compile(r"((?:`[^`\s]+`,\s+)*`[^`\s]+`)\s+in\s+`([\w./-]+\.\w+)`")
FOLDERS = r"native|codegen|tests|tools|gn_override|benchmarks|docs|aten_patch"
# A path from the root, but no sample and no pattern.
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+|setup\.py|\.ci/\w+)`")


def ties(path: Path) -> list[tuple[str, str]]:
    text = prose(path)
    return [
        (symbol, file)
        for symbols, file in TIE.findall(text)
        for symbol in CODE.findall(symbols)
        if (ROOT / file).suffix
    ]


@pytest.mark.parametrize(("page", "least"), [("math.md", 30), ("design.md", 40)])
def test_symbols_are_in_the_files_that_are_named(page, least):
    found = ties(ROOT / "docs" / page)
    assert len(found) >= least
    for symbol, file in found:
        assert re.search(rf"\b{symbol}\b", (ROOT / file).read_text()), f"{page}: {symbol} in {file}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_ties_paths_and_links(path):
    for symbol, file in ties(path):
        assert re.search(rf"\b{re.escape(symbol)}\b", (ROOT / file).read_text()), (symbol, file)
    text = path.read_text()
    for name in PATH.findall(prose(path)):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        assert page.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]


def test_regression_tests_that_are_named_exist():
    tests = "".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_[a-z0-9]\w+)`", prose(ROOT / "docs" / "reliability.md"))
    assert len(named) >= 30
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_pages_name_each_other():
    """From the README to every page, in one step or two."""
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in re.findall(r"\]\(([\w./-]+\.md)", page.read_text()):
            waiting.append((page.parent / link).resolve())
    assert set(OWN) <= seen


def test_design_has_every_row_of_the_policy_tables():
    text = (ROOT / "docs" / "design.md").read_text()
    for rule in (*_explain._READ_AGAIN, "aten"):
        assert re.search(rf"^\| (CUDA|CPU|any), {rule} \|", text, re.MULTILINE), rule


def test_pseudo_code_is_of_thirty_lines_and_names_files():
    (block,) = blocks(ROOT / "docs" / "design.md", "")
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 32
    named = re.findall(r"native/[\w/]+\.\w+", block)
    assert len(named) >= 6 and all((ROOT / name).exists() for name in named)


# Numbers.

MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*(?: ?%|x(?![\dA-Za-z])| (?:us|ms|times a copy|[TG]B/s))(?!\w)"
)


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_no_measured_number_is_written_by_hand(path):
    assert MEASURED.findall(prose(path)) == []


def test_a_measured_number_is_found():
    for text in ("takes 1.5x", "by 5%", "some 2 us", "at 4.2 TB/s,", "1.6 times a copy"):
        assert MEASURED.search(text), text
    for text in ("2x320x64x64", "2.11 to 2.15", "7x7 maps", "2.5 copies"):
        assert not MEASURED.search(text), text


def test_tables_are_those_of_the_results():
    assert render_readme.main(["--check"]) == 0
    shown = "".join(p.read_text() for p in render_readme.FILES)
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        if not path.name.startswith("stock-"):  # of the pull request's text
            assert f"<!-- results: {path.stem}" in shown, path


def test_readme_renders_every_row(tmp_path):
    head = HEAD | {"command": "python tools/bench_models.py"}
    times = {"stock": 10.0, "override": 5.0, "stock_nchw": 8.0, "floor": 4.0, "copies": 4.5}
    row = {"name": "net", "parity": True, "times": times, "floor": "no norms", "peak_gb": {}}
    row["commit"] = "1234567"
    slower = row | {"name": "slow", "times": times | {"override": 20.0}}
    failed = row | {"name": "bad", "parity": False, "times": {}}
    slower["compiled"] = {key: at for at, key in enumerate(render_readme._COMPILED)}
    (tmp_path / "models-x.json").write_text(json.dumps(head | {"rows": [row, slower, failed]}))
    text = "a\n<!-- results: models-x -->\nold\n<!-- end results -->\nb\n"
    rendered = render_readme.render(text, tmp_path)
    assert "command not recorded: net, slow, bad" in rendered  # of another commit than the head
    assert "| net | 10 | 5 | 2.00x | 8 | 4 | 4.5 | - |" in rendered
    assert "| slow | 10 | 20 | 0.50x |" in rendered and "parity failed" in rendered
    assert "| slow | 0 | 1 | 2 | 3 | 4 | 5 | 6 |" in rendered
    assert "GPU-X" in rendered and "abc" in rendered and "old" not in rendered
    assert render_readme.render(rendered, tmp_path) == rendered

    only = render_readme.render(text.replace("models-x", "models-x only net,bad"), tmp_path)
    assert "| net |" in only and "| bad |" in only and "| slow |" not in only
    with pytest.raises(ValueError, match="none_such"):
        render_readme.render(text.replace("models-x", "models-x only none_such"), tmp_path)

    missing = text.replace("models-x", "kernels-y")
    assert "Not measured yet" in render_readme.render(missing, tmp_path)
    with pytest.raises(ValueError, match="nonsense-z"):
        render_readme.render(text.replace("models-x", "nonsense-z"), tmp_path)


def test_render_readme_rewrites_and_checks(tmp_path, monkeypatch, capsys):
    """--check says which file is stale and leaves it; without it the file is made right."""
    page = tmp_path / "page.md"
    page.write_text(stale := "<!-- results: kernels-none -->\nold\n<!-- end results -->\n")
    monkeypatch.setattr(render_readme, "FILES", (page,))
    monkeypatch.setattr(render_readme, "ROOT", tmp_path)
    assert render_readme.main(["--check"]) == 1
    assert page.read_text() == stale and capsys.readouterr().err.startswith("page.md: run ")
    assert render_readme.main([]) == 0
    assert page.read_text() == render_readme.render(stale) != stale
    assert render_readme.main(["--check"]) == 0


# The first screen.


def test_the_first_screen_has_its_order():
    text = read_me()
    parts = ["![", "**Install**", "**Use**", "**What it does not support**", "**To turn it off**"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text[: places[-1]].count("\n") < 45


# What goes with the source.


def test_pre_commit_runs_what_ci_runs():
    yaml = pytest.importorskip("yaml")
    assert '"pre-commit"' in (ROOT / "pyproject.toml").read_text()
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ci = (ROOT / ".ci" / "run").read_text()
    for hook in repo["hooks"]:
        if hook["id"] != "tables":  # a test: test_tables_are_those_of_the_results
            assert hook["entry"] in ci, hook


def test_the_workflow_calls_ci_run():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["run"]["steps"]
    assert ".ci/run" in steps[-1]["run"] and shutil.which("bash")


def test_the_changelog_has_the_version():
    version = gn_override.__version__
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_no_page_says_what_another_says():
    seen: dict[str, str] = {}
    for path in OWN:
        for paragraph in re.split(r"\n\s*\n", prose(path)):
            text = " ".join(paragraph.split())
            if len(text) > 120:
                assert text not in seen, f"{path.name} and {seen[text]}: {text[:60]}"
                seen[text] = path.name
