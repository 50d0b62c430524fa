"""The benchmark tools, as far as they go without a GPU: what they draw, count, print and plot."""

from __future__ import annotations

import csv
import importlib
import inspect
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from processes import run_python
from shapes import Case
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import bench
import bench_cpu
import bench_ddp
import bench_host
import bench_models
import convergence
import counters
import kernel_table
import neighbours
import peers
import progress
import pytorch_kernels
import render_readme
import results
import sweep
import timing
import tune
import verify_gpu

from gn_override import _bench, _picture

MEASURED = results.RESULTS / "kernels-h200.json"
HEAD = {
    "gpu": "GPU-X",
    "driver": "1",
    "cuda": "13.0",
    "torch": "2.13.0",
    "commit": "abc",
    "date": "2026-01-01",
    "command": "python tools/bench.py",
}
SMALL = Case("small", (2, 8, 3, 5), 4, "float32")


def a_row(**fields):
    """1 Mi elements of bfloat16: 4.19 MB for a copy and a forward, 10.49 MB with the backward."""
    return {
        "name": "one",
        "shape": [4, 64, 64, 64],
        "groups": 32,
        "dtype": "bfloat16",
        "MB": 2.1,
        "copy": 4.0,
        "fwd": {"gn_override": 5.0, "stock_channels_last": 20.0, "stock_nchw": 15.0},
        "fwd_bwd": {"gn_override": 20.0, "stock_channels_last": 50.0, "stock_nchw": 60.0},
    } | fields


@pytest.fixture
def fake_timing(monkeypatch):
    """Runs each step once, where a GPU would time it."""

    def microseconds(step, milliseconds):
        step()
        return 7.0

    monkeypatch.setattr(timing, "microseconds", microseconds)


# Rates, text, picture.


def test_bytes_are_the_least_that_move():
    row = a_row()
    X = 4 * 64 * 64 * 64 * 2
    moved = [kernel_table.least_bytes(row, what) for what in ("copy", "fwd", "fwd_bwd")]
    assert moved == [2 * X, 2 * X, 5 * X]
    assert kernel_table.least_bytes(a_row(dtype="float32"), "fwd") == 4 * X


def test_rates_and_shares_of_the_copy():
    rate = kernel_table.rates(a_row())
    assert rate["GB/s"]["copy"] == round(2 * 2097152 / 4.0 / 1e3, 1)
    assert rate["GB/s"]["fwd_bwd"]["gn_override"] == round(5 * 2097152 / 20.0 / 1e3, 1)
    # The share is the copy's time over ours, with 2.5 copies for the backward too.
    assert rate["share"]["fwd"]["gn_override"] == 4.0 / 5.0
    assert rate["share"]["fwd_bwd"]["gn_override"] == 2.5 * 4.0 / 20.0


def test_speed_up_is_over_stocks_better_layout():
    assert kernel_table.over(a_row(), "fwd") == 3.0
    assert kernel_table.over(a_row(), "fwd_bwd") == 2.5
    assert kernel_table.over(a_row(fwd={"gn_override": 1.0}), "fwd") is None


def test_table_shows_failed_and_wrong_ones():
    row = a_row(
        fwd={"gn_override": 5.0, "gnnhwc": 4.0},
        fwd_bwd={"gn_override": 20.0},
        failed={"gnnhwc": {"fwd_bwd": "RuntimeError: no"}, "apex_v2": {"fwd": "AssertionError: "}},
        differs={"gnnhwc": {"fwd": "Y: relative l2 error 1"}},
        wrong="Y: error",
    )
    assert kernel_table.providers_of([row]) == ["gn_override", "gnnhwc", "apex_v2"]
    forward, both = kernel_table.table([row]).split("\n\n")[:2]
    line = forward.splitlines()[-1]
    assert line.split() == (
        "one bfloat16 2.1 4.0 1049 5.0 839 80% 4.0 100%! - WRONG: Y: error".split()
    )
    assert "gnnhwc" in forward and "apex_v2" in forward
    assert both.splitlines()[-1].split()[8:10] == ["-", "-"]
    assert kernel_table.losses([row]) == [
        "one bfloat16 forward: ours 5.0 us, gnnhwc 4.0 us (wrong)"
    ]


