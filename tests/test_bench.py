"""python -m gn_override bench: what it times, checks, prints and draws."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from shapes import CPU_CASES, KERNEL_CASES

import gn_override
from gn_override import _bench
from gn_override.__main__ import main
from gn_override._explain import explain_shape

SMALL = _bench.Case("small", (2, 8, 3, 5), "float32", 4)
ROW = {
    "name": "sd15",
    "shape": [2, 320, 64, 64],
    "groups": 32,
    "dtype": "bfloat16",
    "checked": True,
    "copy": 8.0,
    "fwd": {"gn_override": 10.0, "stock_channels_last": 50.0, "stock_nchw": 40.0},
    "fwd_bwd": {"gn_override": 20.0, "stock_channels_last": 10.0, "stock_nchw": 80.0},
}


@pytest.fixture
def one_row(monkeypatch):
    monkeypatch.setattr(_bench, "CASES", {"cpu": (SMALL,), "cuda": ()})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("device", "cases"), [("cuda", KERNEL_CASES), ("cpu", CPU_CASES)])
def test_rows_are_of_the_one_list_of_shapes(device, cases):
    known = {(case.name, case.shape, case.dtype, case.groups) for case in cases}
    for case in _bench.CASES[device]:
        assert (case.name, case.shape, case.dtype, case.groups) in known


def test_every_provider_runs_in_its_layout(monkeypatch):
    seen = []
    stock = F.group_norm

    def group_norm(X, groups, weight, bias):
        last = X.is_contiguous(memory_format=torch.channels_last)
        seen.append((gn_override.is_enabled(), last, X.requires_grad))
        return stock(X, groups, weight, bias)

    monkeypatch.setattr(F, "group_norm", group_norm)
    row = _bench.measure(SMALL, "cpu", 0.01)
    assert set(seen) == {(True, True, True), (False, True, True), (False, False, True)}
    assert row["checked"] and "wrong" not in row
    assert row["copy"] > 0
    for what in _bench.DIRECTIONS:
        assert set(row[what]) == set(_bench.LAYOUTS) and min(row[what].values()) > 0


def test_rounds_of_ours_are_with_the_override_on():
    """At least four rounds count, and one before them; every step has a turn in each."""
    seen = {"a": [], "a gn_override": []}
    steps = {
        name: lambda name=name: (seen[name].append(gn_override.is_enabled()), time.sleep(0.006))
        for name in seen
    }
    times = _bench.time_rounds(steps, 0)
    assert set(seen["a"]) == {False} and set(seen["a gn_override"]) == {True}
    for name in seen:
        assert (len(seen[name]), len(times[name])) == (5 * 3, 4 * 2)


def test_difference_is_by_the_precision_of_the_dtype():
    ones = torch.ones(4, 4, dtype=torch.bfloat16)
    assert _bench.difference("fwd", [ones * 1.03125], [ones]) == ""
    assert _bench.difference("fwd", [ones * 1.25], [ones]).startswith("Y: relative l2 error")


def test_table():
    lines = _bench.table([ROW]).splitlines()
    assert lines[1].split() == "2x320x64x64 bfloat16 8.0 10.0 50.0 40.0 4.00x".split()
    assert lines[4].split() == "2x320x64x64 bfloat16 8.0 20.0 10.0 80.0 0.50x".split()


def test_command_prints_a_table(one_row, capsys):
    assert main(["bench", "--device", "cpu", "--seconds", "0.01"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("CPU, ") and torch.__version__ in captured.out
    assert captured.out.count("2x8x3x5 float32") == 2
    assert captured.err == "[1/1] small float32\n"


def test_a_busy_machine_is_said(monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, said in ((3.9, ""), (9.5, "busy (load 9.5 on 4 cores)")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        _bench.say_if_busy()
        assert said in (error := capsys.readouterr().err) and bool(error) is bool(said)


def test_command_prints_json(one_row, capsys):
    assert main(["bench", "--device", "cpu", "--seconds", "0.01", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["torch"] == torch.__version__ and content["unit"].startswith("microseconds")
    assert content["rows"][0]["fwd"].keys() == _bench.LAYOUTS.keys()


def test_command_draws(one_row, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bars.svg"
    arguments = ["--device", "cpu", "--seconds", "0.01", "--plot", str(picture)]
    assert main(["bench", *arguments]) == 0
    assert ">2x8x3x5 float32<" in picture.read_text()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("value", "forward: Y: relative l2 error"),
        ("gradient", "forward + backward: dX: relative l2 error"),
        ("elsewhere", "forward: not every call ran"),
    ],
    ids=["value", "gradient", "elsewhere"],
)
def test_a_wrong_row_is_said_and_fails(fault, said, one_row, monkeypatch, capsys):
    stock = F.group_norm

    def wrong(*arguments):
        if not gn_override.is_enabled():
            return stock(*arguments)
        if fault == "value":
            return stock(*arguments) * 1.01
        if fault == "gradient":
            X, *others = arguments
            return stock(X.detach() + (X - X.detach()) * 1.01, *others)
        with gn_override.disabled():
            return stock(*arguments)

    monkeypatch.setattr(F, "group_norm", wrong)
    assert main(["bench", "--device", "cpu", "--seconds", "0.01"]) == 1
    assert f"WRONG: 2x8x3x5 float32: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--plot", "bars.jpg"], ".svg or .png"),
        (["--plot", "no such folder/bars.svg"], "no folder no such folder"),
        (["--seconds", "0"], "more than 0"),
        (["--seconds", "nan"], "more than 0"),
        (["--seconds", "inf"], "finite"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_wrong_arguments(arguments, why, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    assert exit.value.code == 2 and why in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "bars.svg").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--plot", str(tmp_path / "bars.svg")])
    assert "bars.svg cannot be written" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["bench", "--plot", "bars.svg"])
    assert "gn_override[plot]" in capsys.readouterr().err


def test_the_cpu_is_said_as_by_explain(monkeypatch):
    for threads, said in ((1, "CPU, 1 thread"), (3, "CPU, 3 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert _bench.device_name("cpu") == explain_shape((2, 8, 4), 4).device == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert main(["bench", "--device", "cuda"]) == 1
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.cuda
def test_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(_bench, "CASES", {"cuda": _bench.CASES["cuda"][:1]})
    assert main(["bench", "--seconds", "0.05", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["checked"] and 0 < row["fwd"]["gn_override"] < row["fwd"]["stock_nchw"]
