"""A module's forward, or a method it calls, read from its source and written again with runs of
steps joined.

A step is a call, on one tensor, of a submodule, of a known activation or of F.group_norm, or the
addition of a variable to the tensor. A run is a row of steps, each on what the one before returned,
with nothing else that reads it:

    h = self.norm(x)                          h = run(x, self.norm, self.act)
    h = self.act(h)

    return F.relu(self.norm(x))               return run(x, self.norm, ActivationCall(F.relu))

    if up:                                    if up:
        h = self.norm(x)                          h = run(x, self.norm, self.act)
    else:                                     else:
        h = self.other(x)                         h = self.act(self.other(x))
    h = self.act(h)

The source has every path that forward can take, so what is joined is right for all inputs and
attributes; a recording of one path would not be.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gn_override import _activations
from gn_override._source import (
    Unreadable,
    definition_of,
    is_from,
    names_bound_in,
    path_of,
    symbols,
    target_of,
)

# A part of a run: number of the run in the source, first and last step.
Part = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class GroupNormCall:
    """A call of F.group_norm as a step; the names are those of nn.GroupNorm."""

    function: Any  # what stands in the source: F.group_norm, unless it was replaced since
    num_groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    def __call__(self, input: Tensor) -> Any:
        return self.function(input, self.num_groups, self.weight, self.bias, self.eps)


class ActivationCall:
    """A call of a function, or of a method of Tensor by its name, as a step."""

    def __init__(self, function: Any, /, *args: Any, **kwargs: Any) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __call__(self, input: Tensor) -> Any:
        if isinstance(self.function, str):
            return getattr(input, self.function)(*self.args, **self.kwargs)
        return self.function(input, *self.args, **self.kwargs)

    def activation(self) -> str | None:
        """The name of what it computes, if that is an activation."""
        return _activations.of_call(self.function, *self.args, **self.kwargs)


@dataclass(frozen=True, eq=False)
class Addition:
    """``input + addend`` as a step."""

    addend: Any = None

    def __call__(self, input: Any) -> Any:
        return input + self.addend


@dataclass(frozen=True)
class Step:
    """One step: of a submodule, of an activation's function, of F.group_norm, or an addition."""

    source: str  # what is called, as it is written: "self.norm1", "F.relu"; "+" for an addition
    path: str = ""  # of the submodule, from the module that has the forward: "norm1"
    call: ActivationCall | None = None  # of the activation


@dataclass(frozen=True)
class Run:
    """The steps of a run, and the branches of `if` that it is in: (test, whether it holds)."""

    steps: tuple[Step, ...]
    branches: tuple[tuple[ast.expr, bool], ...]

    def is_left_out(self, module: object) -> bool:
        """Whether attributes of the module that has this forward decide against a branch."""
        return any(_decides(test, module) is (not holds) for test, holds in self.branches)


@functools.lru_cache(maxsize=256)  # classes that are made in a loop are let go
def read(function: Any) -> Forward:
    """The source of a forward. Raises Unreadable."""
    return Forward(function)