def test_losses_name_any_provider():
    row = a_row(fwd={"gn_override": 5.0, "stock_nchw": 4.5, "compile": 4.0, "apex_v2": 6.0})
    assert kernel_table.losses([a_row(), row]) == [
        "one bfloat16 forward: ours 5.0 us, stock_nchw 4.5 us",
        "one bfloat16 forward: ours 5.0 us, compile 4.0 us",
    ]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures_repeat(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    peer = a_row(name="two", fwd={"gn_override": 5.0, "stock_nchw": 4.0})
    drawn = []
    for name in "ab":
        paths = [tmp_path / f"{name}-{kind}.{suffix}" for kind in ("bars", "roofline")]
        kernel_table.pictures(HEAD | {"rows": [a_row(), peer]}, *paths)
        drawn.append([path.read_bytes() for path in paths])
    assert drawn[0] == drawn[1]
    for content in drawn[0]:
        assert content.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_bars_have_a_label_a_number_and_a_colour(tmp_path):
    pytest.importorskip("matplotlib")
    _picture.bars({"one": [("up", 2.0), ("down", 0.5)]}, "from here", tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    for part in (">up<", ">down<", ">2.0x<", ">0.5x<", _picture.GAIN, _picture.LOSS, "from here"):
        assert part in text, part


def contrast(one, other):
    """Of two colours, by the formula of WCAG 2.2."""

    def luminance(colour):
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#0d1117"], ids=["light", "dark"])
def test_pictures_can_be_read_on_light_and_dark_pages(ground):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast(_picture.INK, ground) > 4
    assert min(contrast(colour, ground) for colour in (_picture.GAIN, _picture.LOSS)) > 3
    for path in (results.ROOT / "docs").glob("*.svg"):
        text = path.read_text()
        fills = set(re.findall(r"(?:fill|stroke): (#\w+)", text))
        assert fills and fills <= {_picture.INK, _picture.GAIN, _picture.LOSS}, path


def test_the_picture_of_the_readme_is_that_of_the_results():
    text = (results.ROOT / "docs" / "speed-up-h200.svg").read_text()
    content = json.loads(MEASURED.read_text())
    numbers = re.findall(r">([\d.]+x)</text>", text)
    expected = [
        f"{_bench.speed_up(row, what):.1f}x"
        for what in _bench.DIRECTIONS
        for row in content["rows"]
    ]
    assert numbers == expected
    for row in content["rows"]:
        assert f">{'x'.join(map(str, row['shape']))} {row['dtype']}<" in text
    assert content["commit"] in text and content["gpu"] in text


# tools/bench.py.


def test_reprints_a_results_file(capsys):
    assert bench.main(["--from", str(MEASURED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in json.loads(MEASURED.read_text())["rows"]:
        assert sum(line.startswith(f"{row['name']} ") for line in lines) >= 2


def test_draws_a_results_file(tmp_path):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("bars.svg", "roofline.svg")]
    arguments = ["--plot", str(paths[0]), "--roofline", str(paths[1])]
    assert bench.main(["--from", str(MEASURED), *arguments]) == 0
    assert all(path.stat().st_size > 0 for path in paths)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "nonsense"], "no such case: nonsense"),
        (["--only", "sd15d", "--dtype", "float32"], "no such case: sd15d in float32"),
        (["--dtype", "half"], "invalid choice: 'half'"),
        (["--provider", "stock_nchw"], "unrecognized arguments: --provider"),
        (["--providers", "gn_override,cudnn"], "--providers"),
        (["--providers", "stock_nchw"], "--providers: gn_override"),
        (["--from", "x.json", "--output", "y"], "not allowed with"),
        (["--from", "x.json", "--plot", "y.jpg"], ".svg or .png"),
        (["--from", "x.json"], "No such file or directory: 'x.json'"),
        (["--from", __file__], "test_tools.py is no results file"),
        (["--activation", "identity"], "invalid choice: 'identity'"),
        (["--activation", "silu", "--plot", "y.svg"], "there is no picture"),
    ],
)
def test_wrong_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.parse(argv)
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        bench.parse(["--from", "x.json", "--plot", "y.svg"])
    assert "gn_override[plot]" in capsys.readouterr().err.splitlines()[-1]


def test_measuring_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench.parse([])
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_arguments_choose_cases_and_providers():
    arguments = bench.parse(["--from", str(MEASURED), "--only", "vae,rn2", "--dtype", "float32"])
    assert [case.id for case in arguments.cases] == ["vae-float32", "rn2-float32"]
    assert arguments.providers == list(bench.NAMES)


def test_a_row_times_everyone(fake_timing):
    row = bench.measure(SMALL, bench.OURS | bench.STOCK, 1, device="cpu")
    assert row["checked"] and "failed" not in row and "differs" not in row
    for what in ("fwd", "fwd_bwd"):
        assert row[what] == dict.fromkeys(["gn_override", *_bench.STOCK], 7.0)
    assert kernel_table.rates(row)["share"]["fwd"]["gn_override"] == 1.0


def test_every_provider_is_timed_with_its_switch_and_layout(monkeypatch, fake_timing):
    """Ours with the override on, stock with it off, in both layouts."""
    seen = []

    def steps(norm, inputs, layout):
        return {"fwd": lambda: seen.append((bench.gn_override.is_enabled(), layout))}

    monkeypatch.setattr(timing, "steps", steps)
    bench.measure(SMALL, bench.OURS | bench.STOCK, 1, checked=False, device="cpu")
    assert seen == [(True, "channels_last"), (False, "channels_last"), (False, "nchw")]


def test_peers_that_fail_or_err_do_not_stop_a_row(fake_timing):
    def raises(X, G, gamma, beta):
        raise RuntimeError("shape unsupported\nby /somewhere/kernel.cu")

    def forward_only(X, G, gamma, beta):
        return F.group_norm(X.detach(), G, gamma.detach(), beta.detach())

    def wrong(X, G, gamma, beta):
        return F.group_norm(X, G, gamma, beta) * 1.01

    functions = {"raises": raises, "forward_only": forward_only, "wrong": wrong}
    providers = bench.OURS | {name: bench.Provider(norm) for name, norm in functions.items()}
    row = bench.measure(SMALL, providers, 1, device="cpu")
    assert row["fwd"] == dict.fromkeys(["gn_override", "forward_only", "wrong"], 7.0)
    assert row["fwd_bwd"] == dict.fromkeys(["gn_override", "wrong"], 7.0)
    assert row["failed"]["raises"]["fwd"] == "RuntimeError: shape unsupported"
    assert list(row["failed"]["forward_only"]) == ["fwd_bwd"]
    assert row["differs"]["wrong"]["fwd"].startswith("Y: relative l2 error 1.00e-02")
    assert list(row["differs"]) == ["wrong"]


def test_our_own_error_is_an_error(fake_timing):
    def raises(X, G, gamma, beta):
        raise RuntimeError("ours")

    ours = {"gn_override": bench.Provider(raises, on=True)}
    with pytest.raises(RuntimeError, match="ours"):
        bench.measure(SMALL, ours, 1, device="cpu")


@pytest.mark.parametrize(
    ("most_exact", "fault"), [(1 << 29, 5e-4), (0, 0.01)], ids=["fp64", "rough"]
)
def test_a_wrong_result_of_ours_is_said(most_exact, fault, monkeypatch, fake_timing):
    """By the check to fp64 a fault that the rough one lets pass, too."""
    monkeypatch.setattr(bench, "MOST_EXACT", most_exact)
    assert bench.measure(SMALL, bench.OURS, 1, device="cpu")["checked"]
    native = bench.reference.native

    def wrong(inputs, mask=bench.reference.ALL):
        found = native(inputs, mask)
        if bench.gn_override.is_enabled():
            found.dX = found.dX * (1 + fault)
        return found

    monkeypatch.setattr(bench.reference, "native", wrong)
    row = bench.measure(SMALL, bench.OURS, 1, device="cpu")
    assert row["wrong"].startswith("dX: ") and "checked" not in row


def test_a_time_of_other_kernels_is_said(monkeypatch, fake_timing):
    """Right results are not enough where ours did not run."""
    monkeypatch.setattr(bench.gn_override, "enabled", bench.gn_override.disabled)
    row = bench.measure(SMALL, bench.OURS, 1, device="cpu")
    assert row["wrong"].startswith("native_group_norm on cpu: (ours, aten) calls (0, ")


