"""The names that claims may use, from operations.yaml, checks.yaml and the generated JSON files; the factors of calibration.json.

A folder of a user's own may hold more of each, beside contracts of its own. The variable BLACKSWAN_CONTRACTS names it, which the processes
that are started from one inherit; the option `--contracts` sets it.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from blackswan.contracts.document import Document, read
from blackswan.contracts.model import Check, Factors, Input, Location, Mutant, Output, Scalar, Signature, Vocabulary
from blackswan.contracts.problems import ContractError, KeyPath, Problem, shown_path, unknown
from blackswan.contracts.schema import kinds, shown, violations
from blackswan.contracts.sizes import SizeError, is_condition, names

FOLDER = Path(__file__).resolve().parent
CALIBRATION = FOLDER / "calibration.json"
ORIGINS = FOLDER / "origins.yaml"
OWN_FOLDER = "BLACKSWAN_CONTRACTS"
VOCABULARY_FILES = ("operations.yaml", "checks.yaml", ORIGINS.name)


def own_folder() -> Path | None:
    """The folder of a user's own contracts; None where none is named. ValueError where it is no folder."""
    named = os.environ.get(OWN_FOLDER)
    return _folder(named) if named else None


def use_folder(path: Path | None) -> None:
    """From here on this process and those that it starts read that folder too; None changes nothing. ValueError where it is no folder."""
    if path is not None:
        os.environ[OWN_FOLDER] = str(_folder(path))


def _folder(named: str | Path) -> Path:
    if not Path(named).is_dir():
        raise ValueError(f"{named}: no such folder; expected one with contracts, as --contracts or {OWN_FOLDER} names it")
    return Path(named).resolve()


def folders() -> list[Path]:
    """The folders that contracts and their vocabulary are read from."""
    own = own_folder()
    return [FOLDER] if own is None else [FOLDER, own]


