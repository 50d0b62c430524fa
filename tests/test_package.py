"""The package as a user meets it: import, switch, explain(), report(), command line, demo."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from processes import run_python
from shapes import CPU_CASES, KERNEL_CASES
from torch import nn
from torch._decomp import meta_table

import gn_override
from gn_override import __main__, _demo, _explain, _inductor, _library, _meta, _report
from gn_override.__main__ import _parser, main


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype=dtype, memory_format=torch.channels_last)


def taken() -> int:
    return sum(gn_override.report().calls.values())


# Import.


@pytest.mark.parametrize(
    ("value", "on"), [(None, True), ("1", True), ("", True), ("0", False)], ids=str
)
def test_import_prints_nothing_and_obeys_the_environment(value, on, tmp_path):
    code = "import torch, gn_override; import sys; sys.exit(int(gn_override.is_enabled()))"
    environ = {} if value is None else {"GN_OVERRIDE": value}
    result = run_python("-c", code, cwd=tmp_path, status=int(on), **environ)
    without = run_python("-c", "import torch", cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("", without.stderr)


def test_import_leaves_explain_report_and_demo_for_later(tmp_path):
    code = (
        "import sys, gn_override\n"
        "lazy = {'gn_override._explain', 'gn_override._report', 'gn_override._demo'}\n"
        "assert not lazy & set(sys.modules), lazy & set(sys.modules)\n"
        "gn_override.report\n"
        "assert 'gn_override._report' in sys.modules\n"
    )
    run_python("-c", code, cwd=tmp_path)


def test_dir_has_what_is_imported_later(tmp_path):
    code = "import gn_override; assert {*gn_override.__all__} < {*dir(gn_override)}"
    run_python("-c", code, cwd=tmp_path)


def test_a_reload_is_another_import(tmp_path):
    code = (
        "import importlib, gn_override\n"
        "gn_override.disable()\n"
        "importlib.reload(gn_override)\n"
        "assert gn_override.is_enabled()\n"
    )
    run_python("-c", code, cwd=tmp_path)


def test_a_reload_that_does_not_switch_on_changes_nothing(tmp_path):
    code = (
        "import importlib, os, gn_override\n"
        "os.environ['GN_OVERRIDE'] = '0'\n"
        "importlib.reload(gn_override)\n"
        "assert gn_override.is_enabled()\n"
    )
    run_python("-c", code, cwd=tmp_path)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_import_in_compiled_code(backend, tmp_path):
    code = (
        "import sys, torch\n"
        f"@torch.compile(backend={backend!r})\n"
        "def function(x):\n"
        "    import gn_override\n"
        "    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4))\n"
        "x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)\n"
        "assert 'gn_override' not in sys.modules\n"
        "y = function(x)\n"
        "import gn_override\n"
        "assert gn_override.is_enabled()\n"
        "torch.testing.assert_close(y, function.__wrapped__(x))\n"
        "gn_override.disable()\n"
        "torch.testing.assert_close(function(x), y)\n"
    )
    run_python("-c", code, cwd=tmp_path)


@pytest.mark.parametrize("first", ["", "import torch._inductor.lowering\n"])
def test_another_import_after_the_modules_are_gone(first, tmp_path):
    """It puts the same modules back, whose functions PyTorch has: nothing is registered twice."""
    code = (
        f"import sys, torch\n{first}"
        "import gn_override, gn_override.nn\n"
        "def purge():\n"
        "    for name in [n for n in sys.modules if n.split('.')[0] == 'gn_override']:\n"
        "        del sys.modules[name]\n"
        "module = gn_override.nn.GroupNorm(4, 8, activation='silu')\n"
        "purge()\n"
        "import gn_override as again\n"
        "assert again.is_enabled() and type(module) is again.nn.GroupNorm\n"
        "import torch._inductor.lowering\n"
        "from torch._inductor import config, decomposition\n"
        "op = torch.ops.aten.native_group_norm.default\n"
        "again.disable()\n"
        "assert not gn_override.is_enabled()\n"
        "stock = decomposition.decompositions[op]\n"
        "assert stock is torch._decomp.get_decompositions([op])[op]\n"
        "assert config.pre_grad_custom_pass is None\n"
        "assert torch.compiler.config.cache_key_tag == ''\n"
        "purge()\n"
        "import gn_override._fuse\n"
        "assert gn_override.is_enabled()\n"
        "assert decomposition.decompositions[op].inductors is stock\n"
        "assert config.pre_grad_custom_pass.before is None\n"
        "f = lambda x: torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4))\n"
        "x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)\n"
        "torch.testing.assert_close(torch.compile(f)(x), f(x))\n"
        "calls = gn_override.report().calls\n"
        "assert calls['group_norm_act cpu channels_last'] == 1, calls\n"
        "gn_override.disable()\n"
        "assert decomposition.decompositions[op] is stock\n"
        "assert config.pre_grad_custom_pass is None\n"
    )
    assert run_python("-c", code, cwd=tmp_path).stderr == ""


@pytest.mark.parametrize("inductor", ["", "import torch._inductor.lowering\n"])
@pytest.mark.parametrize("kind", ["dispatch", "function"])
def test_modes_do_not_see_what_the_package_asks_itself(kind, inductor, tmp_path):
    code = (
        f"import torch\n{inductor}"
        "from torch.overrides import TorchFunctionMode\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        f"class Mode(Torch{kind.title()}Mode):\n"
        f"    def __torch_{kind}__(self, function, types, args=(), kwargs=None):\n"
        "        assert 'gn_override' not in str(function), function\n"
        "        return function(*args, **(kwargs or {}))\n"
        "with Mode():\n"
        "    import gn_override\n"
        "    gn_override.set_inductor(False)\n"
        "    gn_override.set_inductor(True)\n"
        "    gn_override.set_autocast('preserve')\n"
        "    with gn_override.disabled():\n"
        "        assert not gn_override.is_enabled()\n"
        "    import torch._inductor.lowering\n"
        "assert gn_override.is_enabled()\n"
    )
    run_python("-c", code, cwd=tmp_path)


def test_every_public_name_is_there_and_no_other():
    for name in gn_override.__all__:
        assert getattr(gn_override, name) is not None
    assert {n for n in dir(gn_override) if n[0] != "_"} == {*gn_override.__all__} - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gn_override.nonsense  # noqa: B018


def test_version_is_that_of_the_build():
    assert gn_override.__version__ == _library.build_info()["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gn_override.__version__)


# Switch.


def test_disable_and_enable():
    gn_override.disable()
    assert not gn_override.is_enabled()
    gn_override.disable()
    assert not gn_override.is_enabled()
    gn_override.enable()
    assert gn_override.is_enabled()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_contexts_restore_what_was_before(before, inside):
    context = gn_override.enabled if inside else gn_override.disabled
    (gn_override.enable if before else gn_override.disable)()
    with context():
        assert gn_override.is_enabled() is inside
        with gn_override.enabled():
            assert gn_override.is_enabled()
        assert gn_override.is_enabled() is inside
    assert gn_override.is_enabled() is before

    with pytest.raises(KeyError), context():
        raise KeyError
    assert gn_override.is_enabled() is before


def test_contexts_decorate_functions_that_call_themselves():
    @gn_override.disabled()
    def states(depth: int) -> list[bool]:
        here = [gn_override.is_enabled()]
        return here + (states(depth - 1) if depth else [])

    assert states(2) == [False, False, False]
    assert states(0) == [False]
    assert gn_override.is_enabled()


def test_a_change_that_fails_changes_nothing(monkeypatch):
    def follow() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_meta, "follow", follow)
    with pytest.raises(KeyboardInterrupt), gn_override.disabled():
        pass
    assert gn_override.is_enabled() and torch.ops.gn_override.is_enabled()


def test_switch_decides_who_runs_the_call():
    x = channels_last(2, 64, 8, 8)
    before = taken()
    F.group_norm(x, 32)
    assert taken() == before + 1
    with gn_override.disabled():
        F.group_norm(x, 32)
    assert taken() == before + 1


def test_switch_may_be_flipped_by_many_threads(request):
    """Inductor follows it all the same, and what a program has set there stays."""
    config = torch.compiler.config
    before = config.cache_key_tag
    request.addfinalizer(lambda: setattr(config, "cache_key_tag", before))
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def flip() -> None:
        for _ in range(200):
            gn_override.disable()
            gn_override.enable()

    threads = [threading.Thread(target=flip) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert config.cache_key_tag == before
    gn_override.disable()
    assert before.startswith(config.cache_key_tag) and "gn_override" not in config.cache_key_tag


def test_fork_while_another_thread_turns_the_switch():
    """The child ends that turn, and has a switch of its own."""
    forked = threading.Event()
    halfway = threading.Event()

    def setter(on: bool) -> bool:
        before = gn_override._set_on(on)
        if threading.current_thread() is thread:
            halfway.set()
            assert forked.wait(60)
        return before

    thread = threading.Thread(target=_inductor.turn, args=(setter, False))
    thread.start()
    assert halfway.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it
        op = torch.ops.aten.native_group_norm.default
        followed = not gn_override.is_enabled() and op not in meta_table
        gn_override.enable()
        os._exit(0 if followed and gn_override.is_enabled() and op in meta_table else 1)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert not gn_override.is_enabled()


def test_set_inductor_takes_a_bool():
    for wrong in ("False", 0, None):
        with pytest.raises(TypeError, match=f"True or False, not {wrong!r}"):
            gn_override.set_inductor(wrong)
    assert gn_override.report().inductor is True


class AsksForTheSwitch(nn.Module):
    def forward(self, x):
        y = F.group_norm(x, 4)
        return y + 1 if gn_override.is_enabled() else y


def test_the_switch_in_what_is_traced():
    """A question for it is no operator: what torch.export makes runs without this package."""
    module, x = AsksForTheSwitch(), torch.randn(2, 8, 6, 5)
    expected = module(x)
    assert torch.equal(torch.jit.trace(module, (x,))(x), expected)
    for strict in (False, True):
        program = torch.export.export(module, (x,), strict=strict)
        assert "gn_override" not in str(program.graph)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)
    with gn_override.disabled():
        assert torch.equal(compiled(x), module(x))


# explain().


def test_explain_tensor_that_is_served():
    x = channels_last(2, 64, 16, 16)
    explanation = gn_override.explain(x, 32)
    assert explanation.served and explanation.rule != "aten"
    assert explanation.declined_by_binding is None
    assert explanation.tensor_bytes == x.numel() * 4
    assert explanation.minimum_bytes == 2 * explanation.tensor_bytes
    assert explanation.moved_bytes is not None
    assert explanation.minimum_bytes <= explanation.moved_bytes <= 2 * explanation.minimum_bytes
    assert not explanation.copied
    text = str(explanation)
    assert "N=2 C=64 HxW=256 G=32 float32 channels-last" in text
    assert f"{explanation.rule} (gn_override)" in text
    assert "the bytes of a copy" in text
    assert 5 <= len(text.splitlines()) <= 8


def test_explain_agrees_with_what_runs():
    x = channels_last(2, 64, 16, 16)
    torch.ops.gn_override.reset_counters()
    F.group_norm(x, 32)
    rule = gn_override.explain(x, 32).rule
    assert dict(gn_override.report().calls) == {f"native_group_norm cpu {rule}": 1}

    torch.ops.gn_override.reset_counters()
    F.group_norm(x.contiguous(), 32)
    why = gn_override.explain(x.contiguous(), 32).declined_by_binding
    assert dict(gn_override.report().declined) == {f"native_group_norm cpu aten: {why}": 1}


def test_explain_backward_moves_more():
    x = channels_last(2, 64, 16, 16)
    explanation = gn_override.explain(x, 32, backward=True)
    assert "backward" in explanation.problem
    assert explanation.minimum_bytes == 3 * explanation.tensor_bytes
    assert explanation.moved_bytes == 5 * explanation.tensor_bytes


def test_explain_module():
    module = nn.GroupNorm(8, 64)
    x = channels_last(2, 64, 4, 4)
    explanation = gn_override.explain(module, input=x)
    assert explanation == gn_override.explain(x, 8, weight=module.weight, bias=module.bias)
    assert "G=8" in explanation.problem


@pytest.mark.parametrize(
    ("x", "groups", "why"),
    [
        (torch.zeros(2, 64, 4, 4), 32, "NCHW"),
        (torch.zeros(2, 64), 32, "NCHW"),
        (channels_last(2, 64, 4, 4), 7, "divisible"),
        (channels_last(2, 64, 4, 4).int(), 32, "dtype"),
        (channels_last(2, 64, 4, 4).transpose(0, 1), 1, "not channels-last"),
    ],
    ids=["nchw", "2d", "groups", "int", "permuted"],
)
def test_explain_declined(x, groups, why):
    explanation = gn_override.explain(x, groups)
    assert not explanation.served and explanation.rule == "aten"
    assert why in explanation.reason == explanation.declined_by_binding
    assert explanation.moved_bytes is None
    assert "PyTorch's own (aten)" in str(explanation) and why in str(explanation)
    assert "x".join(map(str, x.shape)) in explanation.problem


def test_explain_of_a_backward():
    x = torch.zeros(2, 64, 4, 4)
    assert gn_override.explain(x, 32).problem.startswith("cpu forward ")
    explanation = gn_override.explain(x, 32, backward=True)
    assert explanation.problem.startswith("cpu backward ")
    assert explanation.minimum_bytes == 3 * 4 * x.numel()
    assert not gn_override.explain(x[:, :8], 4).copied


@pytest.mark.parametrize("backward", [False, True])
def test_explain_counts_the_copy_of_a_slice(backward):
    x = channels_last(2, 64, 16, 16)
    dense = gn_override.explain(x[:, :, :8].clone(), 32, backward=backward)
    explanation = gn_override.explain(x[:, :, :8], 32, backward=backward)
    assert explanation.served and explanation.copied and not dense.copied
    assert explanation.moved_bytes == dense.moved_bytes + 2 * explanation.tensor_bytes
    assert "copy of the input" in str(explanation)


def test_explain_sees_what_autocast_makes():
    """On a CPU, nothing; test_autocast.py has what it asks of a GPU."""
    module, x = nn.GroupNorm(8, 64), channels_last(2, 64, 4, 4, dtype=torch.bfloat16)
    plain = gn_override.explain(module.bfloat16(), input=x)
    with torch.autocast("cpu", torch.bfloat16):
        assert gn_override.explain(module, input=x) == plain


def test_explain_says_that_the_override_is_off():
    x = channels_last(2, 64, 4, 4)
    with gn_override.disabled():
        explanation = gn_override.explain(x, 32)
    assert explanation.served and not explanation.enabled
    assert "override is off" in str(explanation)
    assert "override is off" not in str(gn_override.explain(x, 32))


def test_explain_empty_input():
    assert "empty" in str(gn_override.explain(channels_last(0, 64, 4, 4), 32))


def test_explain_runs_nothing():
    x = channels_last(2, 64, 4, 4)
    torch.ops.gn_override.reset_counters()
    gn_override.explain(x, 32)
    assert not gn_override.report().calls and not gn_override.report().declined


def test_explain_measures_a_copy_when_asked():
    x = channels_last(2, 64, 4, 4)
    assert gn_override.explain(x, 32).copy_speed is None
    explanation = gn_override.explain(x, 32, measure_copy=True)
    assert explanation.copy_speed is not None and explanation.copy_speed > 1e8
    assert re.search(r"\([\d.]+ [mun]s at [\d.]+ [MGT]B/s\)", str(explanation))


def test_explain_of_tensors_in_one_layout():
    """Of one pixel or one channel: ours where PyTorch's own refuse float32 weights."""
    for shape, groups in (((1, 16, 1, 1), 4), ((2, 1, 4, 4), 1)):
        for device, param_dtype, served in (
            ("cuda", torch.float32, True),
            ("cuda", torch.float16, False),
            ("cpu", torch.float32, False),
        ):
            explanation = _explain.explain_shape(
                list(shape), groups, dtype=torch.float16, param_dtype=param_dtype, device=device
            )
            assert explanation.served == served, (device, param_dtype)
    explanation = _explain.explain_shape(
        [1, 16, 1, 1, 1, 1], 4, dtype=torch.float16, param_dtype=torch.float32, device="cuda"
    )
    assert not explanation.served


