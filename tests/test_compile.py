"""torch.compile with Inductor: who runs group normalisation in compiled code, in which layout.

Dynamo and AOTAutograd by themselves are in test_dispatch.py, and so are the fake tensors, which
what is compiled here rests on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from processes import run_python
from reference import ATEN, FUSED, TORCH, calls, expect_calls, is_channels_last, lay_out
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._higher_order_ops.scan import scan
from torch._inductor import config as inductor_config
from torch._inductor import decomposition
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.traceback import annotate
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gn_override
from gn_override import _library, _meta

aten = torch.ops.aten
OPS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
BACKENDS = _library.build_info()["backends"]
STOCK_DROPS_LAYOUT = _library.build_info()["conditions"]["STOCK_DROPS_LAYOUT"]
GROUPS = 3


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No code that another run has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _own_graphs() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """A norm between convolutions, as networks have it; Tanh is no activation of ours."""

    def __init__(self, activation: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.before = nn.Conv2d(4, 6, 3, bias=False)
        self.norm = nn.GroupNorm(GROUPS, 6)
        self.activation = activation()
        self.after = nn.Conv2d(6, 4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.activation(self.norm(self.before(x))))


def norm_silu(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.silu(F.group_norm(X, GROUPS, gamma, beta))


def norm(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Nothing to generate code for: quick to compile."""
    return F.group_norm(X, GROUPS, gamma, beta)


def operands(
    shape: tuple[int, ...], device: str, layout: str = "channels_last"
) -> tuple[Tensor, Tensor, Tensor]:
    X = lay_out(torch.randn(shape, device=device), layout)
    gamma, beta = torch.randn(2, shape[1], device=device).unbind()
    return X.requires_grad_(), gamma.clone().requires_grad_(), beta.clone().requires_grad_()


def train(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The output and all gradients, those of a module's parameters too."""
    Y = function(*tensors)
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    return Y.detach(), *torch.autograd.grad(Y.cos().sum(), [*tensors, *weights])


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **options)


def run_without_gn_override(code: str, folder: Path) -> None:
    """Run code in a fresh interpreter, which must succeed and never load the package."""
    run_python("-c", code + "\nassert 'gn_override' not in sys.modules", cwd=folder)


# --- our kernels run, on what the neighbours hold ---------------------------------------------


@pytest.mark.parametrize(
    "activation, ops, namespace", [(nn.Tanh, ATEN, "aten"), (nn.SiLU, FUSED, "gn_override")]
)
def test_training(
    device: str, activation: type[nn.Module], ops: tuple[str, str], namespace: str
) -> None:
    """One call each, of the convolution's own output, and back into it."""
    module = Block(activation).to(device, memory_format=torch.channels_last)
    x = lay_out(torch.randn(2, 4, 9, 7, device=device), "channels_last").requires_grad_()
    expected = train(module, x)
    with expect_calls(device, True, True, ops):
        actual, (forward, backward) = run_and_get_code(train, compiled(module), x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert is_channels_last(actual[0]) and is_channels_last(actual[1])

    convolved = re.search(r"(\w+) = extern_kernels\.convolution\(", forward)
    assert convolved, forward
    normed = re.search(
        rf"(\w+) = torch\.ops\.{namespace}\.{ops[0]}\.default\({convolved[1]}, ", forward
    )
    assert normed, forward
    if ops == FUSED:  # nothing is left between the norm and the next convolution
        output = re.search(rf"(\w+) = {normed[1]}\[0\]", forward)
        assert output, forward
        assert f"extern_kernels.convolution({output[1]}, " in forward, forward
        assert "empty_strided" not in forward.split("def call")[1], forward
    normed = re.search(rf"(\w+) = torch\.ops\.{namespace}\.{ops[1]}\.default", backward)
    assert normed, backward
    gradient = re.search(rf"(\w+) = {normed[1]}\[0\]", backward)
    assert gradient, backward
    assert f"aten.convolution_backward.default({gradient[1]}, " in backward, backward


def test_dynamic_shapes(device: str) -> None:
    backend = CompileCounterWithBackend("inductor")
    function = compiled(norm_silu, dynamic=True, backend=backend)
    for shape in ((11, 6, 7, 5), (13, 6, 16, 9)):
        tensors = operands(shape, device)
        expected = train(norm_silu, *tensors)
        with expect_calls(device, True, True, FUSED):
            actual = train(function, *tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert backend.frame_count == 1, "recompiled: a size was taken for a constant"


def test_sizes_that_are_data(device: str) -> None:
    """Nothing is known of them when strides are: fake tensors take the norm for one of ours."""

    def some(X: Tensor, gamma: Tensor, beta: Tensor, count: Tensor) -> Tensor:
        return norm_silu(X[: count.item()], gamma, beta)

    tensors = [t.detach() for t in operands((4, 6, 7, 5), device)]  # stock's backward refuses them
    function = compiled(some)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for count in (torch.tensor(3), torch.tensor(1)):
            with expect_calls(device, True, None, FUSED):
                actual = function(*tensors, count)
            assert is_channels_last(actual)
            torch.testing.assert_close(actual, some(*tensors, count), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 6, 7), (2, 6, 2, 3, 4)], ids=["NLC", "NDHWC"])
