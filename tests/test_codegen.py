"""The generator of native/binding/generated: its output, its errors, its command line.

The expected texts are written by the tests themselves: run with EXPECTTEST_ACCEPT=1 after a change
that is meant.
"""
# ruff: noqa: E501, W293 (expected texts are as long as what they expect)

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest
from processes import run_python

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # after what is installed
conditions = importlib.import_module("codegen.conditions")
generate = importlib.import_module("codegen.generate")
main = importlib.import_module("codegen.__main__").main
model = importlib.import_module("codegen.model")

BACKWARD = (
    "native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, "
    "Tensor? weight, SymInt N, SymInt C, SymInt HxW, int group, bool[3] output_mask) "
    "-> (Tensor, Tensor, Tensor)"
)


class SmallTorch(model.InstalledTorch):
    """The installed PyTorch with few operators, so that hints do not depend on all the others."""

    def __init__(self, formula: str = "f(grads[0].contiguous(), input)", without: str = "") -> None:
        super().__init__()
        operators = (
            "group_norm native_group_norm native_group_norm_backward native_layer_norm "
            "native_batch_norm native_dropout relu tanh sigmoid add.Tensor"
        )
        self.functions = {
            name: model.installed_torch().functions[name]
            for name in operators.split()
            if name != without
        }
        self.derivative_formulas = {
            "native_group_norm": (formula,),
            "native_layer_norm": ("g(grads[0], input.contiguous())",),
        }


SMALL = f"""\
conditions:
  STOCK_DROPS_LAYOUT:
    derivative_of: native_group_norm
    contains: ".contiguous("
operators:
- func: {BACKWARD}
  dispatch:
    CPU:
      kernel: backward_cpu
      symint: false
      build: any
    CUDA:
      kernel: backward_symint
      symint: true
      build: cuda
      when: STOCK_DROPS_LAYOUT
"""


class CodegenTest(expecttest.TestCase):
    maxDiff = None

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def yaml(self, text: str) -> Path:
        path = self.directory / "ops.yaml"
        path.write_text(text)
        return path

    def error(self, text: str, torch: model.InstalledTorch | None = None) -> str:
        with pytest.raises(model.CodegenError) as caught:
            model.load(self.yaml(text), torch or SmallTorch())
        return str(caught.value)

    def edited(self, old: str, new: str, torch: model.InstalledTorch | None = None) -> str:
        """The error after this edit of SMALL."""
        assert old in SMALL
        return self.error(SMALL.replace(old, new, 1), torch)


class TestOutput(CodegenTest):
    def test_declarations_and_registration(self) -> None:
        files = generate.render(model.load(self.yaml(SMALL), SmallTorch()))
        header, source = (text for _, text in sorted(files.items()))
        body = header[header.index("namespace") :] + source[source.index("TORCH_LIBRARY") :]
        self.assertExpectedInline(
            body,
            """\
namespace gn_override::binding {

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& grad_out,
    const at::Tensor& input,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    std::array<bool, 3> output_mask);

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_symint(
    const at::Tensor& grad_out,
    const at::Tensor& input,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight,
    c10::SymInt N,
    c10::SymInt C,
    c10::SymInt HxW,
    int64_t group,
    std::array<bool, 3> output_mask);

} // namespace gn_override::binding
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("native_group_norm_backward", TORCH_FN(backward_cpu));
}

#if GN_OVERRIDE_WITH_CUDA && GN_OVERRIDE_STOCK_DROPS_LAYOUT
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("native_group_norm_backward", TORCH_FN(backward_symint));
}
#endif // GN_OVERRIDE_WITH_CUDA && GN_OVERRIDE_STOCK_DROPS_LAYOUT

[[maybe_unused]] const bool silence_ended = (silence.reset(), true);

} // namespace
} // namespace gn_override::binding
""",
        )

    def test_paths(self) -> None:
        self.assertExpectedInline(
            "\n".join(map(str, generate.render(model.load()))),
            """\
native/binding/generated/kernels.h
native/binding/generated/register.cpp""",
        )

    def test_conditions_follow_the_formula(self) -> None:
        path = self.yaml(SMALL)
        assert conditions.evaluate(path, SmallTorch()) == {"STOCK_DROPS_LAYOUT": True}
        assert conditions.evaluate(path, SmallTorch(formula="f(grads[0], input)")) == {
            "STOCK_DROPS_LAYOUT": False
        }

    def test_output_does_not_depend_on_the_formula(self) -> None:
        path = self.yaml(SMALL)
        assert generate.render(model.load(path, SmallTorch())) == generate.render(
            model.load(path, SmallTorch(formula="f(grads[0], input)"))
        )