def test_difference_finds_nan_and_shape():
    stock = bench.reference.Results(torch.ones(3, 4), None, None)
    assert timing.difference("fwd", (torch.ones(3, 4) + 1e-6,), stock) == ""
    assert "nan" in timing.difference("fwd", (torch.full((3, 4), math.nan),), stock)
    assert timing.difference("fwd", (torch.ones(3),), stock).startswith("Y: shape (3,)")


# tools/bench.py --activation.

FORWARDS = (bench.reference.FORWARD, bench.reference.FUSED[0])
BACKWARDS = (bench.reference.ATEN[1], bench.reference.FUSED[1])


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_fused_and_alone_take_turns(activation, monkeypatch):
    turns = [10.0, 15.0, 10.2] * (bench.TURNS - 1) + [30.0, 40.0, 50.0]
    times = iter([*turns, *(2 * time for time in turns)])
    counts = []

    def microseconds(step, milliseconds):
        torch.ops.gn_override.reset_counters()
        step()
        counts.append([bench.reference.calls(op, "cpu")[0] for op in (*FORWARDS, *BACKWARDS)])
        return next(times)

    monkeypatch.setattr(timing, "microseconds", microseconds)
    row = bench.measure_fused(SMALL, activation, 1, device="cpu")
    assert row["checked"]
    assert row["fwd"] == {"alone": 10.0, "followed": 15.0, "fused": 10.2}
    assert row["fwd_bwd"] == {"alone": 20.0, "followed": 30.0, "fused": 20.4}
    forward = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]] * bench.TURNS
    assert counts == [*forward, *([a, b, a, b] for a, b, *_ in forward)]
    assert row["shape"] == [2, 8, 3, 5] and row["MB"] == 0.0


@pytest.mark.parametrize("most_exact", [1 << 29, 0], ids=["fp64", "rough"])
def test_a_wrong_fused_result_is_said(most_exact, monkeypatch, fake_timing):
    monkeypatch.setattr(bench, "MOST_EXACT", most_exact)
    group_norm = bench.gn_override.functional.group_norm

    def off_by_a_percent(*arguments, activation):
        return group_norm(*arguments, activation=activation) * (1 + 0.01 * (activation == "silu"))

    monkeypatch.setattr(bench.gn_override.functional, "group_norm", off_by_a_percent)
    row = bench.measure_fused(SMALL, "silu", 1, device="cpu")
    assert "checked" not in row and ";" not in row["wrong"]
    assert row["wrong"].startswith("silu: error" if most_exact else "Y: relative l2 error 1.00e-02")
    assert "wrong" not in bench.measure_fused(SMALL, "relu", 1, device="cpu")


def test_a_wrong_fused_gradient_is_said(monkeypatch, fake_timing):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_, Y):
            return Y.clone()

        @staticmethod
        def backward(_, dY):
            return 2 * dY

    group_norm = bench.gn_override.functional.group_norm

    def wrong_backward(*arguments, activation):
        Y = group_norm(*arguments, activation=activation)
        return Doubled.apply(Y) if activation == "silu" else Y

    monkeypatch.setattr(bench.gn_override.functional, "group_norm", wrong_backward)
    row = bench.measure_fused(SMALL, "silu", 1, device="cpu")
    assert "checked" not in row and row["wrong"].startswith("dX: relative l2 error 1.00e+00")


def test_a_fused_time_of_other_kernels_is_said(monkeypatch, fake_timing):
    def in_two_steps(X, G, gamma, beta, activation):
        Y = F.group_norm(X, G, gamma, beta)
        return Y if activation == "identity" else F.silu(Y)

    monkeypatch.setattr(bench.gn_override.functional, "group_norm", in_two_steps)
    row = bench.measure_fused(SMALL, "silu", 1, device="cpu")
    assert row["wrong"].startswith("native_group_norm on cpu: (ours, aten) calls (1, 0)")


def test_fused_rows_are_printed(tmp_path, capsys):
    row = {"name": "one", "shape": [2, 8, 3, 5], "dtype": "bfloat16", "checked": True}

    def times(forward, both):
        return {
            "fwd": {"alone": 10.0, "followed": 15.0, "fused": forward},
            "fwd_bwd": {"alone": 20.0, "followed": 40.0, "fused": both},
        }

    rows = [
        row | times(10.2, 21.0),
        row | {"name": "two"} | times(10.31, 23.0),
        row | {"name": "bad", "wrong": "silu: error"} | times(9.9, 20.0),
    ]
    path = results.write("fused-x", HEAD | {"activation": "silu", "rows": rows}, tmp_path)
    assert bench.main(["--from", str(path)]) == 1
    printed = capsys.readouterr().out
    text = "<!-- results: fused-x -->\n<!-- end results -->"
    for shown in (printed, render_readme.render(text, tmp_path)):
        assert (
            "| forward alone, us | forward then silu | forward fused | forward fused / alone |"
            in shown
        )
        assert (
            "| one 2x8x3x5 | bfloat16 | 10 | 15 | 10.2 | 1.020x | 20 | 40 | 21 | 1.050x |" in shown
        )
        assert "| bad 2x8x3x5 (wrong) | bfloat16 |" in shown
        assert "Forward within 3%, the goal: 2 of 3 rows; median 1.020x, largest 1.031x" in shown
        assert "(two 2x8x3x5 bfloat16). Forward and backward: median 1.050x, largest" in shown


# tools/neighbours.py.


class Layers(nn.Module):
    """A convolution, two norms, a convolution, with something between the norms."""

    def __init__(self, between):
        super().__init__()
        self.inlet, self.outlet = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)
        self.first, self.second = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.between = between

    def forward(self, x):
        x = F.silu(self.first(self.inlet(x)))
        return self.outlet(self.second(self.between(x)))


class Copied(nn.Module):
    def forward(self, x):
        return x.contiguous().contiguous(memory_format=torch.channels_last)


