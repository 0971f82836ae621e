"""A stored case to replay, and whether it is one of its claim: names, types, shapes, and numbers that the dtype can hold.

No flavour draws NaN or an infinity, of which no claim speaks: a claim that refuses such input makes it from a case without.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.contracts import DTYPES
from blackswan.contracts import sizes as symbolic
from blackswan.contracts.fields import FIELDS, ConfigError, checked
from blackswan.contracts.model import Claim, Contract, Signature
from blackswan.contracts.problems import unknown
from blackswan.contracts.schema import shown
from blackswan.falsifiers.numeric.case import Case, load
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.reference.classifier import parameter_shapes as classifier_shapes
from blackswan.reference.decoder import parameter_shapes as decoder_shapes
from blackswan.reference.table import Array

Shape = tuple[int, ...]
SEEDS = 2**63
LARGEST = 2**40
"""No array in memory has more elements on a side."""
KINDS = {"int": ("iu", "whole numbers"), "bool": ("b", "truth values"), "uint8": ("u", "bytes")}
"""Kinds of NumPy dtypes by an input's declared dtype; all others are real numbers."""


def stored_case(contracts: Sequence[Contract], path: Path) -> tuple[Claim, Case]:
    """The claim and the case of a replay file. ValueError where no contract has the claim, or the case is not one of its."""
    name, case = load(path)
    claims = {claim.id: claim for contract in contracts for claim in contract.claims}
    if name not in claims:
        raise ValueError(f"{path}: is a case of a claim that no contract has: {unknown('claim', name, claims)}")
    if case.operation != (claims[name].operation or ""):
        raise ValueError(f"{path}: is a case of {case.operation}, but {name} is a claim on {claims[name].operation}")
    try:
        require(claims[name], case)
    except ValueError as error:
        raise ValueError(f"{path}: not a case of {name}: {error}") from None
    return claims[name], case


def require(claim: Claim, case: Case) -> None:
    """ValueError where the case is not one of the claim; the message names the field."""
    if case.dtype not in claim.domain.dtype:
        raise ValueError(f"dtype is {case.dtype}; {claim.id} can be attacked in {', '.join(claim.domain.dtype)} only")
    if not (_natural(case.seed) and case.seed < SEEDS):
        raise ValueError(f"seed is {_shown(case.seed)}; expected a whole number from 0 to {SEEDS - 1}")
    if not isinstance(case.flavour, str):
        raise ValueError(f"flavour is {_shown(case.flavour)}; expected text")
    for name, given in (("sizes", case.sizes), ("scalars", case.scalars)):
        if not isinstance(given, dict):
            raise ValueError(f"{name} is {shown(given)}; expected an object")
    signature = signatures()[claim.operation] if claim.operation else None
    if signature is None:
        for name in claim.domain.scalars:
            _field(case, name)
    else:
        _sizes(claim, signature, case)
        _scalars(signature, case)
        _arrays(signature, case)