class TestErrors(CodegenTest):
    def test_unknown_operator(self) -> None:
        self.assertExpectedInline(
            self.edited("native_group_norm_backward(", "native_group_norm_bakward("),
            """\
ops.yaml: operators, entry 1: unknown operator 'native_group_norm_bakward'
  nearest: native_group_norm_backward, native_group_norm, native_layer_norm""",
        )

    def test_operator_that_this_torch_lacks(self) -> None:
        self.assertExpectedInline(
            self.error(SMALL, SmallTorch(without="native_group_norm_backward")),
            """\
ops.yaml: operators, entry 1: unknown operator 'native_group_norm_backward'
  nearest: native_group_norm, native_layer_norm""",
        )

    def test_schema_of_another_torch(self) -> None:
        self.assertExpectedInline(
            self.edited("SymInt N, SymInt C", "int N, SymInt C"),
            """\
ops.yaml: native_group_norm_backward: the installed PyTorch has another schema
  here:  native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, int N, SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
  there: native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N, SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)""",
        )

    def test_not_a_schema(self) -> None:
        self.assertExpectedInline(
            self.edited(BACKWARD, "native_group_norm"),
            """ops.yaml: operators, entry 1: not a schema: 'native_group_norm': Invalid function schema: native_group_norm""",
        )

    def test_unknown_key(self) -> None:
        self.assertExpectedInline(
            self.edited("    CUDA:", "    CUDAA:"),
            """\
ops.yaml: native_group_norm_backward, CUDAA: unknown dispatch key 'CUDAA'
  valid: CPU, CUDA""",
        )

    def test_key_of_the_other_kind_of_operator(self) -> None:
        self.assertExpectedInline(
            self.edited("    CPU:", "    CompositeImplicitAutograd:"),
            """\
ops.yaml: native_group_norm_backward, CompositeImplicitAutograd: unknown dispatch key 'CompositeImplicitAutograd'
  valid: CPU, CUDA""",
        )

    def test_unknown_condition(self) -> None:
        self.assertExpectedInline(
            self.edited("when: STOCK_DROPS_LAYOUT", "when: STOCK_DROPS_LAYOUTS"),
            """\
ops.yaml: native_group_norm_backward, CUDA: unknown condition 'STOCK_DROPS_LAYOUTS'
  valid: STOCK_DROPS_LAYOUT""",
        )

    def test_condition_on_an_operator_without_derivatives(self) -> None:
        self.assertExpectedInline(
            self.edited("derivative_of: native_group_norm", "derivative_of: native_group_nrm"),
            """\
ops.yaml: conditions, STOCK_DROPS_LAYOUT: unknown operator with derivatives 'native_group_nrm'
  valid: native_group_norm, native_layer_norm""",
        )

    def test_unknown_build(self) -> None:
        self.assertExpectedInline(
            self.edited("build: any", "build: cpu"),
            """\
ops.yaml: native_group_norm_backward, CPU: unknown build 'cpu'
  valid: any, cuda""",
        )

    def test_cuda_key_in_a_build_without_cuda(self) -> None:
        self.assertExpectedInline(
            self.edited("build: cuda", "build: any"),
            """ops.yaml: native_group_norm_backward, CUDA: key CUDA needs build 'cuda', not 'any'""",
        )

    def test_unknown_field(self) -> None:
        self.assertExpectedInline(
            self.edited("kernel:", "kernal:"),
            """\
ops.yaml: native_group_norm_backward, CPU: unknown field 'kernal'
  valid: kernel, symint, build, when""",
        )

    def test_unknown_field_at_the_top(self) -> None:
        self.assertExpectedInline(
            self.edited("operators:", "operator:"),
            """\
ops.yaml: top level: unknown field 'operator'
  valid: conditions, operators, upstream""",
        )

    def test_missing_field(self) -> None:
        self.assertExpectedInline(
            self.edited("      build: any\n", ""),
            """ops.yaml: native_group_norm_backward, CPU: field 'build' is missing""",
        )

    def test_field_of_the_wrong_type(self) -> None:
        self.assertExpectedInline(
            self.edited("symint: false", "symint: 0"),
            """ops.yaml: native_group_norm_backward, CPU: field 'symint' is 0, not a bool""",
        )

    def test_entry_that_is_no_mapping(self) -> None:
        self.assertExpectedInline(
            self.error(SMALL[: SMALL.index("    CPU:")] + "    CPU: backward_cpu\n"),
            """ops.yaml: native_group_norm_backward, CPU: needs the fields kernel, symint, build, but is 'backward_cpu'""",
        )

    def test_kernel_that_is_no_identifier(self) -> None:
        self.assertExpectedInline(
            self.edited("backward_cpu", "backward::cpu"),
            """ops.yaml: native_group_norm_backward, CPU: kernel 'backward::cpu' is not a C++ identifier""",
        )

    def test_kernel_with_two_signatures(self) -> None:
        self.assertExpectedInline(
            self.edited("backward_symint", "backward_cpu"),
            """ops.yaml: native_group_norm_backward, CUDA: kernel 'backward_cpu' has another signature for native_group_norm_backward, CPU""",
        )

    def test_operator_that_is_there_twice(self) -> None:
        entry = SMALL[SMALL.index("- func") :].replace("_cpu", "_cpu2")
        self.assertExpectedInline(
            self.error(SMALL + entry),
            """ops.yaml: native_group_norm_backward, CPU: is there twice""",
        )

    def test_key_that_is_there_twice(self) -> None:
        self.assertExpectedInline(
            self.edited("    CUDA:", "    CPU:"),
            """ops.yaml: not YAML: Found a duplicate key in the yaml. key=CPU, line=7""",
        )

    def test_condition_that_cannot_be_a_macro(self) -> None:
        self.assertExpectedInline(
            self.edited("  STOCK_DROPS_LAYOUT:", "  STOCK-LAYOUT:"),
            """ops.yaml: conditions, STOCK-LAYOUT: the name becomes a macro: it has to be a C++ identifier""",
        )

    def test_not_yaml(self) -> None:
        # The rest is the YAML library's.
        assert self.error("conditions: [\n").startswith("ops.yaml: line 2: not YAML: ")