class Concatenated(nn.Module):
    """Inductor copies both into place: that is not a change of layout."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return torch.cat([self.left(x), self.right(x)], 1)


class Break(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x


def compiled_step(net, layout=torch.channels_last, fullgraph=True):
    net = torch.compile(net.eval().to(memory_format=layout), fullgraph=fullgraph)
    x = torch.randn(2, 4, 9, 8).to(memory_format=layout)

    def step():
        with torch.no_grad():
            return net(x)

    return step


@pytest.mark.parametrize(
    ("between", "copies"),
    [(nn.Identity(), 0), (nn.Tanh(), 0), (Concatenated(), 0), (Copied(), 1)],
    ids=["nothing", "tanh", "cat", "copies"],
)
def test_copies_at_norms_are_counted(between, copies, capsys):
    torch._dynamo.reset()
    found = neighbours.generated(compiled_step(Layers(between)))
    copied = found.pop("copies"), found.pop("copies_at_norms")
    assert found == {"graphs": 1, "graph_breaks": 0, "norms": 2}
    assert all(count >= 1 for count in copied) if copies else copied == (0, 0)
    assert ("copy at a norm" in capsys.readouterr().err) is (copies > 0)


def test_graph_breaks_are_counted():
    torch._dynamo.reset()
    found = neighbours.generated(compiled_step(Layers(Break()), fullgraph=False))
    assert (found["graphs"], found["norms"]) == (2, 2) and found["graph_breaks"] >= 1


def test_a_model_without_our_norms_is_an_error():
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="no group norm"):
        neighbours.generated(compiled_step(Layers(nn.Identity()), torch.contiguous_format))


def test_layout_kernels_of_a_profile():
    ours = "void gn_override::resident_forward_kernel<__half, 8>(gn_override::Shape)"
    conv, add = "sm90_xmma_fprop_implicit_gemm_nhwckrsc_nhwc_kernel", "triton_poi_fused_add_3"
    from_cudnn = "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true>(int)"
    of_aten = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>"
    names = [conv, ours, conv, from_cudnn, add, ours, ours, add, conv]
    clean = {"kernels": 9, "layout_kernels": 1, "layout_kernels_at_norms": 0}
    assert neighbours.count(names) == clean
    assert neighbours.count([of_aten, *names[1:]])["layout_kernels_at_norms"] == 1
    assert neighbours.count([*names[:-2], from_cudnn])["layout_kernels_at_norms"] == 1
    assert neighbours.count([*names[:-2], from_cudnn])["layout_kernels"] == 2
    with pytest.raises(RuntimeError, match="no kernel of gn_override"):
        neighbours.count([conv, add])


# Peers.


@pytest.fixture
def no_peers(monkeypatch):
    """None of the packages can be found, whatever is installed here."""
    for top in {module.partition(".")[0] for p in peers.PEERS.values() for module in p.modules}:
        for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
            monkeypatch.delitem(sys.modules, name)
    real = peers.importlib.import_module

    def import_module(name):
        if name in sys.modules:
            return sys.modules[name]
        top = name.partition(".")[0]
        raise ModuleNotFoundError(f"No module named {top!r}", name=top)

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    return real


def test_no_peer_is_no_error(no_peers):
    assert peers.find() == ({}, {})
    here, unusable = bench.providers_here(["stock_nchw", "gnnhwc", "gn_override"])
    assert list(here) == ["gn_override", "stock_nchw"] and unusable == {}


# --- the kernels of a checkout of PyTorch ----------------------------------------------------

# Functions of the checkout's signatures, whose results show what they were called with.
CHECKOUT = """
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/group_norm.h>