@pytest.mark.parametrize(
    ("count", "speed", "text"),
    [
        (16, 32e6, "at least 16 B, 1x the bytes of a copy (500 ns at 32 MB/s)"),
        (999_700, 1e9, "at least 1 MB, 1x the bytes of a copy (1 ms at 1 GB/s)"),
        (2 * 10**12, 4.26e12, "at least 2 TB, 1x the bytes of a copy (469 ms at 4.3 TB/s)"),
        (4 * 10**12, 3.996e12, "at least 4 TB, 1x the bytes of a copy (1 s at 4 TB/s)"),
    ],
)
def test_explain_writes_three_digits(count, speed, text):
    explanation = dataclasses.replace(
        gn_override.explain(channels_last(2, 64, 4, 4), 32),
        tensor_bytes=count // 2,
        minimum_bytes=count,
        moved_bytes=None,
        copy_speed=speed,
    )
    assert f"traffic   {text}\n" in f"{explanation}\n"


@pytest.mark.parametrize(
    "call",
    [
        lambda x, m: gn_override.explain(x),
        lambda x, m: gn_override.explain(x, 32, input=x),
        lambda x, m: gn_override.explain(m),
        lambda x, m: gn_override.explain(m, input=[1, 2]),
        lambda x, m: gn_override.explain(m, 32, input=x),
        lambda x, m: gn_override.explain(m, input=x, weight=m.weight),
        lambda x, m: gn_override.explain([1, 2], 32),
    ],
)
def test_explain_refuses_other_forms(call):
    with pytest.raises(TypeError, match="explain"):
        call(channels_last(2, 64, 4, 4), nn.GroupNorm(32, 64))


