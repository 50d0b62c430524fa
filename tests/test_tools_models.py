"""The tools that time models, calls and training, as far as they go without a GPU."""

from __future__ import annotations

import json
import math

import bench_ddp
import bench_host
import bench_models
import neighbours
import pytest
import render_readme
import results
import torch
import torch.nn.functional as F
from processes import run_python
from torch import nn

pytestmark = pytest.mark.any_torch

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
