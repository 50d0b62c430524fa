"""The tools that time kernels, as far as they go without a GPU: bench.py and sweep.py."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from types import ModuleType

import bench
import kernel_table
import peers
import pytest
import pytorch_kernels
import render_readme
import results
import sweep
import timing
import torch
import torch.nn.functional as F
import tune
from measured import HEAD, MEASURED, SMALL, a_row
from shapes import Case

from gn_override import _bench, _picture

pytestmark = pytest.mark.any_torch


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
        (["--from", __file__], "test_tools_kernels.py is no results file"),
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
