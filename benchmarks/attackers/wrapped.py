"""Changes of a whole function: it keeps what it gave, by some of its arguments, or shares memory with its caller."""

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

Edit = Callable[[Any], ast.AST]
MEMORY = ("Tensor", "ndarray", "Array", "list[", "dict[", "set[", "Gradients", "State")
"""Parts of annotations by which an argument or a result can be memory that is written to."""


def edits(function: ast.FunctionDef) -> Iterator[tuple[str, Edit]]:
    """Names the changes, each with a function from a copy of the function to what stands in its place.

    None of a function that yields, needs its class or makes an object.
    """
    own = function.args
    arguments = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, [own.vararg, own.kwarg])]
    named = [argument.arg for argument in arguments]
    parts = list(ast.walk(function))
    if function.name in ("__init__", "__post_init__") or any(
        isinstance(part, ast.Yield | ast.YieldFrom) or getattr(part, "id", "") in ("super", "__class__") for part in parts
    ):
        return
    for other in (None, *named):
        by = f"({''.join(f'{name}, ' for name in named if name != other)})"
        what = "kept by its arguments" if other is None else f"kept for every {other}"
        yield what, partial(_wrapped, named=named, how="kept.kept", last=by)
    if _memory(function.returns):
        yield "gives the same memory again", partial(_wrapped, named=named, how="shared.given_again", last=repr(function.name))
    for argument in arguments:
        if _memory(argument.annotation):
            yield f"writes over {argument.arg}", partial(_wrapped, named=named, how="shared.written_over", last=argument.arg)


def _memory(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(word in ast.unparse(annotation) for word in MEMORY)


def _wrapped(function: ast.FunctionDef, named: Sequence[str], how: str, last: str) -> ast.AST:
    """A function with the same arguments, which has its body called by a function of this package."""
    source = f"""
def {function.name}():
    def _whole({", ".join(named)}): pass
    from benchmarks.attackers import kept as _kept, shared as _shared
    return _{how}(_whole, ({"".join(f"{name}, " for name in named)}), {last})
"""
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.FunctionDef)
    inner = made.body[0]
    assert isinstance(inner, ast.FunctionDef)
    inner.body, made.args = function.body, function.args
    return made