class TestCommand(CodegenTest):
    """python -m codegen"""

    @pytest.fixture(autouse=True)
    def _capture(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def run_main(self, *arguments: str) -> tuple[int, str]:
        """Exit status and what is printed, run on a tree of its own."""
        self.monkeypatch.setattr(generate.check, "__defaults__", (self.directory,))
        self.monkeypatch.setattr(generate.write, "__defaults__", (self.directory,))
        status = main(list(arguments))
        out, err = self.capsys.readouterr()
        return status, out + err

    def test_write_then_check(self) -> None:
        status, written = self.run_main()
        assert status == 0
        self.assertExpectedInline(
            written,
            """\
wrote native/binding/generated/kernels.h
wrote native/binding/generated/register.cpp
""",
        )
        assert self.run_main("--check") == (0, "")
        assert self.run_main() == (0, "")  # nothing to write

    def test_check_fails_on_drift(self) -> None:
        self.run_main()
        file = self.directory / generate.OUTPUT / "register.cpp"
        text = file.read_text()
        file.write_text(text.replace("native_group_norm_cpu", "other_kernel", 1))
        status, printed = self.run_main("--check")
        assert status == 1
        self.assertExpectedInline(
            printed,
            """\
--- native/binding/generated/register.cpp (in the tree)
+++ native/binding/generated/register.cpp (from group_norm.yaml)
@@ -35,7 +35,7 @@
 #endif // GN_OVERRIDE_WITH_CUDA
 
 TORCH_LIBRARY_IMPL(aten, CPU, m) {
-  m.impl("native_group_norm", TORCH_FN(other_kernel));
+  m.impl("native_group_norm", TORCH_FN(native_group_norm_cpu));
   m.impl(
       "native_group_norm_backward", TORCH_FN(native_group_norm_backward_cpu));
 }
codegen: the generated files are not up to date; run: python -m codegen
""",
        )
        assert "other_kernel" in file.read_text()  # written by nobody

    def test_error(self) -> None:
        path = self.yaml(SMALL.replace("build: any", "build: some"))
        self.monkeypatch.setattr(model.load, "__defaults__", (path, SmallTorch()))
        status, printed = self.run_main()
        assert status == 1
        self.assertExpectedInline(
            printed,
            """\
codegen: ops.yaml: native_group_norm_backward, CPU: unknown build 'some'
  valid: any, cuda
""",
        )


def test_tree_is_up_to_date() -> None:
    """The committed files are what this version of PyTorch generates."""
    assert generate.check(model.load()) == ""


def test_runs_as_a_module() -> None:
    done = run_python("-m", "codegen", "--check", cwd=ROOT)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("path", generate.render(model.load()), ids=lambda path: path.name)
def test_clang_format_leaves_the_output_alone(path: Path) -> None:
    beside = Path(sys.executable).parent / "clang-format"
    clang_format = str(beside) if beside.exists() else shutil.which("clang-format")
    if clang_format is None:
        pytest.skip("clang-format is not installed")
    text = generate.render(model.load())[path]
    done = subprocess.run(
        [clang_format, f"--assume-filename={ROOT / path}"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == text