def test_explain_refuses_other_devices():
    with pytest.raises(ValueError, match="meta"):
        gn_override.explain(torch.empty(2, 64, 4, 4, device="meta"), 32)


def test_explain_shape_agrees_with_explain_of_a_tensor():
    x = channels_last(2, 64, 16, 16)
    assert _explain.explain_shape(x.shape, 32) == gn_override.explain(x, 32)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_explain_knows_the_traffic_of_every_rule(device_type, backward):
    for case in (*KERNEL_CASES, *CPU_CASES):
        explanation = _explain.explain_shape(
            case.shape,
            case.groups,
            device=device_type,
            dtype=getattr(torch, case.dtype),
            backward=backward,
        )
        assert explanation.served
        assert explanation.moved_bytes is not None, explanation.rule
        assert explanation.moved_bytes >= explanation.minimum_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="rules are those of an H200")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("rule", "shape", "groups", "again"),
    [
        ("registers", (2, 2560, 8, 8), 32, 0),
        ("resident", (2, 320, 64, 64), 32, 0),
        ("cooperative", (2, 320, 128, 128), 32, 1),
        ("two_pass", (1, 33, 1023, 1021), 1, 1),
    ],
)
def test_explain_counts_what_a_rule_reads_again(rule, shape, groups, again, backward):
    """X, and backward dY too: never, at most once, or once."""
    explanation = _explain.explain_shape(
        shape, groups, device="cuda", dtype=torch.bfloat16, backward=backward
    )
    assert explanation.rule == rule
    read = (2 if backward else 1) * explanation.tensor_bytes
    assert explanation.moved_bytes == explanation.minimum_bytes + again * read
    assert explanation.moved_at_most is (rule == "cooperative")
    said = re.search(r"workspace_bytes=(\d+)", explanation.plan)
    assert explanation.workspace_bytes == (int(said[1]) if said else 0)
    assert bool(said) is bool(again)


