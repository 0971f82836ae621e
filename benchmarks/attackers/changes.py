"""Changes of one place in a function of `impl`, made from its syntax, or of the whole (see `wrapped`)."""

import ast
import copy
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.attackers import kept, shared, wrapped
from benchmarks.attackers.wrapped import Edit
from blackswan.falsifiers.diagnosis.tracing import IMPL
from blackswan.falsifiers.subjects.patching import planting

LEFT_OUT = ("kernels", "progress")
"""Parts of `impl` that are not changed: Triton compiles them from their source, or they only show how far a run is."""
SAID = ("print", "warn", "add_argument", "tell", "_say")
"""Functions whose arguments are messages and descriptions of options."""
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot), (ast.And, ast.Or)]
CONVERTING = ("abs", "float", "int", "reversed", "set", "sorted", "str")
"""Functions that are left out, so that their argument stands alone."""
OTHER: dict[type, type] = {one: other for pair in [*PAIRS, (ast.Add, ast.Sub), (ast.Mult, ast.Div)] for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Change:
    """The `number`-th change of a function, `module:function#number`; its place, `file:line`; and what is done there."""

    name: str
    line: str
    what: str


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, ast.copy_location(new, old)

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _set(**fields: Any) -> Edit:
    def edit(node: ast.AST) -> ast.AST:
        vars(node).update(fields)
        return node

    return edit


def _edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    """Names the changes of a node, each with a function from a copy of the node to what stands in its place."""
    match node:
        case ast.FunctionDef():
            yield from wrapped.edits(node)
        case ast.Compare(ops=[operator]) if type(operator) in OTHER:
            yield "another comparison", _set(ops=[OTHER[type(operator)]()])
        case ast.BoolOp(op=operator, values=values):
            yield "and for or, or for and", _set(op=OTHER[type(operator)]())
            for place in range(len(values)):
                rest = values[:place] + values[place + 1 :]
                yield f"operand {place} left out", (lambda _, rest=rest: rest[0]) if len(rest) == 1 else _set(values=rest)  # type: ignore[misc]
        case ast.BinOp(op=operator, left=left) if type(operator) in OTHER and not isinstance(left, ast.Constant | ast.JoinedStr):
            yield "another operator", _set(op=OTHER[type(operator)]())
        case ast.Constant(value=bool(value)):
            yield "truth value", _set(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant plus 1", _set(value=value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement left out", lambda _: ast.Pass()
        case ast.If() | ast.IfExp():
            for value in (True, False):
                yield f"condition always {value}", _set(test=ast.copy_location(ast.Constant(value), node.test))
        case ast.UnaryOp(op=ast.Not()):
            yield "not left out", lambda node: node.operand
        case ast.Call():
            yield from _edits_of_call(node)
        case ast.Slice(lower=lower, upper=upper):
            yield from ((f"{name} bound left out", _set(**{name: None})) for name, bound in (("lower", lower), ("upper", upper)) if bound)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for place, part in enumerate(node.generators):
                bare = ast.comprehension(part.target, part.iter, [], part.is_async)
                if part.ifs:
                    yield "filter left out", _set(generators=[*node.generators[:place], bare, *node.generators[place + 1 :]])
        case ast.Dict(keys=keys, values=values):
            for place, key in enumerate(keys):
                if isinstance(key, ast.Constant):
                    yield (
                        f"key {key.value!r} left out",
                        _set(keys=keys[:place] + keys[place + 1 :], values=values[:place] + values[place + 1 :]),
                    )
        case ast.With(items=[ast.withitem(optional_vars=None)], body=body):
            yield "without its context", lambda _: ast.If(ast.copy_location(ast.Constant(True), node), body, [])
        case ast.ExceptHandler(type=ast.Tuple(elts=elts) as caught):
            for place, one in enumerate(elts):
                fewer = ast.Tuple(elts[:place] + elts[place + 1 :], ast.Load())
                yield f"{ast.unparse(one)} not caught", _set(type=ast.copy_location(fewer, caught))


def _edits_of_call(node: ast.Call) -> Iterator[tuple[str, Edit]]:
    """An argument left out, or the call, so that what it is made of stands alone."""
    func, args, keywords = node.func, node.args, node.keywords
    for place, keyword in enumerate(keywords):
        if keyword.arg is not None:
            yield f"argument {keyword.arg} left out", _set(keywords=keywords[:place] + keywords[place + 1 :])
    if len(args) > 1 and not any(isinstance(one, ast.Starred) for one in args):
        yield "last argument left out", _set(args=args[:-1])
    if isinstance(func, ast.Attribute) and not args and not keywords:
        yield f"without .{func.attr}()", lambda _: func.value
    if isinstance(func, ast.Name) and func.id in CONVERTING and len(args) == 1:
        yield f"without {func.id}()", lambda _: args[0]


def _changes(function: ast.FunctionDef) -> Iterator[tuple[int, int, str, Edit]]:
    """The place of the node among those of the function, its line, and what is done there, in words and as a function.

    Nothing is done to decorators, annotations, defaults, `super`, and what is said to people.
    """
    out: list[ast.AST | None] = [*function.decorator_list, function.returns, function.args]
    for node in ast.walk(function):
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise | ast.JoinedStr) or name in SAID or (isinstance(node, ast.Expr) and "super()" in ast.unparse(node)):
            out.append(node)
    kept = {id(inner) for node in out if node is not None for inner in ast.walk(node)}
    for place, node in enumerate(ast.walk(function)):
        if id(node) in kept or not isinstance(node, ast.expr | ast.stmt | ast.excepthandler):
            continue
        line = function.body[-1].lineno if node is function else node.lineno  # of a function the claims that come to its end
        for what, edit in _edits(node) if node is function or not isinstance(node, ast.FunctionDef) else ():
            said = f"def {function.name}" if node is function else ast.unparse(node).splitlines()[0][:100]
            yield place, line, f"{what}: {said}", edit


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of the module, and methods of its classes; of a property what reads it."""
    classes = [("", tree), *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef))]
    found = [(f"{prefix}{node.name}", node) for prefix, owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)]
    return dict(reversed(found))


def every() -> Iterator[Change]:
    """All changes of `impl`, file by file."""
    for path in sorted(IMPL.rglob("*.py")):
        file = path.relative_to(IMPL)
        if file.with_suffix("").parts[0] not in LEFT_OUT:
            module = ".".join(("blackswan.impl", *file.with_suffix("").parts)).removesuffix(".__init__")
            for name, function in sorted(_functions(ast.parse(path.read_text(encoding="utf-8"))).items()):
                for number, (_, line, what, _) in enumerate(_changes(function)):
                    yield Change(f"{module}:{name}#{number}", f"{file}:{line}", what)


@contextmanager
def applied(name: str) -> Iterator[None]:
    """The change of that name inside the block, also in processes that are started there."""
    with planting(f"{__name__}:{name}"):
        module, qualified, number = name.replace("#", ":").split(":")
        function, code = _function(module, qualified), _code(module, qualified, int(number))
        before, function.__code__ = function.__code__, code
        for memory in (kept, shared):
            memory.forget()
        try:
            yield
        finally:
            function.__code__ = before
            for memory in (kept, shared):
                memory.forget()


def _code(module: str, qualified: str, number: int) -> types.CodeType:
    """The code of the changed function, compiled with its module."""
    path = str(import_module(module).__file__)
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    function = _functions(tree)[qualified]
    place, _, _, edit = list(_changes(function))[number]
    old = list(ast.walk(function))[place]
    code = compile(ast.fix_missing_locations(_Swap(old, edit(copy.copy(old))).visit(tree)), path, "exec", dont_inherit=True)
    for part in qualified.split("."):
        code = next(inner for inner in code.co_consts if isinstance(inner, types.CodeType) and inner.co_name == part)
    return code


def _function(module: str, qualified: str) -> Any:
    """The function under its decorators; what it has remembered of earlier calls is forgotten."""
    found: Any = import_module(module)
    for name in qualified.split("."):
        found = vars(found)[name]
    if hasattr(found, "cache_clear"):
        found.cache_clear()
    inner = (getattr(found, name, None) for name in ("__func__", "fget", "func"))
    return inspect.unwrap(next(filter(None, inner), found))
