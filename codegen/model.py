"""Reads codegen/group_norm.yaml and checks it against the installed PyTorch."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
class Sign:
    """What a base is recognised by: the file is there and contains, or lacks, the text."""

    file: str
    text: str
    contained: bool


@dataclass(frozen=True)
class Excerpt:
    """What stands in a file of this repository between two texts that are there exactly once."""

    source: str
    after: str
    before: str


@dataclass(frozen=True)
class Edit:
    """A change of one place of a file.

    From ``anchor``, which is there exactly once, to the end of the next ``until`` (of the anchor
    itself where that is empty) stands ``text`` afterwards; or an excerpt, and then the anchor.
    Files of PyTorch have no ``until``, which would reach further where they have changed.
    """

    file: str
    anchor: str
    until: str
    text: str | Excerpt
    why: str


@dataclass(frozen=True)
class Addition:
    """A file that PyTorch does not have, from ``source`` in this repository."""

    path: str
    source: str
    edits: tuple[Edit, ...]  # of the source's text


@dataclass(frozen=True)
class Commit:
    """One commit of the branch, and the bases that it is for."""

    title: str
    body: str
    bases: tuple[str, ...]
    additions: tuple[Addition, ...]
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Upstream:
    """How the kernels become a change of PyTorch: see codegen/upstream.py."""

    guard: str
    rewrite: Mapping[str, str]
    bases: Mapping[str, tuple[Sign, ...]]
    commits: tuple[Commit, ...]


@dataclass(frozen=True)
class Model:
    """The content of the YAML file."""

    conditions: tuple[Condition, ...]
    overrides: tuple[Override, ...]
    upstream: Upstream | None = None


class Definitions:
    """The operator and derivative definitions of one PyTorch."""

    def __init__(self, name: str, native_functions: Path, tags: Path, derivatives: Path) -> None:
        self.name = name  # for messages
        self.native_functions_yaml = native_functions
        self.tags_yaml = tags
        self.derivatives_yaml = derivatives

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


class InstalledTorch(Definitions):
    """Those that the installed torchgen carries."""

    def __init__(self) -> None:
        packaged = Path(torchgen.__file__).parent / "packaged"
        native = packaged / "ATen" / "native"
        super().__init__(
            "the installed PyTorch",
            native / "native_functions.yaml",
            native / "tags.yaml",
            packaged / "autograd" / "derivatives.yaml",
        )


@functools.cache
def installed_torch() -> InstalledTorch:
    return InstalledTorch()


def valid_keys(function: NativeFunction) -> tuple[str, ...]:
    """The dispatch keys at which an override of the operator can be registered."""
    if function.has_composite_implicit_autograd_kernel:
        return ("CompositeImplicitAutograd", "AutocastCUDA")
    return BACKENDS


def load(path: Path = SOURCE, torch: Definitions | None = None) -> Model:
    """Parses the file.

    Raises CodegenError, with file, entry and what would be valid, for an unknown field, operator,
    dispatch key, build or condition, and where a schema is not that of ``torch``, by default the
    installed PyTorch.
    """
    return _Loader(path, torch or installed_torch()).load()


class _Loader:
    def __init__(self, path: Path, torch: Definitions) -> None:
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
        self.fields(
            document,
            "top level",
            {"conditions": dict, "operators": list},
            optional={"upstream": dict},
        )
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
        upstream = self.upstream(document["upstream"]) if "upstream" in document else None
        return Model(conditions, tuple(overrides), upstream)

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
                f"{self.torch.name} has another schema\n"
                f"  here:  {schema}\n"
                f"  there: {function.func}",
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

    def upstream(self, entry: Any) -> Upstream:
        self.fields(
            entry, "upstream", {"guard": str, "rewrite": dict, "bases": dict, "commits": list}
        )
        bases = {
            str(name): tuple(
                self.sign(sign, f"upstream, base {name}, sign {number}")
                for number, sign in enumerate(signs, 1)
            )
            for name, signs in entry["bases"].items()
        }
        commits = tuple(
            self.commit(commit, f"upstream, commit {number}", tuple(bases))
            for number, commit in enumerate(entry["commits"], 1)
        )
        return Upstream(entry["guard"], entry["rewrite"], bases, commits)

    def sign(self, entry: Any, where: str) -> Sign:
        self.fields(entry, where, {"file": str}, optional={"contains": str, "lacks": str})
        if ("contains" in entry) == ("lacks" in entry):
            self.fail(where, "needs either 'contains' or 'lacks'")
        text = entry.get("contains") or entry.get("lacks")
        return Sign(entry["file"], text, "contains" in entry)

    def commit(self, entry: Any, where: str, bases: tuple[str, ...]) -> Commit:
        self.fields(
            entry,
            where,
            {"title": str, "body": str},
            optional={"bases": list, "add": list, "edit": list},
        )
        for base in entry.get("bases", ()):
            if base not in bases:
                self.unknown(where, "base", str(base), bases)
        return Commit(
            entry["title"],
            entry["body"],
            tuple(entry.get("bases", bases)),
            tuple(
                self.addition(addition, f"{where}, addition {number}")
                for number, addition in enumerate(entry.get("add", ()), 1)
            ),
            self.edits(entry.get("edit", ()), where, {"file": str}),
        )

    def addition(self, entry: Any, where: str) -> Addition:
        self.fields(entry, where, {"path": str, "from": str}, optional={"edit": list})
        edits = self.edits(entry.get("edit", ()), where, {})
        return Addition(entry["path"], entry["from"], edits)

    def edits(
        self, entries: Iterable[Any], where: str, required: dict[str, type]
    ) -> tuple[Edit, ...]:
        return tuple(
            self.edit(entry, f"{where}, edit {number}", required)
            for number, entry in enumerate(entries, 1)
        )

    def edit(self, entry: Any, where: str, required: dict[str, type]) -> Edit:
        ends = () if "file" in required else ("until",)
        self.fields(
            entry,
            where,
            required | {"anchor": str, "why": str},
            optional=dict.fromkeys((*ends, "text", "from", "after", "before"), str),
        )
        if not entry["anchor"]:
            self.fail(where, "the anchor is empty")
        if "from" in entry:
            self.fields(
                entry,
                where,
                required | dict.fromkeys(("anchor", "why", "from", "after", "before"), str),
            )
            text: str | Excerpt = Excerpt(entry["from"], entry["after"], entry["before"])
        elif "text" in entry:
            text = entry["text"]
        else:
            self.fail(where, "needs either 'text' or 'from'")
        return Edit(
            entry.get("file", ""), entry["anchor"], entry.get("until", ""), text, entry["why"]
        )

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

    def unknown(self, where: str, what: str, name: str, valid: Iterable[str]) -> NoReturn:
        """Raises the error for a name that is none of the valid ones: all of these where they are
        few, else the nearest."""
        valid = list(valid)
        near = difflib.get_close_matches(name, valid, n=3)
        if len(valid) <= 8:
            hint = f"valid: {', '.join(valid)}"
        else:
            hint = f"nearest: {', '.join(near)}" if near else "nothing is near to it"
        self.fail(where, f"unknown {what} '{name}'\n  {hint}")

    def fail(self, where: str, problem: str) -> NoReturn:
        raise CodegenError(f"{self.path.name}: {where}: {problem}")