def _entries(file: str, load: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What every folder that has such a file gives. ContractError where two give the same name."""
    found: dict[str, Any] = {}
    for path in [folder / file for folder in folders()]:
        new = load(path) if path.is_file() else {}
        if twice := sorted(found.keys() & new.keys()):
            raise ContractError(
                [Problem(shown_path(path), 1, name, f"{name!r} is Blackswan's own already; expected another name") for name in twice]
            )
        found |= new
    return found


def read_vocabulary(path: Path, kind: str) -> Document:
    """A file of vocabulary.schema.json's `kind`. ContractError where the file is wrong."""
    document = read(path)
    problems = [document.problem(key, message) for key, message in violations(document, f"vocabulary.schema.json#/$defs/{kind}")]
    if problems:
        raise ContractError(problems)
    return document


def _location(document: Document, path: KeyPath) -> Location:
    return Location(document.file, document.line(path))


def load_operations(path: Path | None = None) -> dict[str, Signature]:
    """The signature of every operation, of those of one file where it is given. ContractError where a file is wrong."""
    if path is None:
        return _entries("operations.yaml", load_operations)
    document = read_vocabulary(path, "operations")
    operations = {
        name: _signature(name, raw, _location(document, ("operations", name))) for name, raw in document.data["operations"].items()
    }
    problems = [
        document.problem(("operations", name, *key), message)
        for name, signature in operations.items()
        for key, message in [*_faults(signature), *_unknown_calls(signature, operations)]
    ]
    if problems:
        raise ContractError(problems)
    return operations


def _signature(name: str, raw: Mapping[str, Any], location: Location) -> Signature:
    def array(value: Mapping[str, Any]) -> dict[str, Any]:
        return {**value, "shape": tuple(map(str, value.get("shape", ())))}

    return Signature(
        name=name,
        doc=raw["doc"],
        sizes=tuple(raw.get("sizes", ())),
        derived=raw.get("derived", {}),
        inputs={key: Input(**array(value)) for key, value in raw.get("inputs", {}).items()},
        scalars={key: Scalar(**{**value, "of": tuple(value.get("of", ()))}) for key, value in raw.get("scalars", {}).items()},
        attributes=tuple(raw.get("attributes", ())),
        outputs={key: Output(**array(value)) for key, value in raw.get("outputs", {}).items()},
        gradients=tuple(raw.get("gradients", ())),
        precision=raw.get("precision", "storage"),
        intermediates=raw.get("intermediates", "float32"),
        composition=raw.get("composition", False),
        calls=tuple(raw.get("calls", ())),
        conventions={key: tuple(values) for key, values in raw.get("conventions", {}).items()},
        location=location,
    )


def _unknown_calls(signature: Signature, known: Iterable[str]) -> Iterable[tuple[KeyPath, str]]:
    for index, name in enumerate(signature.calls):
        if name not in known:
            yield ("calls", index), unknown("operation", name, known)


def _faults(signature: Signature) -> Iterable[tuple[KeyPath, str]]:
    known = set(signature.sizes)
    for name, expression in signature.derived.items():
        if name in known:
            yield ("derived", name), f"the size {name!r} is declared twice"
        yield from _expression(("derived", name), expression, known)
        known.add(name)
    for kind, arrays in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        for name, array in arrays.items():
            for index, dimension in enumerate(array.shape):
                yield from _expression((kind, name, "shape", index), dimension, known)
            if isinstance(array, Input) and array.below is not None and array.below not in known:
                yield (kind, name, "below"), unknown("size", array.below, known)
            if isinstance(array, Output) and array.moved_by is not None:
                groups = [other for other, output in signature.outputs.items() if output.group is not None and output.group == array.group]
                if array.moved_by not in groups:
                    yield (kind, name, "moved_by"), unknown(f"output with the tensors of {name}", array.moved_by, groups)
    for index, name in enumerate(signature.attributes):
        if name not in known:
            yield ("attributes", index), unknown("size", name, known)
    differentiable = {*signature.inputs, *(["trainable"] if any(array.group for array in signature.inputs.values()) else [])}
    for index, name in enumerate(signature.gradients):
        if name not in differentiable:
            yield ("gradients", index), unknown("input", name, differentiable)
    for name, scalar in signature.scalars.items():
        if name in signature.inputs:
            yield ("scalars", name), f"{name!r} is an input too"
        if scalar.default is not None and (message := scalar_fault(scalar, scalar.default)):
            yield ("scalars", name, "default"), message


def _expression(path: KeyPath, expression: str, known: Iterable[str]) -> Iterable[tuple[KeyPath, str]]:
    try:
        for name in sorted(names(expression) - set(known)):
            yield path, unknown("size", name, known)
        if is_condition(expression):
            yield path, f"{expression!r} is a condition; expected a size"
    except SizeError as error:
        yield path, str(error)


def scalar_fault(scalar: Scalar, value: Any) -> str | None:
    """The fault of a value for a scalar; None where it fits."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if scalar.type == "choice":
        return None if value in scalar.of else unknown("choice", value, scalar.of)
    fits = {"int": is_int, "real": is_int or isinstance(value, float), "bool": isinstance(value, bool)}[scalar.type]
    expected = {"int": "an integer", "real": "a number", "bool": "true or false"}[scalar.type]
    return None if fits else f"is {shown(value)}; expected {expected}"


def load_checks(path: Path | None = None) -> dict[str, Check]:
    """The checks that claims may name. ContractError where a file is wrong."""
    if path is None:
        return _entries("checks.yaml", load_checks)
    document = read_vocabulary(path, "checks")
    return {
        name: Check(name, location=_location(document, ("checks", name)), **_lists_as_tuples(raw))
        for name, raw in document.data["checks"].items()
    }


def load_system_checks(path: Path = FOLDER / "system_checks.json") -> dict[str, Check]:
    """The functions of falsifiers/system that claims may name, from the catalogue that `python -m falsifiers catalogue` makes."""
    return {name: Check(name, kinds(), **_lists_as_tuples(raw)) for name, raw in json.loads(path.read_text(encoding="utf-8")).items()}


def _lists_as_tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


def load_mutants(path: Path | None = None) -> dict[str, Mutant]:
    """The mutants that claims may name, from the catalogue that `python -m falsifiers catalogue` makes."""
    if path is None:
        return _entries("mutants.json", load_mutants)
    return {
        name: Mutant(name, raw["operation"], tuple(raw["pedigree"]), raw["doc"], tuple(raw.get("hidden_in", ())))
        for name, raw in json.loads(path.read_text(encoding="utf-8")).items()
    }


def load_factors(path: Path | None = None) -> dict[str, dict[str, Factors]]:
    """The factors of rounding tolerances by claim and dtype, as `python -m falsifiers calibrate` writes them.

    ContractError where a file is wrong.
    """
    if path is None:
        return _entries(CALIBRATION.name, load_factors)
    measured = read_vocabulary(path, "calibration").data
    return {claim: {dtype: factors(raw) for dtype, raw in by_dtype.items()} for claim, by_dtype in measured.items()}


def factors(raw: Mapping[str, float]) -> Factors:
    """Factors as a file gives them, as floats."""
    return Factors(**{metric: float(value) for metric, value in raw.items()})


def load_vocabulary() -> Vocabulary:
    """Operations, checks, mutants and factors; ContractError with the problems of all files."""
    problems: list[Problem] = []
    found: list[Any] = []
    for load in (load_operations, load_checks, load_mutants, load_factors):
        try:
            found.append(load())
        except ContractError as error:
            problems += error.problems
    if problems:
        raise ContractError(problems)
    operations, checks, mutants, measured = found
    return Vocabulary(operations, {**checks, **load_system_checks()}, mutants, measured)