namespace at::native {
namespace {

void forward(const Tensor& X, const Tensor& gamma, const Tensor& beta, int64_t N, int64_t C,
             int64_t HxW, int64_t group, double eps, Tensor& Y, Tensor& mean, Tensor& rstd) {
  Y.copy_(X.mul(gamma.view({C, 1, 1})).add(beta.view({C, 1, 1})));
  mean.fill_(N * 100 + HxW);
  rstd.fill_(eps);
}

void backward(const Tensor& dY, const Tensor& X, const Tensor& mean, const Tensor& rstd,
              const Tensor& gamma, int64_t N, int64_t C, int64_t HxW, int64_t group, Tensor& dX,
              Tensor& dgamma, Tensor& dbeta) {
  dX.copy_(dY.mul(mean.sum()));
  dgamma.copy_(gamma.add(group));
  dbeta.fill_(N * 100 + HxW + C * 10000).mul_(rstd.max().div(1e-5));
}

} // namespace
REGISTER_DISPATCH(GroupNormKernel, &forward)
REGISTER_DISPATCH(GroupNormBackwardKernel, &backward)
} // namespace at::native
"""


@pytest.fixture
def checkout(tmp_path):
    path = tmp_path / pytorch_kernels.KERNELS
    path.parent.mkdir(parents=True)
    path.write_text(CHECKOUT)
    return tmp_path


def test_kernels_of_a_checkout_have_the_name_that_git_has_for_them(checkout):
    path = checkout / pytorch_kernels.KERNELS
    done = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True)
    assert pytorch_kernels.source(checkout)["git blob"] == done.stdout.strip()


def test_a_folder_without_kernels_is_no_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--pytorch", str(tmp_path)])
    assert "has no aten/src/ATen" in capsys.readouterr().err


@pytest.mark.skipif(
    torch.version.cuda is None or tune.find_nvcc() is None,
    reason="compiling needs nvcc and a torch with CUDA",
)
def test_kernels_of_a_checkout_are_called_as_native_group_norm_calls_them(checkout):
    plain, _ = bench.providers_here(["gn_override"], checkout)
    assert kernel_table.CHECKOUT not in plain
    here, _ = bench.providers_here(["gn_override", kernel_table.CHECKOUT], checkout)
    X = torch.randn(2, 6, 3, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    gamma, beta = (torch.randn(6, requires_grad=True) for _ in range(2))
    Y = here[kernel_table.CHECKOUT].norm(X, 3, gamma, beta)
    assert Y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(Y, X * gamma.view(6, 1, 1) + beta.view(6, 1, 1))
    dX, dgamma, dbeta = torch.autograd.grad(Y, (X, gamma, beta), torch.ones_like(Y))
    torch.testing.assert_close(dX, torch.full_like(X, 2 * 3 * 215.0))  # mean is [N, G]
    torch.testing.assert_close(dgamma, gamma + 3)
    torch.testing.assert_close(dbeta, torch.full_like(beta, 60215.0))


def test_peers_are_called_their_way(no_peers, monkeypatch):
    called = []

    def group_norm(*arguments):
        called.append(arguments)

    apex = ModuleType("apex")
    apex.cuda_group_norm_nhwc_one_pass = apex.cuda_group_norm_nhwc_two_pass = group_norm
    monkeypatch.setitem(sys.modules, "apex.contrib.group_norm.group_norm", apex)
    gnnhwc = ModuleType("gnNHWC")
    gnnhwc.GN_NHWC_Func = type("GN_NHWC_Func", (), {"apply": staticmethod(group_norm)})
    monkeypatch.setitem(sys.modules, "gnNHWC.custom_gn", gnnhwc)

    found, unusable = peers.find()
    assert set(found) == {"apex_one_pass", "apex_two_pass", "gnnhwc"}
    assert list(unusable) == ["apex_v2"]  # an older apex
    found["apex_one_pass"]("X", 32, "gamma", "beta")
    found["gnnhwc"]("X", 32, "gamma", "beta")
    assert called == [("X", 32, "gamma", "beta", 1e-5), ("X", "gamma", "beta", 32, 1e-5, 0)]


def test_a_broken_peer_says_why(tmp_path, monkeypatch):
    package = tmp_path / "sfast" / "triton"
    package.mkdir(parents=True)
    (package / "torch_ops.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found, unusable = peers.find()
    assert "stable_fast" not in found
    assert unusable["stable_fast"].startswith("ModuleNotFoundError: No module named 'a_module")


def test_reasons_are_short_and_hold_no_paths():
    text = peers.reason(OSError("no /opt/of/this/machine/x.so here\nsecond line"))
    assert text == "OSError: no ... here"
    assert len(peers.reason(ValueError("x" * 1000))) == 200


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


# tools/sweep.py.


def test_a_seed_draws_the_same_shapes():
    assert list(sweep.draw(50, 3)) == list(sweep.draw(80, 3))[:50]
    assert list(sweep.draw(50, 3)) != list(sweep.draw(50, 4))


def test_drawn_shapes_are_in_range_and_of_their_kind():
    cases = list(sweep.draw(400, 0))
    kinds = {case.name.partition("_")[2]: [] for case in cases}
    for case in cases:
        kinds[case.name.partition("_")[2]].append(case)
        assert 1 <= case.N <= 1024 and 1 <= case.C <= 4096 and 1 <= case.HxW <= 4 << 20
        assert case.C % case.G == 0 and len(case.shape) == 4
        assert case.numel * getattr(torch, case.dtype).itemsize <= 2 << 30
        assert case.one_layout == case.name.endswith("one_layout")
    assert set(kinds) == {*sweep.KINDS, "one_layout"}
    assert sum(not case.one_layout for case in cases) >= 300
    for kind, drawn in kinds.items():
        assert {case.dtype for case in drawn} == set(sweep.DTYPES), kind
        if kind.startswith("odd_C"):
            assert all(case.C % 2 for case in drawn)
        if kind.endswith("prime_HW"):
            assert all(case.HxW == sweep.largest_prime(case.HxW) for case in drawn)
        if kind in sweep.WIDTHS:
            assert all(case.D == sweep.WIDTHS[kind] for case in drawn)
        if kind == "G1":
            assert all(case.G == 1 for case in drawn)
    # Small and large, few and many samples.
    for size in ("N", "C", "HxW", "numel"):
        values = sorted(getattr(case, size) for case in cases)
        assert values[-40] > 100 * values[40]


def test_number_helpers():
    assert [sweep.largest_prime(n) for n in (2, 3, 4, 9, 100, 4 << 20)] == [2, 3, 3, 7, 97, 4194301]
    assert sweep.height_and_width(64 * 48) == (48, 64)
    assert sweep.height_and_width(97) == (1, 97)


def test_sweep_measures_served_and_one_layout_shapes(fake_timing):
    rows = [sweep.measure(case, 1, "cpu") for case in (SMALL, Case("point", (4, 8, 1, 1), 4))]
    assert [row["one_layout"] for row in rows] == [False, True]
    assert all(row["checked"] and len(row["rules"]) == 2 for row in rows)
    assert all(len(row["fwd"]) == 3 for row in rows)


def test_sweep_keeps_errors_and_goes_on(monkeypatch):
    def raises(step, milliseconds):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "microseconds", raises)
    row = sweep.measure(SMALL, 1, "cpu")
    assert row["error"] == "OutOfMemoryError: CUDA out of memory"
    assert sweep.summary([row])["errors"] == 1
    assert "ERROR: small [2, 8, 3, 5]" in sweep.report([row], 3)


def test_sweep_stops_at_its_time(monkeypatch):
    seen = []

    def one(case):
        seen.append(case)
        clock[0] += 10
        return {"name": case.name}

    clock = [0.0]
    monkeypatch.setattr(sweep.time, "monotonic", lambda: clock[0])
    assert len(sweep.sweep(400, 0, 35, one)) == len(seen) == 4
    assert len(sweep.sweep(3, 0, 1000, one)) == 3


def test_sweep_stops_where_the_gpu_is_lost(monkeypatch):
    lost = iter([False, False, True])
    monkeypatch.setattr(timing, "gpu_lost", lambda: next(lost))
    assert len(sweep.sweep(9, 0, 1000, lambda case: {})) == 2


def sweep_row(number, ours, **fields):
    row = a_row(
        name=f"{number}_any",
        one_layout=False,
        rules=["two_pass", "resident"],
        fwd={"gn_override": ours, "stock_channels_last": 30.0, "stock_nchw": 10.0},
    )
    return row | fields


def test_summary_and_report_of_a_sweep():
    large = {"shape": [16, 64, 64, 256], "MB": 33.6}
    rows = [
        sweep_row(0, 8.0),
        sweep_row(1, 10.4),  # slower by 4%
        sweep_row(2, 10.6, wrong="Y: error"),  # by 6%
        sweep_row(3, 6.0, **large),
        sweep_row(4, 5.0, **large),
        sweep_row(5, 50.0, one_layout=True),
        {"name": "6_any", "shape": [1], "groups": 1, "one_layout": False, "error": "no memory"},
    ]
    found = sweep.summary(rows)
    assert found["shapes"] == 7 and found["served"] == 5
    assert found["wrong"] == 1 and found["errors"] == 1
    assert found["slower than stock by more than 5%"] == {"fwd": 1, "fwd_bwd": 0}
    assert found["median of forward / copy above 16 MB"] == 1.375 and found["above 16 MB"] == 2
    text = sweep.report(rows, 2)
    ranking = text.partition("forward, stock / ours, the worst:\n")[2].splitlines()
    assert ranking[0].split()[0] == "0.94" and ranking[0].endswith("2_any")
    assert ranking[1].split()[0] == "0.96" and not ranking[2].startswith(" ")
    assert "one pixel or channel, forward, 1 shapes" in text and "stock / ours 0.20" in text
    assert "WRONG: 2_any" in text and "ERROR: 6_any" in text
    assert "checkout" not in text
    assert sweep.summary([])["median of forward / copy above 16 MB"] is None


def test_a_sweep_beside_a_checkout():
    rows = [sweep_row(0, 8.0), sweep_row(1, 8.0)]
    rows[0]["fwd"][kernel_table.CHECKOUT] = 7.6  # faster by 5.3%
    rows[1]["fwd"][kernel_table.CHECKOUT] = 7.7  # by 3.9%
    found = sweep.summary(rows)
    assert found["slower than stock by more than 5%"] == {"fwd": 0, "fwd_bwd": 0}
    assert found["slower than PyTorch's checkout by more than 5%"] == {"fwd": 1, "fwd_bwd": 0}
    ranking = sweep.report(rows, 2).partition("forward, PyTorch's checkout / ours, the worst:\n")[2]
    assert ranking.splitlines()[0].split()[0] == "0.95"


def test_times_of_a_checkout_are_rendered(tmp_path):
    rows = [sweep_row(n, 10.0, MB=20.0, copy=9.0) for n in range(4)]
    for row, times in zip(rows, [(20.0, 9.0), (30.0, 18.0), (70.0, 27.0)], strict=False):
        row["fwd"][kernel_table.CHECKOUT], row["fwd_bwd"][kernel_table.CHECKOUT] = times
        row["fwd_bwd"] = row["fwd_bwd"] | {"gn_override": 9.0}
    not_served = sweep_row(4, 10.0, one_layout=True)
    not_served["fwd"][kernel_table.CHECKOUT] = 1.0
    block = "<!-- results: kernels-x -->\n<!-- end results -->"
    results.write("kernels-x", HEAD | {"rows": [*rows, not_served]}, tmp_path)
    shown = render_readme.render(block, tmp_path)
    assert "/ ours: forward 2x to 7x, median 3x; forward and backward 1x to 3x, median 2x." in shown
    results.write("kernels-x", HEAD | {"rows": rows[3:]}, tmp_path)
    assert "checkout" not in render_readme.render(block, tmp_path)


@pytest.mark.parametrize(("fields", "status"), [({}, 0), ({"wrong": "Y: error"}, 1)])
def test_sweep_fails_if_a_row_is_wrong(fields, status, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(results, "machine", lambda device: {})
    monkeypatch.setattr(sweep, "sweep", lambda *arguments: [sweep_row(0, 8.0, **fields)])
    assert sweep.main([]) == status


# tools/bench_host.py.


def test_host_figures_pair_the_rounds():
    rounds = [
        {"stock": 10.0, "off": 10.0, "on": 11.0},
        {"stock": 20.0, "off": 20.0, "on": 22.0},  # a slower clock
        {"stock": 20.0, "off": 40.0, "on": 22.0},  # something came between
    ]
    found = bench_host.figures(rounds)
    assert found["stock"] == 20.0 and found["ratio"] == {"off": 1.0, "on": 1.1}


def test_host_time_is_measured_on_the_cpu_too(tmp_path):
    arguments = ["--device", "cpu", "--seconds", "0.01", "--output", "host", "--folder"]
    tool = results.ROOT / "tools" / "bench_host.py"
    done = run_python(tool, *arguments, tmp_path, cwd=tmp_path)
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert len(rows) == len(done.stdout.splitlines()) - 1 == 6
    for row in rows:
        assert all(row[name] > 0 for name in bench_host.VARIANTS)
        assert set(row["ratio"]) == {"off", "on"}


# tools/bench_ddp.py.

# A timm whose networks fit a test: of the name's norm.
SMALL_TIMM = """
from torch import nn