@pytest.mark.parametrize("backward", [False, True])
def test_explain_shape_for_cuda(backward):
    explanation = _explain.explain_shape(
        (2, 320, 64, 64), 32, device="cuda", dtype=torch.bfloat16, backward=backward
    )
    assert explanation.served
    assert explanation.problem.startswith("cuda")
    if not torch.cuda.is_available():
        assert "H200 (no GPU here)" in explanation.device
        assert explanation.copy_speed is not None


@pytest.mark.parametrize("shape", [(2, 320, 64, 64), (2, 1, 64, 64)])
def test_explain_shape_on_a_gpu_that_the_build_is_not_for(shape, monkeypatch, capsys):
    """What runs there, and not what would run on the planner's own GPU."""
    info = _library.build_info() | {"backends": ["cpu"]}
    monkeypatch.setattr(_library, "build_info", lambda: info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU-X")
    monkeypatch.setattr(_explain, "_copy_speed", lambda device: 1e12)
    explanation = _explain.explain_shape(shape, 1, device="cuda", dtype=torch.bfloat16)
    assert not explanation.served and explanation.rule == "aten" and explanation.device == "GPU-X"
    assert not (explanation.plan or explanation.declined or explanation.workspace_bytes)
    assert explanation.reason == "gn_override was built without its CUDA backend"
    assert main(["explain", "x".join(map(str, shape)), "--groups", "1"]) == 0
    assert "PyTorch's own (aten)\nwhy       gn_override was built" in capsys.readouterr().out
    assert _explain.explain_shape((2, 64, 8, 8), 32).served, "on the CPU"


@pytest.mark.parametrize(
    ("shape", "groups", "options", "why"),
    [
        ((64,), 32, {}, "shape"),
        ((2, 0, 4), 32, {}, "shape"),
        ((2, 64, 4), 7, {}, "divide"),
        ((2, 64, 4), 0, {}, "divide"),
        ((2, 64, 4), 32, {"dtype": torch.int32}, "dtype"),
        ((2, 64, 4), 32, {"param_dtype": torch.float64}, "float32"),
        ((2, 64, 4), 32, {"device": "tpu"}, "device"),
        ((2_000_000_000, 2_000_000_000, 400_000_000, 4), 4, {}, "too large"),
        ((2, 10**23, 4, 4), 4, {}, "too large"),
        ((2**52, 2, 2**4), 2, {}, "too large"),
    ],
)
def test_explain_shape_refuses(shape, groups, options, why):
    with pytest.raises(ValueError, match=why):
        _explain.explain_shape(shape, groups, **options)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(2**51, 2, 2**4), (2, 2**51, 2**4), (2, 2, 2**54)])
