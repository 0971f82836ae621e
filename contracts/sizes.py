"""Symbolic sizes: integer expressions such as `(rows * columns + 63) // 64` and conditions such as `hidden % 2 == 0`."""

import ast
import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from blackswan.contracts.model import Range, Signature
from blackswan.contracts.problems import unknown

Sizes = Mapping[str, int]

_BINARY: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.AST], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NODES = (ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.Name, ast.Load, ast.And, ast.Or, ast.Not, ast.USub, *_BINARY, *_COMPARE)
_ALLOWED = "+ - * // %, comparisons, and, or, not, integers and size names"
_LONGEST = 300
"""Characters of an expression: its evaluation recurses by its terms."""
_EXHAUSTIVE = 20_000
_SAMPLED = 4_000


class SizeError(ValueError):
    """A size expression that cannot be read or evaluated."""


@lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    if len(expression) > _LONGEST:
        raise SizeError(f"{expression[:40]!r}… is an expression of {len(expression):,} characters; expected at most {_LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SizeError(f"{expression!r} is not an expression; expected {_ALLOWED}") from error
    for node in ast.walk(tree):
        integer = isinstance(node, ast.Constant) and type(node.value) is int
        if not (integer or isinstance(node, _NODES)):
            raise SizeError(f"{expression!r} uses what a size expression cannot ({type(node).__name__}); expected {_ALLOWED}")
    return tree


def names(expression: str) -> set[str]:
    """The size names in an expression. SizeError where it cannot be read."""
    return {node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)}


def evaluate(expression: str, sizes: Sizes) -> int | bool:
    """The value of an expression. SizeError shows expression, names and values."""
    tree = _parse(expression)
    missing = sorted(names(expression) - set(sizes))
    if missing:
        raise SizeError(f"in {expression!r}: {unknown('size', missing[0], sizes)}")
    try:
        return _value(tree, sizes)
    except ZeroDivisionError as error:
        raise SizeError(f"{expression!r} divides by zero{_given(expression, sizes)}") from error


def _given(expression: str, sizes: Sizes) -> str:
    values = ", ".join(f"{name} = {sizes[name]}" for name in sorted(names(expression)))
    return f" with {values}" if values else ""


def _value(node: ast.expr, sizes: Sizes) -> int | bool:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, sizes)
        case ast.UnaryOp(operand=operand):
            return -_value(operand, sizes)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(value, sizes) for value in values)
        case ast.BoolOp(values=values):
            return any(_value(value, sizes) for value in values)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_value(term, sizes) for term in (left, *comparators)]
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, terms, terms[1:], strict=False))
    raise AssertionError(f"unparsed node {node!r}")


def is_condition(expression: str) -> bool:
    """Whether the expression is true or false rather than a number."""
    tree = _parse(expression)
    return isinstance(tree, ast.Compare | ast.BoolOp) or (isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not))


def holds(conditions: Sequence[str], sizes: Sizes) -> bool:
    """Whether every condition is met."""
    return all(evaluate(condition, sizes) for condition in conditions)


def resolve(signature: Signature, sizes: Sizes) -> dict[str, int]:
    """All sizes of an operation: the given ones and those derived from them. SizeError on unknown, missing or negative sizes."""
    for name in sizes:
        if name not in signature.sizes:
            raise SizeError(f"{signature.name}: {unknown('size', name, signature.sizes)}")
    missing = [name for name in signature.sizes if name not in sizes]
    if missing:
        raise SizeError(f"{signature.name}: missing size {missing[0]!r}; expected {', '.join(signature.sizes)}")
    resolved = dict(sizes)
    for name, expression in signature.derived.items():
        resolved[name] = int(evaluate(expression, resolved))
        if resolved[name] < 0:
            raise SizeError(
                f"{signature.name}: {name} = {expression} is {resolved[name]}{_given(expression, resolved)}; expected 0 or more"
            )
    return resolved


def shape(spec: Sequence[str | int], sizes: Sizes) -> tuple[int, ...]:
    """A symbolic shape as numbers."""
    return tuple(int(evaluate(str(dimension), sizes)) for dimension in spec)


def candidates(choice: "Range | tuple[Any, ...]") -> Sequence[int]:
    """The integers that a range or a choice list allows."""
    return range(int(choice.min), int(choice.max) + 1) if isinstance(choice, Range) else [int(value) for value in choice]


def combinations(domain: "Mapping[str, Range | tuple[Any, ...]]") -> tuple[Iterator[dict[str, int]], bool]:
    """Size combinations of a domain, and whether they are all of them; else the corners and a fixed sample."""
    values = {name: candidates(choice) for name, choice in domain.items()}
    total = 1
    for allowed in values.values():
        total *= len(allowed)
    if total <= _EXHAUSTIVE:
        return (dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())), True
    return _sample(values), False


def _sample(values: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    corners = itertools.product(*({allowed[0], allowed[-1]} for allowed in values.values()))
    yield from (dict(zip(values, corner, strict=True)) for corner in itertools.islice(corners, _SAMPLED))
    draw = random.Random(0)  # noqa: S311  # a reproducible sample, not a secret
    for _ in range(_SAMPLED):
        yield {name: draw.choice(allowed) for name, allowed in values.items()}