def create_model(name, pretrained):
    norm = nn.GroupNorm(4, 16) if name == "resnet50_gn" else nn.BatchNorm2d(16)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), *pool, nn.Linear(16, 1000))
"""


def run_bench_ddp(tmp_path, timm, *more, status=0):
    (tmp_path / "timm.py").write_text(timm)
    tool = results.ROOT / "tools" / "bench_ddp.py"
    options = ["--device", "cpu", "--batch", "2", "--steps", "1", "--folder", str(tmp_path), *more]
    return run_python(tool, *options, cwd=tmp_path, status=status, PYTHONPATH=str(tmp_path))


def test_training_beside_collectives_is_measured_on_the_cpu_too(tmp_path):
    done = run_bench_ddp(tmp_path, SMALL_TIMM, "--output", "ddp-x")
    content = json.loads((tmp_path / "ddp-x.json").read_text())
    assert [row["name"] for row in content["rows"]] == list(bench_ddp.VARIANTS)
    assert content["processes"] == content["batch"] == 2
    assert len(done.stdout.splitlines()) == 1 + len(bench_ddp.VARIANTS)
    for row in content["rows"]:
        assert min(row["alone"], row["together"]) > 0 and row["all-reduce"] is None
        assert row["host"] <= row["together"] and row["ratio"] > 0
    assert "| resnet50_gn, on |" in render_readme.ddp(content)


def test_training_beside_collectives_without_timm_says_so(monkeypatch, capsys):
    monkeypatch.setattr(bench_ddp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        bench_ddp.main(["--device", "cpu"])
    assert capsys.readouterr().err.endswith("error: it needs timm\n")


def test_wrong_gradients_are_not_timed(tmp_path):
    """A network that finds other gradients the second time it is built."""
    timm = SMALL_TIMM.replace("def create", "built = []\n\ndef create").replace(
        "    norm =", "    built.append(name)\n    norm ="
    )
    timm = timm.replace("nn.ReLU()", "nn.ReLU() if len(built) % 2 else nn.Tanh()")
    done = run_bench_ddp(tmp_path, timm, status=1)
    assert "gradients differ" in done.stderr
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("place", range(3))
def test_a_gradient_that_is_nan_is_an_error(place):
    expected = [torch.ones(2), torch.zeros(3), torch.ones(2)]
    found = [1.01 * t for t in expected]
    assert bench_ddp.error_of_all(found, expected) == pytest.approx(0.01, rel=1e-5)
    found[place][-1] = math.nan
    assert not bench_ddp.error_of_all(found, expected) <= bench_ddp.MOST_DIFFERENCE


def test_figures_of_the_slowest_process():
    every = [
        {"alone": 2.0, "together": 3.0, "host": 1.0, "all-reduce": 0.25},
        {"alone": 2.5, "together": 2.75, "host": 2.0, "all-reduce": 0.5},
    ]
    largest = bench_ddp.slowest(every)
    assert largest == {
        "alone": 2.5,
        "together": 3.0,
        "host": 2.0,
        "all-reduce": 0.5,
        "ratio": 1.2,
    }
    assert "0.50" in bench_ddp.table([{"name": "x"} | largest]).splitlines()[1]


# Plans.


def test_random_shapes_repeat_and_are_of_models():
    cases = tune.random_cases(40, 3)
    assert cases == tune.random_cases(40, 3) != tune.random_cases(40, 4)
    assert all(case.C % 32 == 0 and case.dtype in tune.DTYPES for case in cases)


def test_plans_are_read_and_ranked():
    lines = [
        "smallfloat32 fwd 5.00 8.00 5.50 1 0.0e+00 resident vector=4 columns=8",
        "smallfloat32 fwd 5.00 6.40 0.00 0 1.0e-07 two_pass vector=4 columns=2",
        "smallfloat32 fwd 5.00 0.00 0.00 0 1.0e-07 two_pass vector=4 columns=1",
        "smallfloat32 bwd 5.00 9.00 0.00 1 inf resident vector=4 columns=8\n",
    ]
    forward, backward = tune.read_rows([SMALL], lines)
    assert forward["moved"] == {"resident vector=4 columns=8": 5.5} and not backward["moved"]
    assert "moved without computing 5.5 us" in tune.describe(forward, 1)
    assert "moved" not in tune.describe(backward, 1)
    assert forward["plans"] == {
        "resident vector=4 columns=8": 8.0,
        "two_pass vector=4 columns=2": 6.4,
    }
    assert tune.regret(forward) == 1.25 and not forward["wrong"]
    assert [line.split()[0] for line in tune.describe(forward, 1).splitlines()[1:]] == ["1", "2"]
    shortened = tune.shortened(forward, 1)
    assert shortened["plans"] == forward["plans"] and shortened["count"] == 3, "and the policy's"
    assert list(tune.shortened(backward, 1)["moved"]) == []
    shown = render_readme.tune({"rows": [shortened, backward]})
    assert "fwd | float32 | 5 | 5.5 | 6.4 | 8 | 1.10x | 1.28x | 1.60x |" in shown
    assert "bwd | float32 | 5 | - | 9 | 9 | - | 1.80x | 1.80x |" in shown
    assert backward["wrong"] == ["resident vector=4 columns=8: inf from two passes"]
    assert "WRONG" in tune.describe(backward, 1)
    assert tune.summary([forward, backward]).startswith(
        "4 plans: the policy's takes 1.125 times the best plan's time on average, 1.25 at most"
    )


def test_shapes_of_the_command_line_are_rendered_briefly():
    case = tune.parse_shape("2x320x8x8:32:bfloat16")
    line = f"{case.name}bfloat16 fwd 5.00 8.00 0.00 1 0.0e+00 two_pass vector=8"
    assert "| 2x320x8x8, fwd | bfloat16 |" in render_readme.tune(
        {"rows": tune.read_rows([case], [line])}
    )
    shapes = ",".join([case.name] * 40)
    content = dict.fromkeys(("gpu", "driver", "cuda", "torch", "commit", "date"), "?")
    content["rows"] = [{}]
    shown = render_readme.source(content | {"command": f"tune.py --shapes {shapes} --best 3"})
    assert len(shown) < 200
    assert "`tune.py --shapes 2x320x8x8:32:bfloat16,2x320" in shown
    assert shown.endswith("... --best 3`\n")


def test_worthy_plans_are_printed_as_rows_of_the_table():
    case = Case("one", (2, 320, 8, 8), 32, "bfloat16")
    policy = "cooperative vector=8 columns=40 splits=2 threads=512 samples_per_wave=1"
    best = "resident vector=8 columns=5 splits=3 threads=224 cluster=3"

    def row(plan: str, time: float) -> str:
        lines = [
            f"onebfloat16 bwd 5.00 8.00 0.00 1 0.0e+00 {policy}",
            f"onebfloat16 bwd 5.00 {time} 0.00 0 0.0e+00 {plan}",
        ]
        return tune.describe(tune.read_rows([case], lines)[0], 3, "gelu_tanh")

    pinned = "{kBackward, kGeluTanh, 2, 320, 64, 32, {kResident, 5, 3, 224}, 0.75},"
    assert row(best, 6.0).endswith(f"measured_cuda.h: {pinned}")
    assert "measured_cuda.h" not in row(best, 7.9), "not worth it"
    chip = row("cooperative columns=20 samples_per_wave=2 threads=320", 6.0)
    assert "{kCooperative, 20, 2, 320}" in chip
    assert "{kRegisters, 0, 0, 128}" in row("registers columns=2 threads=128", 6.0)
    assert "{kTwoPass, 0, 0, 0}" in row("two_pass columns=20 threads=256", 6.0)


def test_the_table_has_what_was_measured():
    """Each row is a right plan of the results, and faster than the policy's."""
    measured = set()
    files = [file for of in ("models", "unet") for file in results.RESULTS.glob(f"tune-{of}-*")]
    for file in files:
        content = json.loads(file.read_text())
        for row in content["rows"]:
            assert not row["wrong"]
            measured |= {
                tune.measured_plan(row, plan, content["activation"]) for plan in row["plans"]
            }
    header = (results.ROOT / "native" / "plan" / "measured_cuda.h").read_text()
    table = re.findall(r"^    (\{k.*\},)$", header, re.MULTILINE)
    assert table and measured.issuperset(table)
    assert all(float(row.rpartition(" ")[2].rstrip("},")) <= 0.98 for row in table)