def _shown(value: Any) -> str:
    """Python writes no integer of more than 4,300 digits."""
    return f"{value:#x}"[:40] + "…" if type(value) is int and value.bit_length() > 128 else shown(value)


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _real(value: Any) -> bool:
    """Whether a float can hold the value: an integer may be larger than all floats."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int, "a whole number"),
    "real": (_real, "a finite number"),
    "bool": (lambda value: type(value) is bool, "true or false"),
    "text": (lambda value: type(value) is str, "text"),
}


def _sizes(claim: Claim, signature: Signature, case: Case) -> None:
    """A generated case has all sizes of the operation, and those that follow from them; a case of real input has those of its model."""
    for name, size in case.sizes.items():
        if not (_natural(size) and size <= LARGEST):
            raise ValueError(f"sizes.{name} is {_shown(size)}; expected a whole number from 0 to {LARGEST}")
    if claim.domain.input != "generated":
        return
    own = {name: size for name, size in case.sizes.items() if name not in signature.derived}
    for name, size in symbolic.resolve(signature, own).items():
        if case.sizes.get(name) != size:
            raise ValueError(f"sizes.{name} is {case.sizes.get(name, 'missing')}; expected {size}, which follows from the others")


def _scalars(signature: Signature, case: Case) -> None:
    for name in case.scalars:
        if name not in signature.scalars and name not in signature.attributes:
            own = ", ".join((*signature.scalars, *signature.attributes))
            raise ValueError(f"scalars.{name} is none of the operation's; expected {own or 'none'}")
    for name, scalar in signature.scalars.items():
        if name not in case.scalars and scalar.default is not None:
            continue
        _scalar(case, name, *_TYPES["text" if scalar.type == "choice" else scalar.type])
        if scalar.of and case.scalars[name] not in scalar.of:
            raise ValueError(f"scalars.{name} is {_shown(case.scalars[name])}; expected one of {', '.join(scalar.of)}")
    for name in signature.attributes:
        _scalar(case, name, _natural, "a whole number from 0 on")
        if case.scalars[name] != case.sizes.get(name, case.scalars[name]):
            raise ValueError(f"scalars.{name} is {case.scalars[name]}; expected {case.sizes[name]}, as in sizes")


def _field(case: Case, name: str) -> None:
    if name not in case.scalars and not FIELDS[name].optional:
        raise ValueError(f"scalars.{name} is missing; expected a value of that setting")
    try:
        checked(name, case.scalars.get(name))
    except ConfigError as error:
        raise ValueError(f"scalars.{name} {str(error).removeprefix(f'{name}: ')}") from None


def _scalar(case: Case, name: str, fits: Callable[[Any], bool], expected: str) -> None:
    if name not in case.scalars:
        raise ValueError(f"scalars.{name} is missing; expected {expected}")
    if not fits(case.scalars[name]):
        raise ValueError(f"scalars.{name} is {_shown(case.scalars[name])}; expected {expected}")


def _arrays(signature: Signature, case: Case) -> None:
    inputs = {name: (_shape(spec.shape, case), spec.dtype) for name, spec in signature.inputs.items() if not spec.group}
    for name, spec in signature.inputs.items():
        if spec.group:
            shapes = classifier_shapes(case.scalars) if spec.group == "classifier" else decoder_shapes(case.scalars)
            inputs |= {f"{name}/{parameter}": (shape, "real") for parameter, shape in shapes.items()}
    optional = {name for name, spec in signature.inputs.items() if spec.optional}
    _like("input", case.inputs, inputs, case.dtype)
    if missing := sorted(set(inputs) - set(case.inputs) - optional):
        raise ValueError(f"input:{missing[0]} is missing; expected an array of shape {inputs[missing[0]][0]}")
    for name, spec in signature.inputs.items():
        most = case.sizes.get(spec.below or "")
        if most is not None and name in case.inputs and not ((case.inputs[name] >= 0) & (case.inputs[name] < most)).all():
            raise ValueError(f"input:{name} is outside its range; expected whole numbers from 0 to below {spec.below}, which is {most}")
    outputs = {name: (_shape(output.shape, case), "real") for name, output in signature.outputs.items() if not output.group}
    _like("cotangent", case.cotangents, outputs, case.dtype)


def _shape(symbols: tuple[str, ...], case: Case) -> Shape | None:
    """The shape as numbers; None where the case does not have all sizes that it depends on."""
    known = all(symbolic.names(dimension) <= set(case.sizes) for dimension in symbols)
    return symbolic.shape(symbols, case.sizes) if known else None


def _like(what: str, given: Mapping[str, Array], expected: Mapping[str, tuple[Shape | None, str]], dtype: str) -> None:
    for name, array in given.items():
        if name not in expected:
            raise ValueError(f"{what}:{name} is none of the operation's; expected {', '.join(list(expected)[:8])}")
        shape, kind = expected[name]
        kinds, words = KINDS.get(kind, ("f", "real numbers"))
        if array.dtype.kind not in kinds:
            raise ValueError(f"{what}:{name} has dtype {array.dtype}; expected {words}")
        if shape is not None and array.shape != shape:
            raise ValueError(f"{what}:{name} has shape {array.shape}; expected {shape} by the case's sizes and scalars")
        storage = "float32" if kind == "float32" else DTYPES[dtype].storage
        largest = float(ml_dtypes.finfo(storage).max)  # type: ignore[no-untyped-call]  # ml_dtypes has no types
        if array.dtype.kind == "f" and not (held := np.abs(array) <= largest).all():
            index = tuple(map(int, np.argwhere(~held)[0]))
            raise ValueError(
                f"{what}:{name} is {array[index]} at {list(index)}; expected finite numbers, up to {largest:.4g} in the case's dtype"
            )
