"""Symbolic sizes and the operations that use them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from blackswan.contracts import ContractError, Range, load_checks, load_mutants, load_operations
from blackswan.contracts.sizes import SizeError, combinations, evaluate, holds, resolve
from blackswan.contracts.vocabulary import load_factors

OPERATIONS = load_operations()


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * half_dim", 10), ("(rows * columns + 63) // 64", 2), ("rows % 4", 3), ("-rows + 8", 1), ("3", 3), ("rows - columns", -3)],
)
def test_values(expression: str, value: int) -> None:
    assert evaluate(expression, {"half_dim": 5, "rows": 7, "columns": 10}) == value


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 300))
def test_blocks_of_a_flattened_tensor_cover_it(rows: int, columns: int, block_size: int) -> None:
    sizes = resolve(OPERATIONS["nf4_quantize"], {"rows": rows, "columns": columns, "block_size": block_size})
    assert (sizes["blocks"] - 1) * block_size < max(rows * columns, 1) <= max(sizes["blocks"], 1) * block_size
    assert sizes["packed"] == -(-rows * columns // 2)


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("a < b", True),
        ("a < b < 3", False),
        ("a == 2 or b == 3", True),
        ("a == 2 and b == 3", False),
        ("not a == 2", True),
        ("b % a == 0", True),
    ],
)
def test_conditions(condition: str, value: bool) -> None:
    assert holds([condition], {"a": 1, "b": 3}) is value


@pytest.mark.parametrize(
    "expression",
    ["", "a +", "a.b", "f(a)", "a[0]", "1.5", "'x'", "a ** 9", "a / 2", "a << 2", "[a]", "lambda: 1", "a if a else b", "a\0",
     "(" * 500, "a; b", "+a", "a is b", "a in b", "~a", "True", "a := 1"],
)  # fmt: skip
def test_foreign_expressions_are_refused(expression: str) -> None:
    with pytest.raises(SizeError, match="expected"):
        evaluate(expression, {"a": 1, "b": 2})


def test_errors_show_expression_names_and_values() -> None:
    with pytest.raises(SizeError, match=r"in 'hiden \* 2': unknown size 'hiden'; expected one of hidden, rows; did you mean 'hidden'\?"):
        evaluate("hiden * 2", {"hidden": 4, "rows": 1})
    with pytest.raises(SizeError, match=r"'rows // block' divides by zero with block = 0, rows = 4"):
        evaluate("rows // block", {"block": 0, "rows": 4})
    with pytest.raises(SizeError, match="rope: missing size 'half_dim'; expected batch, seq, heads, half_dim"):
        resolve(OPERATIONS["rope"], {"batch": 1, "seq": 1, "heads": 1})
    with pytest.raises(SizeError, match="rope: unknown size 'head_dim'"):
        resolve(OPERATIONS["rope"], {"batch": 1, "seq": 1, "heads": 1, "half_dim": 1, "head_dim": 2})


def test_combinations_are_complete_where_they_are_few() -> None:
    drawn, complete = combinations({"a": Range(1, 3), "b": (4, 8)})
    assert complete
    assert sorted((c["a"], c["b"]) for c in drawn) == [(a, b) for a in (1, 2, 3) for b in (4, 8)]
    drawn, complete = combinations({"a": Range(1, 10**9), "b": Range(1, 10**9)})
    assert not complete
    assert {(1, 1), (1, 10**9), (10**9, 1), (10**9, 10**9)} <= {(c["a"], c["b"]) for c in drawn}


def write(folder: Path, content: Any, name: str = "operations.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def operation(**changes: Any) -> dict[str, Any]:
    plain = {
        "doc": "y = x.",
        "sizes": ["rows", "half"],
        "derived": {"width": "2 * half"},
        "inputs": {"x": {"shape": ["rows", "width"]}},
        "scalars": {"eps": {"type": "real"}},
        "outputs": {"y": {"shape": ["rows", "width"]}},
        "gradients": ["x"],
    }
    return {"operations": {"identity": {**plain, **changes}}}


def test_a_signature_is_read_completely(tmp_path: Path) -> None:
    signature = load_operations(write(tmp_path, operation()))["identity"]
    assert signature.inputs["x"].shape == ("rows", "width")
    assert signature.outputs["y"].dtype == "storage"
    assert (signature.precision, signature.composition) == ("storage", False)
    assert signature.location.line == 2


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"size": []}, "size", "did you mean 'sizes'?"),
        ({"inputs": {"x": {"shap": []}}}, "inputs.x.shap", "did you mean 'shape'?"),
        ({"inputs": {"x": {"dtype": "int"}}}, "inputs.x", "missing key 'shape'"),
        ({"inputs": {"x": {"shape": ["row", "width"]}}}, "inputs.x.shape[0]", "unknown size 'row'; expected one of half, rows, width"),
        ({"inputs": {"x": {"shape": ["rows *"]}}}, "inputs.x.shape[0]", "is not an expression"),
        ({"inputs": {"x": {"shape": ["rows > 1"]}}}, "inputs.x.shape[0]", "is a condition; expected a size"),
        ({"inputs": {"x": {"shape": ["rows"], "below": "vocab"}}}, "inputs.x.below", "unknown size 'vocab'"),
        ({"inputs": {"x": {"shape": ["rows"], "fill": "norm_wait"}}}, "inputs.x.fill", "did you mean 'norm_weight'?"),
        ({"outputs": {"y": {"shape": ["widths"]}}}, "outputs.y.shape[0]", "did you mean 'width'?"),
        ({"outputs": {"y": {"shape": ["width"], "moved_by": "y"}}}, "outputs.y.moved_by", "unknown output with the tensors of y 'y'"),
        (
            {"outputs": {"y": {"group": "trainable", "moved_by": "frozen"}, "frozen": {"group": "frozen"}}},
            "outputs.y.moved_by",
            "unknown output with the tensors of y 'frozen'; expected y",
        ),
        ({"derived": {"width": "2 * haf"}}, "derived.width", "did you mean 'half'?"),
        ({"derived": {"rows": "half"}}, "derived.rows", "the size 'rows' is declared twice"),
        ({"attributes": ["wide"]}, "attributes[0]", "unknown size 'wide'"),
        ({"gradients": ["w"]}, "gradients[0]", "unknown input 'w'; expected x"),
        ({"scalars": {"eps": {"type": "float"}}}, "scalars.eps.type", "unknown type 'float'"),
        ({"scalars": {"eps": {"type": "choice"}}}, "scalars.eps", "missing key 'of'"),
        ({"scalars": {"eps": {"type": "real", "default": "x"}}}, "scalars.eps.default", "is 'x'; expected a number"),
        ({"scalars": {"x": {"type": "real"}}}, "scalars.x", "'x' is an input too"),
        ({"precision": "double"}, "precision", "unknown precision 'double'"),
    ],
)
def test_faulty_signatures(tmp_path: Path, changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        load_operations(write(tmp_path, operation(**changes)))
    found = caught.value.problems
    assert any(problem.key == f"operations.identity.{key}" and message in problem.message for problem in found), [*map(str, found)]


def test_faulty_checks(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"checks\.a\.kinds\[0\]: unknown kinds 'invarient'.*did you mean 'invariant'"):
        load_checks(write(tmp_path, {"checks": {"a": {"kinds": ["invarient"], "doc": "x"}}}))


def test_every_mutant_of_the_catalogue_replaces_an_operation_that_exists() -> None:
    operations = load_operations()
    mutants = load_mutants()
    assert len(mutants) > 500
    for name, mutant in mutants.items():
        assert re.fullmatch("[a-z][a-z0-9_]*", name)
        assert mutant.operation is None or mutant.operation in operations, name
        assert mutant.pedigree, name
        assert mutant.doc, name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"A": {"float23": {"rms": 1, "row": 1, "max": 1}}}', r":1: A\.float23: is named 'float23'; expected one of float32"),
        ('{\n"A": {"float32": {"rms": 1, "row": 1}}}', r":2: A\.float32: missing key 'max'"),
        ('{\n"A": {"float32": {"rms": 0, "row": 1, "max": 1}}}', r":2: A\.float32\.rms: is 0; expected more than 0"),
        ('{"A": {},\n"A": {}}', r":2: A: duplicate key 'A'"),
    ],
)
def test_faulty_factors(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ContractError, match=message):
        load_factors(path)