def test_other_ranks(device: str, shape: tuple[int, ...]) -> None:
    tensors = operands(shape, device)
    expected = train(norm, *tensors)
    with expect_calls(device, True, True):
        actual = train(compiled(norm), *tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert is_channels_last(actual[0]) and is_channels_last(actual[1])


def test_gradient_in_another_layout(device: str) -> None:
    """The code that computes dY writes it in X's order."""

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return norm(X, gamma, beta).contiguous().sin()

    tensors = operands((2, 6, 7, 5), device)
    expected = train(function, *tensors)
    with expect_calls(device, True, True):
        actual, codes = run_and_get_code(train, compiled(function), *tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    call = re.search(r"native_group_norm_backward\.default\((\w+), ", codes[-1])
    assert call, codes[-1]
    made = re.findall(rf"{call[1]} = empty_strided_\w+\((\([^)]*\)), (\([^)]*\))", codes[-1])
    assert made == [("(2, 6, 7, 5)", "(210, 1, 30, 6)")], codes[-1]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(device: str, mode: str) -> None:
    """On a GPU both record CUDA graphs: the third run is a replay, of other values."""
    module = Block().to(device, memory_format=torch.channels_last)
    function = compiled(module, mode=mode)
    for _ in range(3):
        x = lay_out(torch.randn(2, 4, 9, 7, device=device), "channels_last")
        with torch.no_grad():
            torch.ops.gn_override.reset_counters()
            actual = function(x).clone()
            ours, declined = calls(FUSED[0], device)
            assert declined == 0 and (ours > 0 or device == "cuda")
            torch.testing.assert_close(actual, module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_training_in_cuda_graphs(mode: str) -> None:
    function = compiled(norm_silu, mode=mode)
    for _ in range(3):
        tensors = operands((2, 6, 7, 5), "cuda")
        actual = [t.clone() for t in train(function, *tensors)]
        torch.testing.assert_close(actual, list(train(norm_silu, *tensors)), rtol=1e-3, atol=1e-3)
    assert calls(FUSED[0], "cuda")[1] == calls(FUSED[1], "cuda")[1] == 0


def test_calls_from_cpp(device: str) -> None:
    """cpp_wrapper: what calls the kernels is C++, which asks the dispatcher as Python does."""
    module = Block().to(device, memory_format=torch.channels_last)
    x = lay_out(torch.randn(2, 4, 9, 7, device=device), "channels_last").requires_grad_()
    expected = train(module, x)
    with inductor_config.patch(cpp_wrapper=True), expect_calls(device, True, True, FUSED):
        actual, codes = run_and_get_code(train, compiled(module), x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert is_channels_last(actual[0]) and is_channels_last(actual[1])
    assert all("inductor_entry_impl" in code for code in codes)


def test_frozen_parameters(device: str) -> None:
    """Freezing makes gamma and beta constants, and lays the convolutions' weights out anew.

    For a CPU 2.11 traces the graph anew then, without its operands' values: nothing is joined.
    """
    module = Block().to(device, memory_format=torch.channels_last).eval()
    x = lay_out(torch.randn(2, 4, 9, 7, device=device), "channels_last")
    ops = ATEN if device == "cpu" and TORCH == (2, 11) else FUSED
    with torch.no_grad(), inductor_config.patch(freezing=True):
        expected = module(x)
        with expect_calls(device, True, None, ops):
            actual, (code,) = run_and_get_code(compiled(module), x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert is_channels_last(actual)
    assert "_frozen_param" in code, code


# --- and where they do not --------------------------------------------------------------------


def test_nchw_is_inductors(device: str) -> None:
    tensors = operands((2, 6, 7, 5), device, "nchw")
    with gn_override.disabled():
        expected = train(norm_silu, *tensors)
    with expect_calls(device, None, None):
        actual = train(compiled(norm_silu), *tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["disable", "set_inductor"])
def test_switches(device: str, by: str) -> None:
    """One function, on, off and on again: neither graphs nor cached code survive a change."""
    tensors = operands((2, 6, 7, 5), device)
    expected = train(norm_silu, *tensors)
    function = compiled(norm_silu)
    for on in (True, False, True):
        if by == "set_inductor":
            gn_override.set_inductor(on)
        else:
            (gn_override.enable if on else gn_override.disable)()
        assert gn_override.report().inductor is on
        with expect_calls(device, on or None, on or None, FUSED):
            actual = train(function, *tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        if by == "set_inductor":
            with expect_calls(device, True, True):
                train(norm_silu, *tensors)


def stock_inside(X: Tensor) -> Tensor:
    with gn_override.disabled():
        return F.group_norm(X, GROUPS) + 1


@gn_override.disabled()
def stock_throughout(X: Tensor) -> Tensor:
    return F.group_norm(X, GROUPS) + 1


def stock_between(X: Tensor) -> Tensor:
    gn_override.disable()
    Y = F.group_norm(X, GROUPS)
    gn_override.enable()
    return Y + 1


CHANGES = (stock_inside, stock_throughout, stock_between)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("function", CHANGES)
def test_changes_inside_compiled_code(
    device: str, function: Callable[..., Tensor], backend: str
) -> None:
    """They break the graph, and happen when the code runs."""
    X = lay_out(torch.randn(2, 6, 7, 5, device=device), "channels_last")
    expected = function(X)
    code = torch.compile(function, backend=backend)
    for _ in range(2):
        with expect_calls(device, None, None):
            torch.testing.assert_close(code(X), expected)
        assert gn_override.is_enabled()
    with expect_calls(device, True, None):
        F.group_norm(X, GROUPS)


@pytest.mark.parametrize("function", CHANGES)
def test_changes_that_cannot_be_recorded(function: Callable[..., Tensor]) -> None:
    """An error, and nothing has changed."""
    X = lay_out(torch.randn(2, 6, 7, 5), "channels_last")

    class Model(nn.Module):
        def forward(self, X: Tensor) -> Tensor:
            return function(X)

    def fullgraph() -> None:
        torch.compile(function, backend="eager", fullgraph=True)(X)

    def strict() -> None:
        torch.export.export(Model(), (X,), strict=True)

    for raises, match in (
        (lambda: torch.jit.trace(function, X), "settings are the process's"),
        (lambda: torch.export.export(Model(), (X,), strict=False), "settings are the process's"),
        (strict, None),
        (fullgraph, "disable"),
    ):
        with pytest.raises(RuntimeError, match=match):
            raises()
        assert gn_override.is_enabled()
    graph = make_fx(function)(X).graph
    assert not [node for node in graph.nodes if "gn_override" in str(node.target)]
    with expect_calls("cpu", True, None):
        F.group_norm(X, GROUPS)


@pytest.mark.parametrize("setting", ["switch", "set_inductor"])
def test_changes_by_a_backend(setting: str) -> None:
    """They hold for what it compiles, and what is undone drops nothing."""

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if setting == "switch":
            with gn_override.disabled():
                return torch._inductor.compile(module, inputs)
        gn_override.set_inductor(False)
        code = torch._inductor.compile(module, inputs)
        gn_override.set_inductor(True)
        return code

    tensors = operands((2, 6, 7, 5), "cpu")
    expected = train(norm_silu, *tensors)
    counter = CompileCounterWithBackend(backend)
    function = compiled(norm_silu, backend=counter)
    for _ in range(2):
        with expect_calls("cpu", None, None):
            actual = train(function, *tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        gn_override.enable()
    assert counter.frame_count == 1
    assert gn_override.is_enabled() and gn_override.report().inductor


@pytest.mark.parametrize("which", ["fw_compiler", "bw_compiler"])
@pytest.mark.parametrize("by", ["torch.compile", "aot_function"])
def test_changes_by_a_compiler_of_aotautograd(by: str, which: str) -> None:
    """aot_function() compiles without Dynamo."""

    def plain(module: torch.fx.GraphModule, _: object) -> Any:
        return make_boxed_func(module.forward)

    def switching(module: torch.fx.GraphModule, inputs: object) -> Any:
        with gn_override.disabled():
            return plain(module, inputs)

    compilers = {"fw_compiler": plain, "bw_compiler": plain, which: switching}
    if by == "torch.compile":
        function = compiled(norm, backend=aot_autograd(**compilers))
    else:
        function = aot_function(norm, **compilers)
    tensors = operands((2, 6, 7, 5), "cpu")
    torch.testing.assert_close(train(function, *tensors), train(norm, *tensors))
    assert gn_override.is_enabled()


def test_a_change_that_a_backend_leaves() -> None:
    """What was compiled before is dropped by the next call outside that could change something."""

    def disabling(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        gn_override.disable()
        return module.forward

    tensors = operands((2, 6, 7, 5), "cpu")
    counter = CompileCounterWithBackend("eager")
    earlier = compiled(norm, backend=counter)
    earlier(*tensors)
    compiled(norm_silu, backend=disabling)(*tensors)
    assert not gn_override.is_enabled()
    for _ in range(2):
        gn_override.disable()
        earlier(*tensors)
        assert counter.frame_count == 2


def test_off_puts_the_tables_back() -> None:
    """Both tables of Inductor, entry by entry, in their order."""
    on = dict(decomposition.decompositions)
    with gn_override.disabled():
        decomposition.fast_random_decomps.cache_clear()
        tables = decomposition.decompositions, decomposition.fast_random_decomps()
        stock = [list(table.items()) for table in tables]
        from_torch = torch._decomp.get_decompositions(OPS)
        for op in OPS:
            assert all(table[op] is from_torch[op] for table in tables)
    assert {op for op in on if on[op] is not tables[0][op] or op in OPS} == set(OPS)
    for turn_off in (gn_override.disable, lambda: gn_override.set_inductor(False)):
        for table in tables:
            assert all(table[op] is not from_torch[op] for op in OPS)
        turn_off()
        for table, before in zip(tables, stock, strict=True):
            assert len(table) == len(before)
            for now, then in zip(table.items(), before, strict=True):
                assert now[0] is then[0] and now[1] is then[1]
        gn_override.enable()


@pytest.mark.parametrize(
    "code",
    [
        "import torch, torch._inductor.lowering\n"
        "from torch._inductor.decomposition import decompositions\n"
        "stock = dict(decompositions)\n"
        "changed = lambda: {str(op) for op in stock if decompositions[op] is not stock[op]}\n"
        "import gn_override\n"
        "assert not changed()\n"
        "gn_override.enable()\n"
        "assert changed() == {f'aten.native_group_norm{s}.default' for s in ('', '_backward')}\n",
        "import sys, gn_override\n"
        "assert not {'torch._inductor.lowering', 'torch._dynamo'} & set(sys.modules)\n"
        "gn_override.enable()\n"
        "class Old:\n"  # a finder that has no find_spec(), which import skips
        "    def find_module(self, name, path=None): pass\n"
        "sys.meta_path.insert(1, Old())\n"
        "hooks = len(sys.meta_path)\n"
        "import torch, torch._inductor.lowering\n"
        "assert len(sys.meta_path) == hooks - 1\n"
        "from torch._inductor.decomposition import decompositions\n"
        "entry = decompositions[torch.ops.aten.native_group_norm.default]\n"
        "assert type(entry).__module__ == 'gn_override._inductor'\n"
        "from torch._inductor import config\n"
        "assert config.pre_grad_custom_pass.active()\n"
        "gn_override.disable()\n"
        "assert config.pre_grad_custom_pass is None\n",
    ],
    ids=["Inductor first", "Inductor later"],
)
def test_either_order_of_imports(code: str, tmp_path: Path) -> None:
    """The import does not load Inductor, and finds it if it is there."""
    done = run_python("-c", code, cwd=tmp_path, GN_OVERRIDE="0")
    assert (done.stdout, done.stderr) == ("", "")


def test_cache_tag_keeps_the_users() -> None:
    """Compiled code on disk is not shared between the sides of the switch."""
    config = torch.compiler.config
    ours = config.cache_key_tag
    assert "gn_override" in ours
    try:
        gn_override.set_inductor(False)  # layouts are still ours
        layouts = config.cache_key_tag
        assert "gn_override" in layouts and layouts != ours
        gn_override.disable()
        assert config.cache_key_tag == ""
        config.cache_key_tag = "mine"
        gn_override.enable()
        assert config.cache_key_tag == "mine" + layouts
        gn_override.set_inductor(True)
        assert config.cache_key_tag == "mine" + ours
        gn_override.disable()
        assert config.cache_key_tag == "mine"
    finally:
        config.cache_key_tag = ""
        gn_override.set_inductor(True)
        gn_override.enable()


def test_cache_tag_keeps_the_environments(tmp_path: Path) -> None:
    """As it does what a program sets itself."""
    code = (
        "import torch, gn_override\n"
        "print(torch.compiler.config.cache_key_tag)\n"
        "gn_override.disable()\n"
        "print(torch.compiler.config.cache_key_tag)\n"
    )
    done = run_python("-c", code, cwd=tmp_path, TORCH_COMPILE_CACHE_KEY_TAG="mine")
    on, off = done.stdout.split()
    assert on == "mine" + torch.compiler.config.cache_key_tag and off == "mine"


def test_nothing_to_change_changes_nothing() -> None:
    """What is compiled stays so when a setting is made that holds already."""
    backend = CompileCounterWithBackend("eager")
    function, tensors = compiled(norm, backend=backend), operands((2, 6, 7, 5), "cpu")
    for _ in range(2):
        function(*tensors)
        gn_override.enable()
        gn_override.set_inductor(True)
    assert backend.frame_count == 1


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_other_threads() -> None:
    """What Inductor is told holds for all: settings of PyTorch's are a thread's since 2.13."""
    tensors = operands((2, 6, 7, 5), "cpu")

    def settings() -> tuple[str, bool]:
        custom_pass = inductor_config.pre_grad_custom_pass
        return torch.compiler.config.cache_key_tag, custom_pass is not None

    on = in_a_thread(settings)
    assert "gn_override" in on[0] and on[1]
    with gn_override.disabled():
        assert in_a_thread(settings) == ("", False)
    with expect_calls("cpu", True, True, FUSED):
        in_a_thread(lambda: train(compiled(norm_silu), *tensors))
    try:
        in_a_thread(gn_override.disable)
        assert in_a_thread(settings) == ("", False)
    finally:
        gn_override.enable()
    assert in_a_thread(settings) == on


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["sequence", "channels_last"])
def test_switched_off_between_forward_and_backward(device: str, layout: str, backend: str) -> None:
    """A graph that is there already calls what it was made of: stock's kernels then."""
    if backend == "inductor" and not STOCK_DROPS_LAYOUT:
        pytest.skip("its code asserts a layout of dX, where stock's may have another")
    X, gamma, beta = operands((2, 6, 8) if layout == "sequence" else (2, 6, 7, 5), device)
    with gn_override.disabled():
        expected = train(norm, X, gamma, beta)[1:]
    Y = compiled(norm, backend=backend)(X, gamma, beta).cos().sum()
    with gn_override.disabled():
        actual = torch.autograd.grad(Y, (X, gamma, beta))
    torch.testing.assert_close(actual, expected)


# --- what the pass makes of what Dynamo records -----------------------------------------------


def after_the_pass(function: Callable[..., Tensor], *tensors: Tensor) -> list[str]:
    """The activations that are fused in a function, whose results must not change."""
    fused = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        inductor_config.pre_grad_custom_pass(module.graph)
        module.graph.lint()
        module.recompile()
        op = torch.ops.gn_override.group_norm_act.default
        fused.extend(node.args[5] for node in module.graph.nodes if node.target is op)
        return module.forward

    expected = function(*tensors)
    torch._dynamo.reset()
    actual = torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    # A fused norm is not rounded before the activation.
    tolerance = 2 * torch.finfo(expected.dtype).eps if expected.dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    return fused


def no_grad_norm(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    with torch.no_grad():
        Y = norm(X, gamma, beta)
    return F.silu(Y)


def autocast_norm(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        Y = norm(X, gamma, beta)
    return F.silu(Y)


def changed_in_between(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    X = X.clone()
    Y = norm(X, gamma, beta)
    X.add_(1)
    return F.silu(Y) + X


def bias_changed_later(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    beta = beta.clone()
    Y = norm_silu(X, gamma, beta)
    beta[1:].add_(1)
    return Y


def data_of_bias_changed_later(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    beta = beta * 1
    Y = norm_silu(X, gamma, beta)
    beta.data.mul_(3)
    return Y


def data_of_an_input_changed_later(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    Y = norm_silu(X, gamma, beta)
    beta.data.mul_(2).mul_(0.5)  # for the next call
    return Y


def data_of_an_alias_changed_later(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    both = torch.cat([gamma, beta])
    Y = norm_silu(X, *both.split(len(gamma)))
    both.data.mul_(3)
    return Y


def data_of_a_viewed_input_changed_later(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    Y = norm_silu(X, gamma, beta.view(-1))
    beta.data.mul_(2).mul_(0.5)
    return Y


def used_twice(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    Y = norm(X, gamma, beta)
    return F.silu(Y) + Y


def changed_in_place(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    Y = norm(X, gamma, beta)
    F.relu_(Y)
    return Y


@pytest.mark.parametrize(
    "function, fused",
    [
        (norm_silu, ["silu"]),
        (lambda *t: F.relu(norm(*t)), ["relu"]),
        (lambda *t: F.relu(norm(*t), inplace=True), ["relu"]),
        (lambda *t: F.relu_(norm(*t)), ["relu"]),
        (lambda *t: torch.relu(norm(*t)), ["relu"]),
        (lambda *t: norm(*t).relu(), ["relu"]),
        (lambda *t: norm(*t).relu_(), ["relu"]),
        (lambda *t: F.silu(norm(*t), inplace=True), ["silu"]),
        (lambda *t: F.gelu(norm(*t)), ["gelu"]),
        (lambda *t: F.gelu(norm(*t), approximate="tanh"), ["gelu_tanh"]),
        (lambda X, *t: F.silu(torch.group_norm(X, GROUPS, *t)), ["silu"]),
        (lambda X, *t: F.silu(F.group_norm(X, num_groups=GROUPS)), ["silu"]),
        (lambda X, *t: norm_silu(norm_silu(X, *t), *t), ["silu", "silu"]),
        (changed_in_between, ["silu"]),
        (bias_changed_later, []),
        (data_of_bias_changed_later, []),
        (data_of_an_input_changed_later, []),
        (data_of_an_alias_changed_later, []),
        (data_of_a_viewed_input_changed_later, []),
        (lambda X, *t: norm_silu(X, *(parameter.float() for parameter in t)), ["silu"]),
        (lambda X, gamma, beta: norm_silu(X, gamma, beta * 2), ["silu"]),
        (used_twice, []),
        (changed_in_place, []),
        (no_grad_norm, []),
        (autocast_norm, []),
        (lambda *t: torch.tanh(norm(*t)), []),
        (lambda X, *t: F.silu(norm(X.contiguous(), *t)), []),
        (lambda *t: torch.add(norm(*t), 1).relu(), []),
        (lambda X, *t: F.silu(F.group_norm(X, GROUPS, *t, eps=1)), []),
    ],
)
def test_pass(function: Callable[..., Tensor], fused: list[str]) -> None:
    assert after_the_pass(function, *operands((2, 6, 7, 5), "cpu")) == fused


@pytest.mark.parametrize("second, fused", [("a", True), ("b", False)])
def test_pass_keeps_what_is_noted(second: str, fused: bool) -> None:
    """The stream of a node is noted so, and what a backend does for some nodes only."""
    noted = []

    def note(graph: torch.fx.Graph) -> None:
        noted.extend(node.meta for node in graph.nodes if "group_norm" in str(node.target))

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        with annotate({"by": "a"}):
            Y = norm(X, gamma, beta)
        with annotate({"by": second}):
            return F.silu(Y)

    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False, post_grad_custom_post_pass=note),
        expect_calls("cpu", True, True, FUSED if fused else ATEN),
    ):
        train(compiled(function), *operands((2, 6, 7, 5), "cpu"))
    assert len(noted) == 2  # forward and backward
    for meta in noted:
        assert meta["custom"] == {"by": "a"} and "F.group_norm(" in meta["stack_trace"]


def checkpointed(*operands: Tensor) -> Tensor:
    return checkpoint(norm_silu, *operands, use_reentrant=False)


@pytest.mark.parametrize("block", [norm_silu, checkpointed])
def test_selective_checkpointing(block: Callable[..., Tensor]) -> None:
    """A policy decides on PyTorch's operators, as in eager mode, in checkpoints inside too."""
    seen: set[Any] = set()

    def policy(_: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(op)
        saved = op is aten.native_group_norm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, X, gamma, beta, use_reentrant=False, context_fn=contexts)

    tensors = operands((2, 6, 7, 5), "cpu")
    expected = train(norm_silu, *tensors)
    once = expect_calls("cpu", True, True)
    with once if block is norm_silu else contextlib.nullcontext():
        actual = train(compiled(function), *tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert aten.native_group_norm.default in seen
    assert not [op for op in seen if op.namespace == "gn_override"]


def test_data_of_a_bias_changed_around_a_checkpoint() -> None:
    """The change is in another graph than the norm."""

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        beta = beta * 1
        Y = checkpointed(X, gamma, beta)
        beta.data.mul_(3)
        return Y

    tensors = operands((2, 6, 7, 5), "cpu")
    with gn_override.disabled():
        expected = train(compiled(function), *tensors)
    torch.testing.assert_close(train(compiled(function), *tensors), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("body", [norm, norm_silu])
def test_training_through_a_scan(body: Callable[..., Tensor]) -> None:
    """Of each step's X, saved in another layout, the gradient has the layout of the first X."""

    def step(X: Tensor, i: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return body(X, gamma, beta), i + 1

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        steps = functools.partial(step, gamma=gamma, beta=beta)
        return scan(steps, X, torch.arange(3.0))[0]

    tensors = operands((2, 6, 7, 5), "cpu")
    with gn_override.disabled():
        try:
            expected = train(compiled(function), *tensors)
        except RuntimeError as error:
            pytest.xfail(f"stock cannot do it either: {error}"[:200])
    with expect_calls("cpu", None, None):  # such a body is Inductor's
        actual = train(compiled(function), *tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Recomputed(torch.autograd.Function):
    """A norm that backward computes again."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(X, gamma, beta)
        return norm(X, gamma, beta)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        X, gamma, beta = ctx.saved_tensors
        return norm(X, gamma, beta) * dY, gamma, beta


def recomputed(X: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor]:
    return (Recomputed.apply(X, gamma, beta),)


def twice(X: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return norm(X.cos(), gamma, beta), norm(X.cos(), gamma, beta)


def twice_activated(X: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return norm_silu(X, gamma, beta), norm_silu(X, gamma, beta)


def saved_twice(X: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return norm(X, gamma, beta), norm(X, gamma, beta) * norm(X, gamma, beta)


def checkpointed_again(X: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    def body(x: Tensor) -> Tensor:
        return norm(x, gamma, beta).square()

    return norm(X, gamma, beta), checkpoint(body, X, use_reentrant=False)


@pytest.mark.parametrize(
    "function", [twice, twice_activated, saved_twice, recomputed, checkpointed_again]
)
def test_same_norm_twice(function: Callable[..., tuple[Tensor, ...]], device: str) -> None:
    """Each result has memory of its own, which no backward writes to."""
    tensors = operands((2, 6, 7, 5), device)
    results = []
    for override in (contextlib.nullcontext(), gn_override.disabled()):
        with override:
            outputs = compiled(function)(*tensors)
            gradients = torch.autograd.grad(sum(Y.square().sum() for Y in outputs), tensors)
            for Y in outputs:
                with torch.no_grad():
                    Y.add_(1)
            results.append((outputs, gradients))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        {"options": {"joint_custom_pre_pass": lambda graph: None}},
        {"backend": "aot_eager_decomp_partition"},
    ],
    ids=["pass", "backend"],
)
def test_same_norm_twice_whoever_compiles(how: dict[str, Any]) -> None:
    """Nor does it hang on Inductor's settings, which the other backend does not read."""
    tensors = operands((2, 6, 7, 5), "cpu")
    one, other = torch.compile(twice, **how)(*tensors)
    assert calls("native_group_norm", "cpu") == (2, 0)
    assert one.data_ptr() != other.data_ptr()


def test_pass_under_autocast(device: str) -> None:
    """The norm's dtype is the one that autocast gives it."""

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return norm_silu(X, gamma, beta)

    X, gamma, beta = operands((2, 6, 7, 5), device)
    for x in (X, X.detach().bfloat16()):
        assert after_the_pass(function, x, gamma, beta) == ["silu"]


def gradient(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return torch.func.grad(lambda x: norm_silu(x, gamma, beta).cos().sum())(X)


def mapped(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return torch.func.vmap(norm_silu, (None, 0, None))(X, torch.stack([gamma, beta]), beta)


def captured(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """No operand of the norm is transformed; its result is a tensor of the transform."""

    def loss(scale: Tensor) -> Tensor:
        pixels = norm_silu(X, gamma, beta).permute(0, 2, 3, 1)
        return (pixels.view(len(X), -1) * scale).sum()

    return torch.func.grad(loss)(gamma[0])


@pytest.mark.parametrize("function", [gradient, mapped, captured])
def test_transforms_keep_stocks(function: Callable[..., Tensor]) -> None:
    """Inside them our operator is a composite, and its layout another."""
    tensors = [t.detach() for t in operands((2, 6, 7, 5), "cpu")]
    expected = function(*tensors)
    actual = compiled(function)(*tensors)
    torch.testing.assert_close(actual, expected, check_stride=True)
    assert after_the_pass(function, *tensors) == []


class AtenOnly(torch.Tensor):
    """A tensor in a wrapper that knows PyTorch's operators alone, as DTensor is one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> AtenOnly:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return "AtenOnly()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> AtenOnly:
        return AtenOnly(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.namespace not in ("aten", "prim"):
            raise NotImplementedError(f"{function}")
        args, kwargs = tree_map_only(AtenOnly, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, AtenOnly, function(*args, **kwargs))


@pytest.mark.parametrize("which", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_subclasses_of_tensors_keep_stocks(which: tuple[int, ...]) -> None:
    tensors = [t.detach() for t in operands((2, 6, 7, 5), "cpu")]
    expected = norm_silu(*tensors)
    for i in which:
        tensors[i] = AtenOnly(tensors[i])
    actual = compiled(norm_silu)(*tensors)
    torch.testing.assert_close(actual.inner, expected, check_stride=True)


def test_what_other_processes_load_keeps_stocks() -> None:
    tensors = operands((2, 6, 7, 5), "cpu")
    assert after_the_pass(norm_silu, *tensors) == ["silu"]
    with torch._dynamo.config.patch(caching_precompile=True):
        assert not inductor_config.pre_grad_custom_pass.active()
        expected = norm(*tensors)
        with expect_calls("cpu", None, None):
            actual = compiled(norm)(*tensors)
    torch.testing.assert_close(actual, expected)


def test_no_float32_from_half_on_a_cpu() -> None:
    """Nor does the pass take a norm for ours that no kernel runs."""
    X, gamma, beta = operands((2, 6, 7, 5), "cpu")
    X = X.detach().bfloat16()
    assert _meta.takes_act(X, GROUPS, gamma.bfloat16(), beta.bfloat16(), None)
    assert not _meta.takes_act(X, GROUPS, gamma, beta, torch.float32)


def test_what_a_child_process_compiles_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has imported PyTorch alone."""
    compile_fx = torch._inductor.compile_fx
    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode.SUBPROCESS)
    assert not inductor_config.pre_grad_custom_pass.active()


class Recorded(CustomGraphPass):
    """A pass of the program's own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += [str(node.target) for node in graph.nodes]

    def uuid(self) -> str:
        return "recorded"


def test_pass_beside_the_programs() -> None:
    """It runs first, and is what is left when ours goes."""
    theirs = Recorded()
    alone = inductor_config.pre_grad_custom_pass.uuid()
    with gn_override.disabled():
        assert inductor_config.pre_grad_custom_pass is None
        inductor_config.pre_grad_custom_pass = theirs
    try:
        both = inductor_config.pre_grad_custom_pass
        assert both is not theirs and both.uuid() not in (alone, theirs.uuid())
        tensors = operands((2, 6, 7, 5), "cpu")
        with expect_calls("cpu", True, True, FUSED):
            train(compiled(norm_silu), *tensors)
        assert any("group_norm" in target for target in theirs.seen)
        assert not any("group_norm_act" in target for target in theirs.seen)
        for turn_off in (gn_override.disable, lambda: gn_override.set_inductor(False)):
            turn_off()
            assert inductor_config.pre_grad_custom_pass is theirs
            both(torch.fx.Graph())  # whoever holds it still: it does nothing of ours
            gn_override.enable()
            gn_override.set_inductor(True)
    finally:
        gn_override.disable()
        inductor_config.pre_grad_custom_pass = None
        gn_override.enable()


def test_pass_without_uuid() -> None:
    """Nothing is cached where Inductor could not tell the program's pass from another."""
    before = inductor_config.pre_grad_custom_pass
    assert before.uuid() is not None
    assert type(before)(lambda graph: None, before.active).uuid() is None
    assert type(before)([Recorded()], before.active).uuid() is not None


def test_set_autocast_drops_what_is_compiled() -> None:
    backend = CompileCounterWithBackend("eager")
    function, tensors = compiled(norm, backend=backend), operands((2, 6, 7, 5), "cpu")
    for mode, count in (("float32", 1), ("preserve", 2), ("preserve", 2), ("float32", 3)):
        gn_override.set_autocast(mode)
        function(*tensors)
        assert backend.frame_count == count


def test_uuid_is_of_the_settings() -> None:
    """A pass that a thread holds still is told from what it was before a change."""
    held = inductor_config.pre_grad_custom_pass
    assert copy.deepcopy(held) is held
    found = {held.uuid()}
    with gn_override.disabled():
        found.add(held.uuid())
    try:
        gn_override.set_autocast("preserve")
        found.add(held.uuid())
    finally:
        gn_override.set_autocast("float32")
    assert len(found) == 3 and held.uuid() in found


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_modules_with_an_activation(device: str, layout: str) -> None:
    """They are compiled like a norm and an activation."""
    module = gn_override.nn.GroupNorm(GROUPS, 6, activation="silu").to(device)
    fused = nn.Sequential(nn.GroupNorm(GROUPS, 6), nn.SiLU()).to(device)
    gn_override.fuse(fused)
    X = operands((2, 6, 7, 5), device, layout)[0]
    for model in (module, fused):
        expected = train(model, X)
        for on in (True, False):
            gn_override.set_inductor(on)
            ours = True if on and layout == "channels_last" else None
            with expect_calls(device, ours, ours, FUSED):
                actual = train(compiled(model), X)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        with gn_override.disabled():
            actual = train(compiled(model), X)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("activation", [torch.neg, F.relu, F.silu])
def test_dgamma_of_every_group(activation: Callable[[Tensor], Tensor]) -> None:
    """#140913: one group's dgamma was 25% off in code of Inductor's own."""

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return activation(F.group_norm(X, 16, gamma, beta))

    X = lay_out(torch.randn(256, 64, 64, 64, device="cuda"), "channels_last").bfloat16()
    gamma, beta = torch.randn(2, 64, device="cuda").bfloat16().unbind()
    dY = torch.randn_like(X)

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            given = [t.detach().to(dtype).requires_grad_() for t in (X, gamma, beta)]
            return torch.autograd.grad(run(*given), given[1:], dY.to(dtype))

    actual = gradients(compiled(function), torch.bfloat16)
    with gn_override.disabled():
        expected = gradients(function, torch.float64)
    # mean and rstd of aten's own op are bfloat16: each sample's share of the sums is off by that.
    atol = torch.finfo(torch.bfloat16).eps / 2 * math.sqrt(dY.numel() / 64)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=atol)


# --- what Inductor's table does to a traced call, also for CUDA without a GPU -----------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_build)])
def test_table(device_type: str, layout: str, dynamic: bool) -> None:
    """Calls that our kernels take stay in the graph; the others, and AOTInductor's, do not."""

    def step(X: Tensor, gamma: Tensor, dY: Tensor) -> tuple[Tensor, ...]:
        sizes = (X.shape[0], X.shape[1], X.shape[2] * X.shape[3], GROUPS)
        Y, mean, rstd = aten.native_group_norm(X, gamma, gamma, *sizes, 1e-5)
        return Y, *aten.native_group_norm_backward(
            dY, X, mean, rstd, gamma, *sizes, [True, True, True]
        )

    fake = FakeTensorMode(shape_env=ShapeEnv())
    which = DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
    context = StatelessSymbolicContext([which, DimDynamic.STATIC, which, which])
    X = fake.from_tensor(lay_out(torch.empty(11, 6, 7, 5), layout), symbolic_context=context)
    with fake:
        X, dY = (torch.empty_strided(X.shape, X.stride(), device=device_type) for _ in range(2))
        gamma = torch.empty(6, device=device_type)

    def kept() -> list[Any]:
        table = decomposition.select_decomp_table()
        mode = "symbolic" if dynamic else "fake"
        graph = make_fx(step, decomposition_table=table, tracing_mode=mode)(X, gamma, dY)
        targets = [node.target for node in graph.graph.nodes]
        assert all("gn_override" not in str(target) for target in targets)
        return [target for target in targets if target in OPS]

    assert kept() == (list(OPS) if layout == "channels_last" else [])
    assert not fake.shape_env.replacements, "a size was taken for a constant"
    with V.set_aot_compilation(True):
        assert kept() == []
    with gn_override.disabled():
        assert kept() == []


# --- what is exported -------------------------------------------------------------------------


class Tokens(nn.Module):
    """A norm of what a transposition made (N, C, L): stock's kernels refuse that layout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.transpose(1, 2), GROUPS).transpose(1, 2).flatten(1)


class Viewed(nn.Module):
    """Tracing drops contiguous() of what is so already; the view needs it in PyTorch's layout."""

    def forward(self, x: Tensor) -> Tensor:
        Y = F.group_norm(x.transpose(1, 2), GROUPS)
        return Y.transpose(1, 2).contiguous().view(len(x), -1)


layouts_are_stocks = pytest.mark.skipif(
    not _library.build_info()["conditions"]["STOCK_DROPS_LAYOUT"],
    reason="fake tensors do not ask who will run the program",
)


@layouts_are_stocks
@pytest.mark.parametrize("strict", [False, True])
def test_views_of_exported_programs(strict: bool) -> None:
    tokens = torch.randn(2, 8, 6)
    program = torch.export.export(Viewed(), (tokens,), strict=strict)
    expected = Viewed()(tokens)
    torch.testing.assert_close(program.module()(tokens), expected)
    with gn_override.disabled():
        torch.testing.assert_close(program.module()(tokens), expected)


@layouts_are_stocks
def test_layouts_of_aotinductor() -> None:
    with FakeTensorMode(), V.set_aot_compilation(True):
        assert F.group_norm(torch.randn(2, 8, 6).transpose(1, 2), GROUPS).is_contiguous()


def test_exported_programs_run_without_the_package(tmp_path: Path) -> None:
    """torch.export, before and after decomposition."""
    block = Block().to(memory_format=torch.channels_last).eval().requires_grad_(False)
    x = lay_out(torch.randn(2, 4, 9, 7), "channels_last")
    program = torch.export.export(block, (x,))
    tokens = torch.randn(2, 8, 6)
    with gn_override.disabled():
        lowered_off = torch.export.export(Tokens(), (tokens,)).run_decompositions()
    for name, exported, input, module in (
        ("program", program, x, block),
        ("lowered", program.run_decompositions(), x, block),
        ("lowered_off", lowered_off, tokens, Tokens()),
    ):
        targets = {n.target for n in exported.graph.nodes if n.op == "call_function"}
        assert all(t is operator.getitem or t.namespace == "aten" for t in targets), targets
        torch.export.save(exported, tmp_path / f"{name}.pt2")
        torch.save((input, module(input)), tmp_path / f"{name}.pt")
    run_without_gn_override(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "programs = sorted(Path().glob('*.pt2'))\n"
        "assert len(programs) == 3\n"
        "for path in programs:\n"
        "    x, expected = torch.load(path.with_suffix('.pt'))\n"
        "    y = torch.export.load(path).module()(x)\n"
        "    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)\n",
        tmp_path,
    )


def skip_unless_packages_load() -> None:
    """Skips where stock alone crashes on an AOTInductor package: loading one is native code."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch\n"
            "program = torch.export.export(torch.nn.ReLU(), (torch.randn(4),))\n"
            "package = torch._inductor.aoti_compile_and_package(program)\n"
            "torch._inductor.aoti_load_package(package)(torch.randn(4))\n",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        pytest.skip(f"stock cannot load its own packages here: exit status {done.returncode}")


def test_aotinductor_package_runs_without_the_package(tmp_path: Path) -> None:
    skip_unless_packages_load()
    block = Block().to(memory_format=torch.channels_last).eval().requires_grad_(False)
    x = lay_out(torch.randn(2, 4, 9, 7), "channels_last")
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(block, (x,)), package_path=str(tmp_path / "block.pt2")
    )
    with expect_calls("cpu", None, None):
        torch._inductor.aoti_load_package(package)(x)
    torch.save((x, block(x)), tmp_path / "block.pt")
    run_without_gn_override(
        "import sys, torch\n"
        "x, expected = torch.load('block.pt')\n"
        "y = torch._inductor.aoti_load_package('block.pt2')(x)\n"
        "torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)\n",
        tmp_path,
    )