def test_explain_shape_of_the_largest_inputs(shape, device, backward):
    explanation = _explain.explain_shape(
        shape, 2, device=device, dtype=torch.float32, backward=backward, activation="silu"
    )
    assert explanation.minimum_bytes == (3 if backward else 2) * 2**58
    assert 0 <= explanation.workspace_bytes < 2**63


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("last", [True, False])
def test_explain_shape_knows_the_layouts_that_are_served(dimensions, last):
    shape = (2, 8, 3, 3, 3, 3, 3)[:dimensions]
    x = torch.randn(shape)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    found = _explain.explain_shape(shape, 4, channels_last=last)
    asked = gn_override.explain(x, 4)
    before = taken()
    F.group_norm(x, 4)
    assert found.served == asked.served == (taken() > before) == (last and 3 <= dimensions <= 5)
    assert found.served or not (found.workspace_bytes or found.moved_bytes or found.plan)
    if last and dimensions > 5:
        assert "3 to 5 dimensions" in str(found)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 64, 1, 1), 32), ((2, 1, 4, 4), 1), ((2, 64, 1, 1, 1, 1), 32), ((2, 1, 3, 3, 3, 3), 1)],
)
def test_explain_shape_of_one_pixel_or_channel_counts_as_nchw(shape, groups):
    explanation = _explain.explain_shape(shape, groups)
    assert not explanation.served and explanation.problem.endswith(" NCHW")
    assert explanation.declined and explanation.declined[0].failed
    assert f"not {explanation.declined[0].rule}: needs " in str(explanation)


