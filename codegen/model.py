"""Reads codegen/group_norm.yaml and checks it against the installed PyTorch."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchgen
import yaml
from torchgen.gen import parse_native_yaml
from torchgen.model import FunctionSchema, NativeFunction
from torchgen.yaml_utils import YamlLoader

SOURCE = Path(__file__).parent / "group_norm.yaml"

BACKENDS = ("CPU", "CUDA")
BUILDS = ("any", "cuda")


class CodegenError(ValueError):
    """Something in the YAML file that cannot be generated from."""


@dataclass(frozen=True)
class Condition:
    """A yes-or-no question about the installed PyTorch; becomes the macro ``GN_OVERRIDE_<name>``.

    True where the derivative formula of the operator ``derivative_of`` contains ``contains``.
    """

    name: str
    derivative_of: str
    contains: str


@dataclass(frozen=True)
class Override:
    """One kernel that is registered in the place of PyTorch's at one dispatch key."""

    schema: FunctionSchema
    key: str
    kernel: str
    symint: bool
    build: str
    when: str | None

    @property
    def signature(self) -> tuple[FunctionSchema, bool]:
        """What the kernel's C++ signature follows from: a kernel may serve several keys."""
        return self.schema, self.symint


@dataclass(frozen=True)
class Model:
    """The content of the YAML file."""

    conditions: tuple[Condition, ...]
    overrides: tuple[Override, ...]


class InstalledTorch:
    """The operator and derivative definitions that the installed torchgen carries."""

    def __init__(self) -> None:
        packaged = Path(torchgen.__file__).parent / "packaged"
        self.native_functions_yaml = packaged / "ATen" / "native" / "native_functions.yaml"
        self.tags_yaml = packaged / "ATen" / "native" / "tags.yaml"
        self.derivatives_yaml = packaged / "autograd" / "derivatives.yaml"

    @functools.cached_property
    def functions(self) -> Mapping[str, NativeFunction]:
        """Every aten operator by name, overload included ("add.Tensor")."""
        parsed = parse_native_yaml(str(self.native_functions_yaml), str(self.tags_yaml))
        return {str(f.func.name): f for f in parsed.native_functions}

    @functools.cached_property
    def derivative_formulas(self) -> Mapping[str, tuple[str, ...]]:
        """The formulas of derivatives.yaml for each operator that has any."""
        from torchgen.packaged.autograd.load_derivatives import load_derivatives

        infos, _ = load_derivatives(
            str(self.derivatives_yaml), str(self.native_functions_yaml), str(self.tags_yaml)
        )
        return {
            str(schema.name): tuple(
                derivative.original_formula
                for info in by_key.values()
                for derivative in info.derivatives
            )
            for schema, by_key in infos.items()
        }


@functools.cache
def installed_torch() -> InstalledTorch:
    return InstalledTorch()


def valid_keys(function: NativeFunction) -> tuple[str, ...]:
    """The dispatch keys at which an override of the operator can be registered."""
    if function.has_composite_implicit_autograd_kernel:
        return ("CompositeImplicitAutograd",)
    return BACKENDS


def load(path: Path = SOURCE, torch: InstalledTorch | None = None) -> Model:
    """Parses the file.

    Raises CodegenError, with file, entry and what would be valid, for an unknown field, operator,
    dispatch key, build or condition, and where a schema is not that of the installed PyTorch.
    """
    return _Loader(path, torch or installed_torch()).load()


