"""The source of a Python function: what defines it, whether that is what runs, what it names, and
what it does with a class."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

# `from __future__ import annotations`, which a notebook may have in an earlier cell.
_ANNOTATIONS = __future__.annotations.compiler_flag

# Attributes of a class that none inherits, or that lead to its bases.
_OF_CLASS_ALONE = {"__base__", "__bases__", "__dict__", "__mro__", "__subclasses__", "mro"}


class Unreadable(Exception):
    """Why a function cannot be written again."""


def definition_of(code: CodeType) -> tuple[str, ast.stmt]:
    """The source of the file that code is from, and what defines that code. Raises Unreadable."""
    try:
        lines, position = inspect.findsource(code)
        block = inspect.getblock(lines[position:])
        # A method is indented; to dedent it would change its docstring.
        head = "if True:\n" if block[0][0].isspace() else "\n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import has said them
            tree = ast.parse(head + "".join(block))
    except (OSError, TypeError, SyntaxError):
        raise Unreadable("has no source that can be read") from None
    ast.increment_lineno(tree, position - 1)
    first = tree.body[0]
    return "".join(lines), first.body[0] if isinstance(first, ast.If) else first


def is_from(code: CodeType, file: str) -> bool:
    """Whether this is what the source of a file compiles to: it may be edited after the import."""
    flags = code.co_flags & _ANNOTATIONS
    return code in _compiled(file, flags, notebook=not os.path.exists(code.co_filename))


@functools.lru_cache(maxsize=16)
def _compiled(file: str, flags: int, notebook: bool) -> frozenset[CodeType]:
    """All code in the source of a file; notebooks compile each statement alone, which differs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = functools.partial(
            compile, filename="<file>", mode="exec", flags=flags, dont_inherit=True
        )
        try:
            codes = [make(file)]
            if notebook:
                statements = ast.parse(file).body
                codes += [make(ast.Module([each], type_ignores=[])) for each in statements]
        except (SyntaxError, ValueError):
            codes = []
    return frozenset(inner for code in codes for inner in _code_in(code))


def _code_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions, classes and comprehensions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code_in(value)


def symbols(code: CodeType) -> tuple[Any, ...]:
    """What code names and holds, and the code in it; its instructions depend on the module around
    it. A class around it changes private names."""
    inner = [value for value in code.co_consts if isinstance(value, CodeType)]
    # Python 3.10 holds the qualified names of these, which depend on it as well.
    names = tuple(f".<locals>.{value.co_name}" for value in inner)
    constants = [
        (type(value), symbols(value) if isinstance(value, CodeType) else value)
        for value in code.co_consts
        if not (isinstance(value, str) and value.endswith(names))
    ]
    return code.co_names, code.co_varnames, constants


def names(code: CodeType) -> set[str]:
    """The global variables and attributes that code and what is in it names."""
    return {name for inner in _code_in(code) for name in inner.co_names}


def names_bound_in(code: CodeType) -> set[str]:
    """The variables of the functions and comprehensions inside a function."""
    _, *inside = _code_in(code)
    return {name for inner in inside for name in (*inner.co_varnames, *inner.co_cellvars)}


def path_of(expression: ast.expr) -> list[str]:
    """["self", "block", "norm"] of `self.block.norm`; empty for anything else."""
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute) and (path := path_of(expression.value)):
        return [*path, expression.attr]
    return []


def target_of(statement: ast.stmt) -> str:
    """The one variable that a statement assigns; "" if it does anything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def depends_on_class(function: FunctionType, is_class_method: bool = False) -> bool:
    """Whether a method may do something else in a subclass.

    Nothing may store to the class of an object, or pass it to super(), which would find the method
    itself again. What the method does with its own object's class has to be among what a subclass
    that adds a forward answers like its base: attributes and calls of it, texts. That leaves out
    comparisons, keys of tables, isinstance() and other functions. A class method, whose class is
    often passed on, may do these.
    """
    named = names(function.__code__)
    if not is_class_method and not named & {"type", "__class__"}:
        return False
    try:
        _, definition = definition_of(function.__code__)
    except Unreadable:
        return "super" in named
    nodes = list(ast.walk(definition))
    first = function.__code__.co_varnames[0] if function.__code__.co_argcount else ""
    # Variables that hold the class of an object, and those that hold the class of this one.
    variables = {first} if is_class_method else set()
    own_variables: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_class(node.value) and (target := target_of(node)):
            variables.add(target)
            if _is_class(node.value, of=first):
                own_variables.add(target)

    for node in nodes:
        for child in ast.iter_child_nodes(node):
            variable = child.id if isinstance(child, ast.Name) else ""
            if (_is_class(child) or variable in variables) and _changes_class(node, child):
                return True
            if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
                continue
            if (
                not is_class_method
                and (_is_class(child, of=first) or variable in own_variables)
                and not _is_inherited(node, child)
            ):
                return True
    return False


def _changes_class(use: ast.AST, kind: ast.AST) -> bool:
    """Whether a use of an expression for a class stores to that class, or is super()'s."""
    if isinstance(use, ast.Attribute):
        return not isinstance(use.ctx, ast.Load)
    return _passes_first(use, kind, {"super", "setattr", "delattr"})


def _is_inherited(use: ast.AST, kind: ast.AST) -> bool:
    """Whether a use of an expression for a class has the same result for a subclass."""
    if isinstance(use, ast.Attribute):
        return use.attr not in _OF_CLASS_ALONE
    if isinstance(use, ast.Call) and use.func is kind:
        return True
    if isinstance(use, ast.Assign):
        return bool(target_of(use))
    return isinstance(use, (ast.FormattedValue, ast.Expr)) or _passes_first(
        use, kind, {"getattr", "hasattr", "issubclass", "print", "repr", "str"}
    )


def _is_class(expression: ast.AST, of: str | None = None) -> bool:
    """`self.__class__` or `type(self)`, of any object or of a variable."""
    if isinstance(expression, ast.Attribute) and expression.attr == "__class__":
        owner = expression.value
    elif (
        isinstance(expression, ast.Call)
        and path_of(expression.func) == ["type"]
        and len(expression.args) == 1
    ):
        owner = expression.args[0]
    else:
        return False
    return of is None or path_of(owner) == [of]


def _passes_first(use: ast.AST, value: ast.AST, functions: set[str]) -> bool:
    """Whether this is a call of one of these functions, with the value as its first argument."""
    return (
        isinstance(use, ast.Call)
        and isinstance(use.func, ast.Name)
        and use.func.id in functions
        and use.args[:1] == [value]
    )