@pytest.mark.cuda
def test_explain_on_a_gpu():
    x = channels_last(2, 320, 64, 64, dtype=torch.bfloat16).cuda()
    explanation = gn_override.explain(x, 32, measure_copy=True)
    assert explanation.served
    assert explanation.device == torch.cuda.get_device_name()
    assert explanation.copy_speed is not None and explanation.copy_speed > 1e10


# report().


def owner(report: gn_override.Report, op: str, key: str) -> _report.Owner:
    (found,) = [o for o in report.owners if (o.op, o.key) == (op, key)]
    return found


def test_report_fields():
    report = gn_override.report()
    info = _library.build_info()
    assert report.version == gn_override.__version__
    assert report.enabled
    assert report.torch_running == torch.__version__
    assert report.torch_built == info["torch"]
    assert report.backends == tuple(info["backends"])
    assert report.cpu_instruction_set in ("avx512", "avx2", "baseline")
    assert report.cuda_architectures == tuple(info["cuda_archs"])
    with gn_override.disabled():
        assert not gn_override.report().enabled


def test_report_names_owners():
    report = gn_override.report()
    for op in ("native_group_norm", "native_group_norm_backward"):
        found = owner(report, op, "CPU")
        assert found.package == "gn_override"
        assert re.search(r"native/binding/generated/register\.cpp:\d+$", found.where)
        assert len(found.below) == 1 and "RegisterCPU" in found.below[0]
        if "cuda" in report.backends:
            assert owner(report, op, "CUDA").package == "gn_override"
        assert owner(report, op, "AutogradCPU").package == "torch"
    composite = owner(report, "group_norm", "CompositeImplicitAutograd")
    ours = _library.build_info()["conditions"]["STOCK_DROPS_LAYOUT"]
    assert composite.package == ("gn_override" if ours else "torch")
    pools = [o.package for o in report.owners if o.op == "avg_pool2d_backward"]
    assert pools == (["gn_override"] if ours and "cuda" in report.backends else [])


def test_report_shows_a_package_on_top(tmp_path):
    """As FlagGems would: a Python package that registers the same operator later."""
    package = tmp_path / "site-packages" / "elsewhere"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import torch\n"
        "lib = torch.library.Library('aten', 'IMPL')\n"
        "lib.impl('native_group_norm', lambda *a: None, 'CPU')\n"
    )
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "import gn_override, elsewhere\n"
        "report = gn_override.report()\n"
        "found = [o for o in report.owners if (o.op, o.key) == ('native_group_norm', 'CPU')][0]\n"
        "assert found.package == 'elsewhere', found\n"
        "assert any('native/binding' in where for where in found.below), found\n"
        "assert 'takes the calls: elsewhere' in str(report)\n"
    )
    run_python("-c", code, cwd=tmp_path)


def test_report_counts_calls():
    torch.ops.gn_override.reset_counters()
    empty = str(gn_override.report())
    assert empty.count("\n  none") == 2
    x = channels_last(2, 64, 8, 8).requires_grad_()
    for _ in range(2):
        F.group_norm(x, 32).sum().backward()
    F.group_norm(x.detach().contiguous(), 32)
    report = gn_override.report()
    assert sorted(report.calls.values()) == [2, 2]
    assert {name.split()[0] for name in report.calls} == {
        "native_group_norm",
        "native_group_norm_backward",
    }
    assert list(report.declined.values()) == [1]
    for name in (*report.calls, *report.declined):
        assert name in str(report)
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report
    assert dataclasses.asdict(report)["calls"] == report.calls


