"""convergence.py and verify_gpu.py, as far as they go without a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import convergence
import pytest
import render_readme
import results
import verify_gpu

pytestmark = pytest.mark.any_torch


def test_convergence_is_within_the_noise_of_two_seeds():
    steps = 2 * convergence.WINDOW
    stock, other = [2.0] * steps, [1.5] * convergence.WINDOW + [0.4] * convergence.WINDOW
    names = [name for name, *_ in convergence.RUNS]

    def verdict(*ours):
        return convergence.verdict(dict(zip(names, (stock, other, list(ours)), strict=True)))

    assert convergence.smooth(stock) == [2.0, 2.0]
    near = verdict(*[2.1] * convergence.WINDOW, *[0.5] * convergence.WINDOW)
    assert near["good"] and near["ours to stock"] == 1.5 and near["between two seeds"] == 1.6
    assert not verdict(*[2.1] * convergence.WINDOW, *[0.3] * convergence.WINDOW)["good"]
    assert not verdict(*stock)["good"], "it does not learn"


def test_convergence_trains_on_and_off(tmp_path, monkeypatch, capsys):
    options = ["--steps", "20", "--folder", str(tmp_path), "--output", "few"]
    monkeypatch.setattr("sys.argv", ["convergence.py", *options])
    assert convergence.main() == 1, "20 steps teach nothing"
    rows = json.loads((tmp_path / "few.json").read_text())["rows"]
    for row in rows:
        stock, other, ours = row["losses"].values()
        assert len(stock) == len(ours) == 20 and stock[0] != other[0]
        assert abs(stock[0] - ours[0]) < 0.01
    assert "float32" in capsys.readouterr().out


def test_convergence_of_a_file_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["convergence.py", "--from", "x.json"])
    with pytest.raises(SystemExit, match="2"):
        convergence.main()
    assert "--from: " in capsys.readouterr().err.splitlines()[-1]


def test_levels_name_files_that_exist():
    for device in ("cpu", "cuda"):
        levels = verify_gpu.levels(device)
        assert len({level.name for level in levels}) == len(levels)
        for level in levels:
            files = [word for word in level.command() if word.endswith(".py")]
            assert files and all(Path(file).exists() for file in files)
    apart = [level for level in verify_gpu.levels("cuda") if level.name != "large"]
    tests = {test for level in apart for test in level.tests}
    assert tests == {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert set(verify_gpu.SANITIZERS) <= {level.name for level in verify_gpu.levels("cuda")}


@pytest.mark.parametrize(
    "body, result, counts",
    [
        ("def test_a(): pass\ndef test_b(): pass", "passed", (2, 0, 0)),
        ("def test_a(): pass\ndef test_b(): assert 0", "failed (1)", (1, 1, 0)),
        (
            "import pytest\ndef test_a(): pytest.skip()",
            "not run: everything was skipped",
            (0, 0, 1),
        ),
    ],
    ids=["passed", "failed", "skipped"],
)
def test_a_level_of_tests(body, result, counts, tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text(body)
    monkeypatch.setattr(verify_gpu, "TESTS", tmp_path)
    row = verify_gpu.run(verify_gpu.Level("it", "what", (), ("test_it.py",)))
    assert row["result"] == result
    assert (row["passed"], row["failed"], row["skipped"]) == counts


def test_a_level_that_counts_its_calls(tmp_path, monkeypatch):
    body = "def test_a(record_property):\n record_property('norm_calls', 40_000_001)\n assert "
    monkeypatch.setattr(verify_gpu, "TESTS", tmp_path)
    for passed in (1, 0):
        (tmp_path / "test_it.py").write_text(f"{body}{passed}")
        row = verify_gpu.run(verify_gpu.Level("it", "what", (), ("test_it.py",)))
        assert (row["passed"], row["failed"], row["norm_calls"]) == (passed, 1 - passed, 40_000_001)
        assert "| it: what: 40,000,001 made |" in render_readme.verify({"rows": [row]})


def test_the_soak_is_of_more_calls_than_a_network_makes_in_an_hour():
    rows = json.loads((results.RESULTS / "models-h200.json").read_text())["rows"]
    for row in (row for row in rows if row["times"]):
        steps = 3600e3 / row["times"]["override"]
        assert steps * row["calls"] < verify_gpu.HOUR_OF_CALLS, row["name"]
    soak = next(level for level in verify_gpu.levels("cuda") if level.name == "soak")
    assert soak.environ["GN_OVERRIDE_TEST_SOAK_CALLS"] == str(verify_gpu.HOUR_OF_CALLS)


def test_a_level_that_runs_alone_runs_last(tmp_path, monkeypatch):
    running, order = set(), []

    def run(level):
        assert not running or not level.alone
        running.add(level.name)
        time.sleep(0.05)
        running.remove(level.name)
        order.append(level.name)
        return {"level": level.name, "result": "passed"}

    monkeypatch.setattr(verify_gpu, "run", run)
    options = ["soak", "torch", "faults", "--device", "cpu", "--jobs", "3"]
    monkeypatch.setattr("sys.argv", ["verify_gpu.py", *options])
    assert verify_gpu.main() == 0
    assert sorted(order) == ["faults", "soak", "torch"] and order[-1] == "soak"


def test_a_level_without_its_sanitizer(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    row = verify_gpu.run(verify_gpu.Level("it", "what", ("-c", ""), sanitizer="memcheck"))
    assert row["result"] == "not run: no compute-sanitizer"


def test_levels_that_ran_replace_their_rows():
    old = [{"level": "a", "result": "failed (1)"}, {"level": "b", "result": "passed"}]
    new = [{"level": "a", "result": "passed"}, {"level": "c", "result": "passed"}]
    rows = results.merged(old, new, "level", ["c", "a", "b"])
    assert [(row["level"], row["result"]) for row in rows] == [
        ("c", "passed"),
        ("a", "passed"),
        ("b", "passed"),
    ]
    assert [row["level"] for row in results.merged(old, new, "level")] == ["a", "b", "c"]
    assert "a             passed" in verify_gpu.table(rows)
