"""What the benchmark tools have in common: progress, results files, help."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import bench
import bench_cpu
import bench_ddp
import convergence
import progress
import pytest
import results
import sweep
import tune
import verify_gpu
from measured import HEAD

pytestmark = pytest.mark.any_torch

# tools/progress.py, tools/results.py.


def test_bar():
    assert progress.bar(0, 4, "vae", 80) == f"[{'.' * 24}] 0/4 vae"
    assert progress.bar(2, 4, "vae", 80) == f"[{'#' * 12}{'.' * 12}] 2/4 vae"
    assert len(progress.bar(1, 4, "x" * 99, 40)) == 40


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_line_or_a_bar(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.Progress(2) as steps:
        steps.step("one")
        steps.step("two")
    said = capsys.readouterr().err
    if terminal:
        assert said.count("\r") == 3 and "\n" not in said and "1/2 two" in said
    else:
        assert said == "[1/2] one\n[2/2] two\n"


def test_the_command_of_a_results_file_names_no_place(monkeypatch):
    monkeypatch.chdir(results.ROOT)
    places = {"--plot": "y.svg", "--folder": "", "--pytorch": "", "--roofline": "z.svg"}
    places["--log"] = "log"
    apart = [word for option, name in places.items() for word in (option, f"/x/{name}")]
    joined = [f"{option}=/x/{name}" for option, name in places.items()]
    for script in ("tools/bench.py", str(results.ROOT / "tools" / "bench.py")):
        for options in (apart, joined):
            monkeypatch.setattr(sys, "argv", [script, *options, "--output", "kernels"])
            assert results.command() == "python tools/bench.py --pytorch CHECKOUT --output kernels"
    monkeypatch.setenv("GN_OVERRIDE_WHOLE_CHIP", "0")
    assert results.command().startswith("GN_OVERRIDE_WHOLE_CHIP=0 python tools/bench.py ")


def test_the_commit_of_a_results_file(tmp_path, monkeypatch):
    """It says of a changed tree that it is changed, but for results that were written before, and
    is the environment's where that has one."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("GN_OVERRIDE_COMMIT", raising=False)
    file, result = tmp_path / "file", tmp_path / "results" / "a.json"
    result.parent.mkdir()
    for path in (file, result):
        path.write_text("a")
    someone = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, check=True)

    git("init")
    assert results.commit() == "unknown"  # there is none yet
    git("add", ".")
    git(*someone, "commit", "-m", "a")
    git(*someone, "tag", "-a", "v1", "-m", "a release, which is no commit's name")
    clean = results.commit()
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    result.write_text("b")
    assert results.commit() == clean
    file.write_text("b")
    assert results.commit() == f"{clean}-dirty"
    monkeypatch.setenv("GN_OVERRIDE_COMMIT", "abc")
    assert results.commit() == "abc"


@pytest.mark.parametrize("tool", [bench_cpu, convergence, verify_gpu])
@pytest.mark.parametrize("fault", ["name", "folder", "old file", "its kind", "abbreviation"])
def test_output_is_looked_at_before_measuring(tool, fault, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "file" / "f" if fault == "folder" else tmp_path
    (tmp_path / "file").touch()
    (tmp_path / "old.json").write_text('{"rows": [')
    (tmp_path / "kind.json").mkdir()
    name = {"name": "a/b", "old file": "old", "its kind": "kind"}.get(fault, "new")
    option = "--fol" if fault == "abbreviation" else "--folder"
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["x.py", "--output", name, option, str(folder)])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert ("--fol" if fault == "abbreviation" else "--output: ") in said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        (bench, ["--milliseconds"]),
        (bench_cpu, ["--threads"]),
        (bench_ddp, ["--batch", "--steps"]),
        (sweep, ["--shapes", "--milliseconds"]),
        (tune, ["--repetitions", "--finalists"]),
        (verify_gpu, ["--jobs"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_counts_are_of_one_at_least(tool, options, monkeypatch, capsys):
    for option in options:
        for text, why in (("0", "1 or more"), ("-1", "1 or more"), ("x", "invalid count value")):
            monkeypatch.setattr(sys, "argv", ["x.py", option, text])
            with pytest.raises(SystemExit, match="2"):
                tool.main(sys.argv[1:]) if inspect.signature(tool.main).parameters else tool.main()
            assert f"argument {option}: {why}" in capsys.readouterr().err


def test_the_folder_of_a_results_file_is_made(tmp_path):
    arguments = ["--output", "x", "--folder", str(tmp_path / "a" / "b")]
    assert results.Parser("doc").parse_args(arguments).output == "x"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_results_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = results.write("x", HEAD | {"rows": [{"name": "old"}]}, tmp_path)

    def full(self, text):
        self.write_bytes(text[:9].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        results.write("x", HEAD | {"rows": [{"name": "new"}]}, tmp_path)
    assert results.read(path)["rows"] == [{"name": "old"}]


def test_an_updated_results_file_keeps_the_other_rows(tmp_path):
    """Each with the command that measured it."""
    for command, names in (("first", "ab"), ("second", "bc")):
        rows = [{"name": name} for name in names]
        path = results.update("x", {"command": command, "rows": rows}, "name", tmp_path)
    rows = json.loads(path.read_text())["rows"]
    assert [tuple(row.values()) for row in rows] == [
        ("a", "first"),
        ("b", "second"),
        ("c", "second"),
    ]


def test_every_tool_has_help():
    """Without a GPU too."""
    for name in (
        *("bench", "bench_cpu", "bench_ddp", "bench_host", "bench_models", "convergence"),
        *("counters", "reach_kernels", "sweep", "tune", "verify_gpu"),
    ):
        tool = importlib.import_module(name)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="0"):
            patch.setattr("sys.argv", [f"{name}.py", "--help"])
            takes_arguments = inspect.signature(tool.main).parameters
            tool.main(["--help"]) if takes_arguments else tool.main()
