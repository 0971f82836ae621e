"""Domains as written to domains as objects: complete sizes, scalars with their defaults, boundary cases filled in."""

from collections.abc import Mapping
from typing import Any

from blackswan.contracts.model import Boundary, Choice, Domain, Range, Signature


def choice(raw: Any, real: bool = False) -> Choice:
    """A range, a list of choices or one value, as Range or tuple; whole numbers become floats where `real`."""
    if isinstance(raw, dict):
        return Range(float(raw["min"]), float(raw["max"])) if real else Range(raw["min"], raw["max"])
    values = raw if isinstance(raw, list) else [raw]
    return tuple(float(value) for value in values) if real else tuple(values)


def included(allowed: Choice, value: Any) -> bool:
    """Whether a value is one of the allowed ones."""
    if isinstance(allowed, Range):
        return isinstance(value, int | float) and not isinstance(value, bool) and allowed.min <= value <= allowed.max
    return value in allowed


def _first(allowed: Choice) -> Any:
    return allowed.min if isinstance(allowed, Range) else allowed[0]


def build(raw: Mapping[str, Any], signature: Signature) -> Domain:
    """The domain of a claim on an operation; `raw` must be free of faults."""
    source = raw.get("input", "generated")
    scalars = {name: choice(value, signature.scalars[name].type == "real") for name, value in raw.get("scalars", {}).items()}
    optional = {name: tuple(value) for name, value in raw.get("optional", {}).items()}
    if source == "generated":
        for name, scalar in signature.scalars.items():
            if scalar.default is not None:
                scalars.setdefault(name, choice(scalar.default, scalar.type == "real"))
        for name, array in signature.inputs.items():
            if array.optional:
                optional.setdefault(name, ("absent", "present"))
    plain = Domain()
    sizes = {name: choice(value) for name, value in raw.get("sizes", {}).items()}
    flavours = tuple(raw.get("flavours", plain.flavours))
    return Domain(
        input=source,
        sizes=sizes,
        require=tuple(raw.get("require", ())),
        dtype=tuple(raw.get("dtype", plain.dtype)),
        scalars=scalars,
        optional=optional,
        flavours=flavours,
        device=tuple(raw.get("device", plain.device)),
        boundary=tuple(_boundary(entry, sizes, scalars, optional, flavours) for entry in raw.get("boundary", ())),
    )


def _boundary(
    raw: Mapping[str, Any],
    sizes: Mapping[str, Choice],
    scalars: Mapping[str, Choice],
    optional: Mapping[str, tuple[str, ...]],
    flavours: tuple[str, ...],
) -> Boundary:
    return Boundary(
        sizes={name: raw.get("sizes", {}).get(name, _first(allowed)) for name, allowed in sizes.items()},
        scalars={name: raw.get("scalars", {}).get(name, _first(allowed)) for name, allowed in scalars.items()},
        optional={name: raw.get("optional", {}).get(name, allowed[0]) for name, allowed in optional.items()},
        flavour=raw.get("flavour", flavours[0]),
    )