class _Loader:
    def __init__(self, path: Path, torch: InstalledTorch) -> None:
        self.path = path
        self.torch = torch

    def load(self) -> Model:
        try:
            document = yaml.load(self.path.read_text(), Loader=YamlLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            self.fail(f"line {line}", f"not YAML: {error.problem}")
        except AssertionError as error:  # the loader's own check: a key that is there twice
            self.fail("not YAML", str(error))
        self.fields(document, "top level", {"conditions": dict, "operators": list})
        conditions = tuple(
            self.condition(name, entry) for name, entry in document["conditions"].items()
        )
        names = [condition.name for condition in conditions]
        overrides = [
            override
            for number, entry in enumerate(document["operators"], 1)
            for override in self.operator(entry, f"operators, entry {number}", names)
        ]
        first: dict[str, Override] = {}
        places = set()
        for override in overrides:
            place = f"{override.schema.name}, {override.key}"
            if place in places:
                self.fail(place, "is there twice")
            places.add(place)
            other = first.setdefault(override.kernel, override)
            if other.signature != override.signature:
                self.fail(
                    place,
                    f"kernel '{override.kernel}' has another signature for "
                    f"{other.schema.name}, {other.key}",
                )
        return Model(conditions, tuple(overrides))

    def condition(self, name: str, entry: Any) -> Condition:
        where = f"conditions, {name}"
        if not str(name).isidentifier():
            self.fail(where, "the name becomes a macro: it has to be a C++ identifier")
        self.fields(entry, where, {"derivative_of": str, "contains": str})
        formulas = self.torch.derivative_formulas
        if entry["derivative_of"] not in formulas:
            self.unknown(where, "operator with derivatives", entry["derivative_of"], formulas)
        return Condition(name, entry["derivative_of"], entry["contains"])

    def operator(self, entry: Any, where: str, conditions: list[str]) -> Iterable[Override]:
        self.fields(entry, where, {"func": str, "dispatch": dict})
        try:
            schema = FunctionSchema.parse(entry["func"])
        except (AssertionError, RuntimeError, ValueError) as error:
            self.fail(where, f"not a schema: {entry['func']!r}: {error}")
        name = str(schema.name)
        functions = self.torch.functions
        if name not in functions:
            self.unknown(where, "operator", name, functions)
        function = functions[name]
        if str(function.func) != str(schema):
            self.fail(
                name,
                "the installed PyTorch has another schema\n"
                f"  here:      {schema}\n"
                f"  installed: {function.func}",
            )
        for key, override in entry["dispatch"].items():
            yield self.override(override, f"{name}, {key}", function, str(key), conditions)

    def override(
        self, entry: Any, where: str, function: NativeFunction, key: str, conditions: list[str]
    ) -> Override:
        keys = valid_keys(function)
        if key not in keys:
            self.unknown(where, "dispatch key", key, keys)
        self.fields(
            entry, where, {"kernel": str, "symint": bool, "build": str}, optional={"when": str}
        )
        if not entry["kernel"].isidentifier():
            self.fail(where, f"kernel '{entry['kernel']}' is not a C++ identifier")
        build = entry["build"]
        if build not in BUILDS:
            self.unknown(where, "build", build, BUILDS)
        if key == "CUDA" and build != "cuda":
            self.fail(where, f"key {key} needs build 'cuda', not '{build}'")
        when = entry.get("when")
        if when is not None and when not in conditions:
            self.unknown(where, "condition", when, conditions)
        return Override(function.func, key, entry["kernel"], entry["symint"], build, when)

    def fields(
        self,
        entry: Any,
        where: str,
        required: dict[str, type],
        optional: dict[str, type] | None = None,
    ) -> None:
        """Checks that the entry is a mapping with these fields, of these types, and no others."""
        known = required | (optional or {})
        if not isinstance(entry, dict):
            self.fail(where, f"needs the fields {', '.join(required)}, but is {entry!r}")
        for field in entry:
            if field not in known:
                self.unknown(where, "field", str(field), known)
        for field in required:
            if field not in entry:
                self.fail(where, f"field '{field}' is missing")
        for field, value in entry.items():
            if not isinstance(value, known[field]):
                self.fail(where, f"field '{field}' is {value!r}, not a {known[field].__name__}")

    def unknown(self, where: str, what: str, name: str, valid: Iterable[str]) -> None:
        """Raises the error for a name that is none of the valid ones: all of these where they are
        few, else the nearest."""
        valid = list(valid)
        near = difflib.get_close_matches(name, valid, n=3)
        if len(valid) <= 8:
            hint = f"valid: {', '.join(valid)}"
        else:
            hint = f"nearest: {', '.join(near)}" if near else "nothing is near to it"
        self.fail(where, f"unknown {what} '{name}'\n  {hint}")

    def fail(self, where: str, problem: str) -> Any:
        raise CodegenError(f"{self.path.name}: {where}: {problem}")