def test_report_and_explain_in_a_trace():
    """They run, and are no part of it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        assert gn_override.report().enabled
        assert gn_override.explain(x, 32).served
        return x + 1

    traced = torch.jit.trace(function, channels_last(2, 64, 8, 8))
    assert [node.kind() for node in traced.graph.nodes()][-1] == "aten::add"
    assert "gn_override" not in str(traced.graph)


# Types.


def test_the_public_api_is_whole_in_the_program_that_is_type_checked(capsys):
    import public_api

    text = Path(public_api.__file__).read_text()
    for name in gn_override.__all__:
        assert f"gn_override.{name}" in text, name
    public_api.main()
    assert capsys.readouterr().out.startswith(gn_override.__version__)


# Command line.


def test_output_that_nobody_reads_any_more(tmp_path):
    """`... | head -1` in a container, where Python does not buffer: no traceback."""
    command = [sys.executable, "-u", "-m", "gn_override", "report"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_output_that_is_closed(closed, tmp_path):
    command = f'"{sys.executable}" -m gn_override explain 2x64x8x8 --groups 8 --device cpu {closed}'
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupted(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "main", interrupted)
    assert __main__.run() == 130


def test_report_says_whether_it_is_on():
    on = str(gn_override.report())
    assert on.startswith(f"gn_override {gn_override.__version__}: on\n")
    assert "leaves calls to these kernels" in on
    with gn_override.disabled():
        off = str(gn_override.report())
    assert off.startswith(f"gn_override {gn_override.__version__}: off\n")
    assert "compiles group norms itself" in off


def test_report_lists_calls_apart():
    x = channels_last(2, 64, 8, 8)
    for tensor in (x, x.contiguous()):
        F.group_norm(tensor, 32)
    report = gn_override.report()
    (taken,), (declined,), text = report.calls, report.declined, str(report)
    order = ["calls taken:", taken, "calls declined:", declined]
    assert sorted(order, key=text.index) == order


def test_packages_of_registrations(monkeypatch):
    folder = Path(_report.__file__).parent
    assert _report.package_of(f"{folder}/_meta.py:3") == "gn_override"
    assert _report.package_of(f"{folder}_extras/ops.py:3") != "gn_override"
    assert _report.package_of("/elsewhere/kernels.py:12") == "kernels.py:12"
    module = ModuleType("strange.kernels")
    module.__file__ = "/elsewhere/kernels.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert _report.package_of("/elsewhere/kernels.py:12") == "strange"


def test_command_line_report(capsys):
    assert main(["report"]) == 0
    report = capsys.readouterr().out
    assert report.startswith(f"gn_override {gn_override.__version__}: on")
    assert torch.__version__ in report and "register.cpp" in report
    assert main([]) == 0
    assert capsys.readouterr().out == report


def test_command_line_explain(capsys):
    arguments = ["explain", "2x320x64x64", "--groups", "32", "--dtype", "bf16", "--device", "cuda"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "N=2 C=320 HxW=4096 G=32 bfloat16 channels-last" in out
    assert [line.split()[0] for line in out.splitlines()[:6]] == [
        "call",
        "device",
        "kernel",
        "plan",
        "why",
        "traffic",
    ]

    assert main([*arguments, "--backward", "--param-dtype", "fp32"]) == 0
    assert "backward" in (out := capsys.readouterr().out) and "float32 parameters" in out

    assert main([*arguments, "--activation", "silu"]) == 0
    assert "bfloat16 silu channels-last" in capsys.readouterr().out

    assert main(["explain", "2,64,8,8", "--groups", "8", "--layout", "contiguous"]) == 0
    assert "PyTorch's own (aten)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["explain", "2x64x8x8"], "--groups"),
        (["explain", "2xx8", "--groups", "8"], "2x320x64x64"),
        (["explain", "2x64x8x8", "--groups", "7"], "divide"),
        (["explain", "2x100000000000000000000x4x4", "--groups", "4"], "too large"),
        (["explain", "2x64x8x8", "--groups", "8", "--dtype", "int8"], "bf16"),
        (["explain", "2x64x8x8", "--groups", "8", "--param-dtype", ""], "bf16"),
        (["bench", "--plot", ""], "--plot"),
        (["doctor", "--import", ""], "--import"),
        (["nonsense"], "nonsense"),
    ],
)
def test_command_line_refuses(arguments, why, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert why in captured.err and not captured.out


def test_command_line_prints_json(capsys):
    for arguments in (["report", "--json"], ["--json"], ["--json", "report"]):
        assert main(arguments) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["version"] == gn_override.__version__ and report["calls"] == {}
        assert {"op", "key", "package", "where", "below"} == set(report["owners"][0])
    assert main(["explain", "2x64x8x8", "--groups", "8", "--json", "--device", "cpu"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rule"] == "channels_last" and answer["served"] and answer["copy_speed"] > 1e8


def test_help_has_examples_that_parse(capsys):
    """Of every command; they are parsed, not run."""
    for command in ([], ["report"], ["demo"], ["bench"], ["explain"], ["doctor"]):
        with pytest.raises(SystemExit) as exit:
            main([*command, "--help"])
        assert exit.value.code == 0
        text = capsys.readouterr().out
        examples = re.findall(r"^  python -m gn_override(.*?)(?:  +.*)?$", text, re.MULTILINE)
        assert len(examples) >= 2, command
        for example in examples:
            options = _parser().parse_args(example.split())
            assert not command or options.command == command[0]
    assert "exit status: 0 all is well" in _parser().format_help()


def test_command_line_as_a_program(tmp_path):
    assert run_python("-m", "gn_override", cwd=tmp_path).stdout.startswith("gn_override ")


# Demo.


def test_demo_passes_and_leaves_the_switch_alone(capsys):
    assert main(["demo", "--quick", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    rows = [line for line in captured.out.splitlines() if re.search(r"\d x?\b.*  ok$", line)]
    assert len(rows) == len(_demo._cases("cpu", True))
    assert all(re.search(r"\d\.\d\dx", row) for row in rows)
    assert "Parity:" in captured.out
    assert "checking every layer" in captured.err and "\r" not in captured.err
    assert gn_override.is_enabled()


@pytest.fixture
def quickest(monkeypatch):
    """One network is enough where the outcome is known."""
    cases = _demo._cases("cpu", True)[-1:]
    monkeypatch.setattr(_demo, "_cases", lambda device, quick: cases)


@pytest.mark.parametrize("fault", ["output", "weight gradient", "nan"])
def test_demo_fails_if_results_are_wrong(fault, quickest, monkeypatch, capsys):
    stock = F.group_norm

    def wrong(x, groups, weight=None, bias=None, eps=1e-5):
        if not gn_override.is_enabled():
            return stock(x, groups, weight, bias, eps)
        if fault == "weight gradient":  # of one group, off by a quarter
            scale = torch.ones_like(weight)
            scale[: len(scale) // groups] = 1.25
            weight = weight.detach() + (weight - weight.detach()) * scale
        y = stock(x, groups, weight, bias, eps)
        return y * {"output": 1.05, "nan": float("nan")}.get(fault, 1.0)

    monkeypatch.setattr(F, "group_norm", wrong)
    assert main(["demo", "--quick", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out and "PARITY FAILED" in captured.err


ROW = _demo.Row("net", 2.0, 1.0, 3, 1e-7, 1e-7, 3e-7, 1e-6, 1e-6, 3)


def test_demo_parity_is_of_the_layers_and_of_the_network():
    """Each within its own bound, and not with a NaN."""
    assert ROW.parity
    for error in (1.01 * ROW.bound, float("nan")):
        assert not dataclasses.replace(ROW, error_on=error).parity
    for error in (1.01 * ROW.layer_bound, float("nan")):
        assert not dataclasses.replace(ROW, layer_error_on=error).parity


def test_demo_prints_json(quickest, monkeypatch, capsys):
    monkeypatch.setattr(_demo, "_run", lambda *arguments: ROW)
    assert main(["demo", "--device", "cpu", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["parity"] is True and found["time_on"] == 1.0 and found["calls"] == 3


def test_demo_fails_if_the_override_never_ran(quickest, monkeypatch, capsys):
    monkeypatch.setattr(gn_override, "enabled", gn_override.disabled)
    assert main(["demo", "--quick", "--device", "cpu"]) == 1
    assert "NOT TAKEN" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_demo_says_that_there_is_no_gpu(capsys):
    assert main(["demo", "--device", "cuda"]) == 1
    assert "no GPU here" in capsys.readouterr().err


def test_demo_says_that_the_build_has_no_kernels_for_the_gpu(quickest, monkeypatch, capsys):
    report = dataclasses.replace(gn_override.report(), backends=("cpu",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gn_override, "report", lambda: report)
    assert main(["demo", "--device", "cuda"]) == 1
    assert "that this build has kernels for" in capsys.readouterr().err


@pytest.mark.cuda
def test_demo_on_a_gpu(capsys):
    assert main(["demo", "--quick", "--device", "cuda"]) == 0
    assert capsys.readouterr().out.count("  ok\n") == len(_demo._cases("cuda", True))


# Programs that hold group norms are as before.


def test_modules_pickle_without_the_package(tmp_path):
    path = tmp_path / "module"
    path.write_bytes(pickle.dumps(nn.Sequential(nn.GroupNorm(8, 64))))
    code = f"import pickle, sys; pickle.load(open({str(path)!r}, 'rb'))"
    run_python("-c", code + "; assert 'gn_override' not in sys.modules", cwd=tmp_path)
