"""Writes native/binding/generated from the model of codegen/group_norm.yaml."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from torchgen.api.types import DispatcherSignature
from torchgen.code_template import CodeTemplate

from codegen.model import Model, Override

ROOT = Path(__file__).parent.parent
OUTPUT = Path("native/binding/generated")
TEMPLATES = Path(__file__).parent / "templates"

COLUMNS = 80  # of .clang-format

T = TypeVar("T")


def render(model: Model) -> dict[Path, str]:
    """The generated files: path relative to the root of the repository -> text.

    The text depends on the YAML file alone, not on the version of the installed PyTorch, and is
    as clang-format leaves it.
    """
    overrides = model.overrides
    kernels = {override.kernel: override for override in overrides}
    return {
        OUTPUT / "kernels.h": _template("kernels.h").substitute(
            declarations="\n\n".join(map(_declaration, kernels.values()))
        ),
        OUTPUT / "register.cpp": _template("register.cpp").substitute(
            registrations=_guarded(
                _by_key(overrides), lambda group: _guard(group[0]), _registration
            ),
        ),
    }


def check(model: Model, root: Path = ROOT) -> str:
    """A unified diff from the files under ``root`` to what the model renders; empty if equal."""
    diff: list[str] = []
    for path, text in render(model).items():
        file = root / path
        present = file.read_text() if file.exists() else ""
        diff += difflib.unified_diff(
            present.splitlines(keepends=True),
            text.splitlines(keepends=True),
            fromfile=f"{path} (in the tree)",
            tofile=f"{path} (from group_norm.yaml)",
        )
    return "".join(diff)


def write(model: Model, root: Path = ROOT) -> list[Path]:
    """Writes what differs and returns the paths written, relative to ``root``."""
    written = []
    for path, text in render(model).items():
        file = root / path
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            written.append(path)
    return written


def _template(name: str) -> CodeTemplate:
    return CodeTemplate.from_file(str(TEMPLATES / name))


def _guard(override: Override) -> str:
    """The preprocessor condition under which the override is compiled; empty: always."""
    parts = ["GN_OVERRIDE_WITH_CUDA"] if override.build == "cuda" else []
    parts += [f"GN_OVERRIDE_{override.when}"] if override.when else []
    return " && ".join(parts)


def _guarded(items: Iterable[T], guard: Callable[[T], str], text: Callable[[T], str]) -> str:
    """The items' texts, runs of equal guard inside one #if."""
    blocks = []
    for condition, run in itertools.groupby(items, guard):
        body = "\n\n".join(map(text, run))
        blocks.append(f"#if {condition}\n{body}\n#endif // {condition}" if condition else body)
    return "\n\n".join(blocks)


def _by_key(overrides: Iterable[Override]) -> list[list[Override]]:
    """Groups what goes into one TORCH_LIBRARY_IMPL block, in the order of first appearance."""
    groups: dict[tuple[str, str], list[Override]] = {}
    for override in overrides:
        groups.setdefault((override.key, _guard(override)), []).append(override)
    return list(groups.values())


def _cpp_type(text: str) -> str:
    """torchgen's spelling of a type in the style of .clang-format."""
    text = text.replace("::std::", "std::").replace(" &", "&")
    return ", ".join(part.strip() for part in text.split(","))


def _declaration(override: Override) -> str:
    signature = DispatcherSignature.from_schema(override.schema, symint=override.symint)
    parameters = [
        f"{_cpp_type(argument.type)} {argument.name}" for argument in signature.arguments()
    ]
    returns = _cpp_type(signature.returns_type().cpp_type())
    body = ",\n".join(f"    {parameter}" for parameter in parameters)
    return f"{returns} {override.kernel}(\n{body});"


def _registration(group: list[Override]) -> str:
    body = "\n".join(map(_impl, group))
    return f"TORCH_LIBRARY_IMPL(aten, {group[0].key}, m) {{\n{body}\n}}"


def _impl(override: Override) -> str:
    name, function = f'"{override.schema.name}"', f"TORCH_FN({override.kernel})"
    line = f"  m.impl({name}, {function});"
    return line if len(line) <= COLUMNS else f"  m.impl(\n      {name}, {function});"