def counted(name: str, **values: float) -> dict[str, str]:
    """A kernel of Nsight Compute's table."""
    metrics = dict.fromkeys(counters.METRICS, "0") | {counters.STALL.format("wait"): "1"}
    return {"ID": "0", "Kernel Name": name} | metrics | {k: f"{v:,}" for k, v in values.items()}


def profile_log(kernels: Iterable[dict[str, str]]) -> list[str]:
    lines = io.StringIO()
    columns = ["ID", "Kernel Name", *counters.METRICS]
    table = csv.DictWriter(lines, columns, quoting=csv.QUOTE_ALL)
    table.writeheader()
    table.writerow(dict.fromkeys(columns, "") | {counters.TIME: "ns", counters.READ: "byte"})
    table.writerows(kernels)
    return ["==PROF== Connected to process 1\n", *lines.getvalue().splitlines(keepends=True)]


def test_counters_of_a_step_are_its_kernels_together():
    barrier = counters.STALL.format("barrier")
    marker = counted("void erfinv_kernel<float>(int)")
    traffic = {counters.READ: 2_000_000, counters.WRITTEN: 1_000_000}
    copy = counted("void neg_kernel(int)", **{counters.TIME: 2000, counters.DRAM: 80}, **traffic)
    forward = counted("void first(int)", **{counters.TIME: 3000, counters.READ: 1_500_000})
    second = counted("void second(int)", **{counters.TIME: 1000, counters.DRAM: 40, barrier: 3})
    second[counters.SPECIAL] = "20"
    log = profile_log([marker, copy, marker, forward, marker, forward, second])
    rows = counters.rows([Case("one", (4, 64, 64, 64), 32, "float32")], log)
    assert [row["step"] for row in rows] == list(counters.STEPS)
    assert [row["us"] for row in rows] == [2.0, 3.0, 4.0]
    assert rows[0]["dram"] == 80 and rows[2]["dram"] == 10, "weighted by time"
    assert rows[2]["special"] == 5
    assert rows[1]["read"] == rows[2]["read"] == 1.5
    assert [row["least"] for row in rows] == [4.19, 4.19, 12.58]
    # `wait` is all there is in the first kernel, and a quarter of it in the second.
    stalls = rows[2]["stalls"]
    assert list(stalls)[:2] == ["wait", "barrier"] and stalls["wait"] == 57
    assert rows[2]["kernels"] == 2
    rendered = render_readme.counters({"rows": rows})
    for text in (rows[0]["name"], "fwd+bwd", "special functions %", "wait 57%"):
        assert text in rendered
    # 3 MB take elementwise 2 us.
    assert "fwd | float32 | 3 | 1 | 1.5 | 4.19 |" in rendered