class Forward:
    """The source of a forward, its runs, and the attributes of the module that it names."""

    def __init__(self, function: Any) -> None:
        if not isinstance(function, FunctionType):
            raise Unreadable("is no Python function")
        # Of the code that runs: a function may say that it wraps another.
        file, definition = definition_of(function.__code__)
        if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
            raise Unreadable("is decorated, or no plain function")
        if set(function.__code__.co_freevars) - {"__class__"}:
            raise Unreadable("is a closure")
        if _SEES_VARIABLES & set(function.__code__.co_names):
            raise Unreadable("asks for its variables by name")
        if any(isinstance(node, ast.ClassDef) for node in ast.walk(definition)):
            raise Unreadable("defines a class")  # whose names, and rules for names, are others
        _drop_defaults(definition)
        definition = _Unannotated().visit(definition)
        self._function = function
        made = self._make(definition, run=None).__code__
        if not is_from(function.__code__, file) or symbols(made) != symbols(function.__code__):
            raise Unreadable("is not what its source says")
        steps = _Steps(function)
        paths = [path_of(node) for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
        self.attributes = [path[1] for path in paths if path and path[0] == steps.self]
        _Joiner(steps).definition(definition)
        self._definition = definition
        writer = _Writer(steps, ())
        writer.visit(copy.deepcopy(definition))
        self.runs = writer.runs

    def joined(self, parts: Collection[Part], run: Callable[..., Tensor]) -> FunctionType:
        """The forward with these parts of its runs as calls of run(x, *steps).

        The steps are callables: submodules, GroupNormCall, ActivationCall, Addition.
        """
        definition = copy.deepcopy(self._definition)
        _Writer(_Steps(self._function), parts).visit(definition)
        made = self._make(definition, run)
        made.__defaults__ = self._function.__defaults__
        made.__kwdefaults__ = self._function.__kwdefaults__
        functools.update_wrapper(made, self._function)
        return made

    def _make(self, definition: ast.FunctionDef, run: Callable[..., Tensor] | None) -> FunctionType:
        """A function with this definition; its globals, and its class, are the forward's."""
        names = {
            _RUN: run,
            _GROUP_NORM: GroupNormCall,
            _ACTIVATION: ActivationCall,
            _ADDITION: Addition,
        }
        if self._function.__closure__:
            names["__class__"] = self._function.__closure__[0].cell_contents
        maker = ast.parse(f"def maker({', '.join(names)}): return {definition.name}").body[0]
        assert isinstance(maker, ast.FunctionDef)
        maker.body.insert(0, definition)
        module = ast.fix_missing_locations(ast.Module([maker], type_ignores=[]))
        namespace: dict[str, Any] = {}
        code = compile(module, self._function.__code__.co_filename, "exec", dont_inherit=True)
        exec(code, self._function.__globals__, namespace)
        made: FunctionType = namespace["maker"](**names)
        return made


_RUN = "__gn_override_run"
_GROUP_NORM = "__gn_override_group_norm"
_ACTIVATION = "__gn_override_activation"
_ADDITION = "__gn_override_addition"
_GROUP_NORM_FIELDS = tuple(field.name for field in fields(GroupNormCall))[1:]

# With these a function may use a variable that its source does not read.
_SEES_VARIABLES = {"eval", "exec", "locals", "vars"}

# A statement that a run can end in.
_Ending = ast.Assign | ast.Return

# The expression of a step.
_Call = ast.Call | ast.BinOp


class _Assigned(ast.NamedExpr):
    """An operand that a statement of its own assigns to a variable, ahead of the step on it.

    So a run has the steps of several statements. Those that are not joined become statements again:
    a step may change what the one after it is.
    """


def _drop_defaults(definition: ast.FunctionDef) -> None:
    """Defaults and annotations are values of the function; their expressions must not run again."""
    arguments = definition.args
    arguments.defaults = []
    arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.returns = None


class _Unannotated(ast.NodeTransformer):
    """`h: Tensor = self.norm(x)` as `h = self.norm(x)`: functions do not evaluate annotations."""

    def visit_AnnAssign(self, statement: ast.AnnAssign) -> ast.stmt:
        if statement.value is None:
            return statement  # makes the name a variable of the function
        assign = ast.Assign([statement.target], statement.value)
        return ast.copy_location(assign, statement)


class _Steps:
    """Finds steps in expressions of a forward."""

    def __init__(self, function: FunctionType) -> None:
        code = function.__code__
        self.self = code.co_varnames[0] if code.co_argcount else ""
        self.locals = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self.shared = {*code.co_cellvars, *code.co_freevars}  # with functions inside
        self.bound = {*self.locals, *names_bound_in(code)}  # there or in functions inside
        self.globals = function.__globals__

    def step(self, call: ast.expr) -> Step | None:
        """What an expression calls as a step, on _operand(call)."""
        if isinstance(call, ast.BinOp):
            added = isinstance(call.op, ast.Add) and path_of(call.right)
            return Step("+") if added else None
        if not isinstance(call, ast.Call):
            return None
        function, path = call.func, path_of(call.func)
        if isinstance(function, ast.Attribute) and not call.args and not call.keywords:
            method = ActivationCall(function.attr)
            return Step(f".{function.attr}", call=method) if method.activation() else None
        extra = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
        if not path or not call.args or isinstance(call.args[0], ast.Starred):
            return None
        source = ".".join(path)
        if path[0] == self.self:
            return None if extra or not path[1:] else Step(source, path=".".join(path[1:]))
        if path[0] in self.bound:
            return None
        called = self.globals.get(path[0], getattr(builtins, path[0], None))
        for name in path[1:]:
            try:
                called = getattr(called, name, None)
            except Exception:  # whatever a lazy module raises
                return None
        if called is F.group_norm:
            keywords = {keyword.arg for keyword in call.keywords}
            plain = all(path_of(value) or isinstance(value, ast.Constant) for value in extra)
            fit = len(extra) <= len(_GROUP_NORM_FIELDS) and keywords <= {*_GROUP_NORM_FIELDS}
            return Step(source) if plain and fit else None
        try:
            args = [ast.literal_eval(value) for value in call.args[1:]]
            kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        except ValueError:
            return None
        activation = ActivationCall(called, *args, **kwargs)
        return Step(source, call=activation) if activation.activation() else None

    def run(self, expression: ast.expr) -> tuple[ast.expr, list[tuple[Step, _Call]]]:
        """What a run starts from, and its steps and their calls, innermost first."""
        steps: list[tuple[Step, _Call]] = []
        while (step := self.step(expression)) is not None:
            assert isinstance(expression, _Call)
            steps.insert(0, (step, expression))
            expression = _operand(expression)
            if isinstance(expression, _Assigned):
                expression = expression.value
        return expression, steps

    def continues(self, statement: ast.stmt) -> str:
        """The variable that a statement does steps on and nothing else; "" if there is none."""
        if not isinstance(statement, _Ending) or statement.value is None:
            return ""
        start, steps = self.run(statement.value)
        fits = steps and (isinstance(statement, ast.Return) or target_of(statement))
        return start.id if fits and isinstance(start, ast.Name) else ""

    def result(self, statement: ast.stmt) -> str:
        """The local variable that a statement assigns from a step; "" if it does not."""
        target = target_of(statement)
        if target in self.shared or target not in self.locals:
            return ""
        assert isinstance(statement, ast.Assign)
        return target if self.step(statement.value) else ""


def _operand(call: _Call) -> ast.expr:
    """The tensor that a step works on."""
    if isinstance(call, ast.BinOp):
        return call.left
    if call.args:
        return call.args[0]
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def _set_operand(call: _Call, operand: ast.expr) -> None:
    if isinstance(call, ast.BinOp):
        call.left = operand
    elif call.args:
        call.args[0] = operand
    else:
        assert isinstance(call.func, ast.Attribute)
        call.func.value = operand


class _Joiner:
    """Writes the statements of a run as one, where nothing else can see its inner values."""

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps

    def definition(self, definition: ast.FunctionDef) -> None:
        self._sink(definition.body)
        self._join(definition.body, definition)

    def _sink(self, body: list[ast.stmt]) -> None:
        """Steps that follow an `if` on what its branches assign go into each of its branches."""
        position = 0
        while position < len(body):
            statement = body[position]
            position += 1
            if isinstance(statement, ast.If):
                for name in sorted(self._branch_results(statement)):
                    while position < len(body) and self.steps.continues(body[position]) == name:
                        follower = body.pop(position)
                        statement.body.append(follower)
                        statement.orelse.append(copy.deepcopy(follower))
            for block in _blocks(statement):
                self._sink(block)

    def _branch_results(self, statement: ast.If) -> set[str]:
        """What branches assign from a step last."""
        results = set()
        for block in (statement.body, statement.orelse):
            if block and isinstance(block[-1], ast.If):
                results |= self._branch_results(block[-1])
            elif block and (name := self.steps.result(block[-1])):
                results.add(name)
        return results

    def _join(self, body: list[ast.stmt], definition: ast.FunctionDef) -> None:
        position = 0
        while position < len(body):
            statement = body[position]
            for block in _blocks(statement):
                self._join(block, definition)
            following = body[position + 1] if position + 1 < len(body) else None
            name = self.steps.result(statement)
            if (
                following
                and name
                and self.steps.continues(following) == name
                and _reads(following, name) == 1  # by the step alone
                and (
                    isinstance(following, ast.Return)
                    or target_of(following) == name
                    or _reads(definition, name) == 1
                )
            ):
                assert isinstance(statement, ast.Assign) and isinstance(following, _Ending)
                assert following.value is not None
                _, steps = self.steps.run(following.value)
                variable = ast.Name(name, ast.Store())
                assigned = _Assigned(target=variable, value=statement.value)
                _set_operand(steps[0][1], ast.copy_location(assigned, statement))
                del body[position]
            else:
                position += 1


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a statement; none of a `try`, where a handler can see what a run leaves."""
    if isinstance(statement, (ast.If, ast.For, ast.While)):
        return [statement.body, statement.orelse]
    return [statement.body] if isinstance(statement, ast.With) else []


def _reads(statement: ast.stmt, name: str) -> int:
    """How often a variable is read, deleted or changed in place anywhere in a statement."""
    changed = [node.target for node in ast.walk(statement) if isinstance(node, ast.AugAssign)]
    return sum(
        isinstance(node, ast.Name)
        and node.id == name
        and (node in changed or not isinstance(node.ctx, ast.Store))
        for node in ast.walk(statement)
    )


def _decides(test: ast.expr, module: object) -> bool | None:
    """Whether a test holds, where only attributes of a module decide; None where it is open."""
    allowed = ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant | ast.Name | ast.Attribute
    operators = ast.expr_context | ast.cmpop | ast.boolop | ast.unaryop
    for node in ast.walk(test):
        if not isinstance(node, allowed | operators):
            return None
        # A module may go from training to evaluation at any time.
        if isinstance(node, ast.Attribute) and node.attr == "training":
            return None
    code = compile(ast.Expression(test), "<test>", "eval")
    try:
        return bool(eval(code, {"__builtins__": {}, "self": module}))
    except Exception:  # names other than self, or what an attribute raises
        return None


class _Writer(ast.NodeTransformer):
    """Writes parts of runs as calls; `runs` are all that it met."""

    def __init__(self, steps: _Steps, parts: Collection[Part]) -> None:
        self.steps = steps
        self.parts = {(number, first): last for number, first, last in parts}
        self.runs: list[Run] = []
        self.branches: list[tuple[ast.expr, bool]] = []
        self.before: list[ast.stmt] = []  # the statement that is being written

    def visit_If(self, node: ast.If) -> ast.If:
        node.test = self.visit(node.test)
        for block, holds in ((node.body, True), (node.orelse, False)):
            self.branches.append((node.test, holds))
            self.generic_visit(ast.Module(block, type_ignores=[]))
            self.branches.pop()
        return node

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        return self._ending(node)

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return self._ending(node)

    def _ending(self, node: _Ending) -> list[ast.stmt]:
        self.before = []
        self.generic_visit(node)
        return [*self.before, node]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        return self._run(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self._run(node)

    def _run(self, node: _Call) -> ast.expr:
        start, steps = self.steps.run(node)
        if not steps:
            self.generic_visit(node)
            return node
        number = len(self.runs)
        self.runs.append(Run(tuple(step for step, _ in steps), tuple(self.branches)))
        value: ast.expr = self.visit(start)
        position = 0
        while position < len(steps):
            operand = _operand(steps[position][1])
            if isinstance(operand, _Assigned):
                self.before.append(ast.copy_location(ast.Assign([operand.target], value), operand))
                value = ast.Name(operand.target.id, ast.Load())
            last = self.parts.get((number, position), -1)
            if position < last < len(steps):
                callables = [_callable(step, call) for step, call in steps[position : last + 1]]
                joined = ast.Call(ast.Name(_RUN, ast.Load()), [value, *callables], [])
                value = ast.copy_location(joined, steps[position][1])
                position = last + 1
            else:
                _set_operand(steps[position][1], value)
                value = steps[position][1]
                position += 1
        return value


def _callable(step: Step, call: _Call) -> ast.expr:
    """A step as an argument of run()."""
    if isinstance(call, ast.BinOp):
        return ast.Call(ast.Name(_ADDITION, ast.Load()), [call.right], [])
    if step.path:
        return call.func
    made, function, arguments = _GROUP_NORM, call.func, call.args[1:]
    if step.call:
        made = _ACTIVATION
        if isinstance(step.call.function, str):
            function = ast.Constant(step.call.function)
    return ast.Call(ast.Name(made, ast.Load()), [function, *arguments], call.keywords)