@pytest.mark.parametrize(
    ("log", "why"),
    [(["==ERROR== no permission\n"], "no table"), (profile_log([]), "0 steps"), ([], "no table")],
    ids=["refused", "nothing ran", "empty"],
)
def test_counters_that_are_not_there_are_an_error(log, why):
    with pytest.raises(ValueError, match=why):
        counters.rows([SMALL], log)


def test_tune_without_nvcc_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="set CUDA_HOME"):
        tune.nvcc()


@pytest.mark.skipif(tune.find_nvcc() is None, reason="there is no nvcc")
def test_tune_compiles(tmp_path):
    compiler = [tune.nvcc(), "-std=c++20", "-arch=sm_90", f"-I{results.ROOT}", "-c"]
    source, target = results.ROOT / "tools" / "tune.cu", tmp_path / "tune.o"
    subprocess.run([*compiler, str(source), "-o", str(target)], check=True)
    assert target.exists()


# Whole models.


def test_models_that_cannot_be_built_are_left_out(monkeypatch, capsys):
    """By default, with a word; and are an error where they are asked for."""
    ran = []
    benches = {name: lambda _, name=name: ran.append(name) or [] for name in bench_models.BENCHES}
    monkeypatch.setattr(bench_models, "BENCHES", benches)
    monkeypatch.setattr(bench_models, "table", lambda rows: "")

    def without(*packages):
        found = lambda name: None if name in packages else name  # noqa: E731
        monkeypatch.setattr(bench_models.importlib.util, "find_spec", found)

    without("diffusers")
    assert bench_models.main(["--device", "cpu"]) == 0 and ran == ["resnet"]
    assert "vae is left out: it needs diffusers" in capsys.readouterr().err
    without("timm")
    assert bench_models.main(["--device", "cpu"]) == 0 and ran == ["resnet", "unet", "vae"]
    for rows, why in (
        ("resnet", "resnet needs timm"),
        ("unet_compiled", "unet_compiled needs a GPU"),
        ("nonsense", "nonsense is none of unet"),
    ):
        with pytest.raises(SystemExit, match="2"):
            bench_models.main(["--device", "cpu", "--rows", rows])
        assert why in capsys.readouterr().err
    without("diffusers", "timm")
    with pytest.raises(SystemExit, match="2"):
        bench_models.main(["--device", "cpu"])
    assert len(ran) == 3


def test_a_good_row_beside_a_failed_one_is_not_timed():
    good = bench_models.Row("good", calls=1, error_override=0.0, error_bound=1.0)
    bad = bench_models.Row("bad")
    printed = bench_models.table([good, bad]).splitlines()
    assert "good not timed" in printed[1] and "PARITY FAILED" in printed[2]
    rows = [vars(row) | {"parity": row.parity, "commit": "abc"} for row in (good, bad)]
    shown = render_readme.models({"rows": rows})
    assert "| good | not timed | - |" in shown and "| bad | parity failed | - |" in shown


def test_batch_norm_is_not_called_a_bound():
    row = bench_models.Row("net", floor="resnet50 with BatchNorm")
    rows = [vars(row) | {"parity": False, "commit": "abc"}]
    assert "a comparison, not a bound" in render_readme.models({"rows": rows})
    rows[0]["floor"] = "the model without its GroupNorms"
    assert "not a bound" not in render_readme.models({"rows": rows})


# --- convergence, verification ---------------------------------------------------------------


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
