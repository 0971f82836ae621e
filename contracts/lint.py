"""Checks of a claim that do not run it. Every fault is a key path within the claim and a message."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blackswan.contracts.domains import build, included
from blackswan.contracts.model import Choice, Domain, Range, Signature, Vocabulary
from blackswan.contracts.problems import KeyPath, unknown
from blackswan.contracts.schema import shown
from blackswan.contracts.sizes import SizeError, combinations, evaluate, holds, is_condition, names, resolve
from blackswan.contracts.vocabulary import CALIBRATION, scalar_fault

Fault = tuple[KeyPath, str]
_METRICS = ("rms", "row", "max")


def faults(raw: Mapping[str, Any], vocabulary: Vocabulary, sources: Iterable[str]) -> Iterator[Fault]:
    """All faults of a claim that fits the schema."""
    for name in raw.get("sources", {}):
        if name not in sources:
            yield ("sources", name), unknown("source", name, sources)
    for index, name in enumerate(raw.get("must_catch", ())):
        if name not in vocabulary.mutants:
            yield ("must_catch", index), unknown("mutant", name, vocabulary.mutants)
    if raw["kind"] == "rule":
        from blackswan.contracts.rule_lint import faults as rule_faults

        yield from rule_faults(raw)
        return
    yield from _check(raw, vocabulary)
    if is_system(raw):
        yield from [*_tolerance(raw.get("tolerance", {})), *_factors(raw, vocabulary)]
        return
    signature = vocabulary.operations.get(raw["operation"])
    if signature is None:
        yield ("operation",), unknown("operation", raw["operation"], vocabulary.operations)
        return
    yield from _operation(raw, signature)
    yield from _domain(raw["domain"], signature)
    yield from _tolerance(raw.get("tolerance", {}))
    yield from _factors(raw, vocabulary)


def is_system(raw: Mapping[str, Any]) -> bool:
    """Whether the claim is about runs, files, data or devices. Its check is then `module.function` of falsifiers/system."""
    return "." in raw.get("check", "")


def _check(raw: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[Fault]:
    """The check exists, fits the claim's kind, and takes the arguments and the backend that the claim gives it."""
    name = raw.get("check")
    if name is None:
        yield from ((("arguments", argument), "is read by nothing: the claim has no check") for argument in raw.get("arguments", {}))
        return
    check = vocabulary.checks.get(name)
    if check is None:
        alike = [other for other in vocabulary.checks if ("." in other) is is_system(raw)]
        fitting = [other for other in alike if raw["kind"] in vocabulary.checks[other].kinds]
        yield ("check",), unknown("check", name, fitting or alike)
        return
    if raw["kind"] not in check.kinds:
        yield ("check",), f"the check {name!r} is for {', '.join(check.kinds)}; the claim's kind is {raw['kind']}"
    given, accepted = raw.get("arguments", {}), (*check.arguments, *check.optional)
    yield from ((("arguments", argument), unknown("argument", argument, accepted)) for argument in given if argument not in accepted)
    yield from ((("check",), f"{name} needs the argument {argument!r}") for argument in check.arguments if argument not in given)
    if is_system(raw) and "backend" in raw and not check.backends:
        able = ", ".join(other for other, entry in vocabulary.checks.items() if entry.backends)
        yield ("backend",), f"{name} has no choice of backends; expected none here, or a check that has one: {able}"


def _operation(raw: Mapping[str, Any], signature: Signature) -> Iterator[Fault]:
    if raw.get("backend") in ("triton", "fused") and "float64" in raw["domain"].get("dtype", ()):
        yield ("backend",), f"{raw['backend']}: its kernels have no float64; leave that out of the domain"
    if raw["kind"] == "gradient" and not signature.gradients:
        yield ("kind",), f"gradient: the operation {signature.name!r} has no gradients"


def _domain(raw: Mapping[str, Any], signature: Signature) -> Iterator[Fault]:
    found = [*_sizes(raw, signature), *_scalars(raw, signature), *_optional(raw, signature)]
    found += [] if any("sizes" in key for key, _ in found) else _require(raw, signature)
    if not found and "sizes" in raw:
        domain = build(raw, signature)
        found += _satisfiable(domain, signature)
        found += [] if found else _boundary(raw, domain, signature)
    yield from ((("domain", *key), message) for key, message in found)


def _sizes(raw: Mapping[str, Any], signature: Signature) -> Iterator[Fault]:
    given = raw.get("sizes", {})
    for name, value in given.items():
        if name in signature.derived:
            yield ("sizes", name), f"{name!r} follows from {signature.derived[name]!r}; give {', '.join(signature.sizes)}"
        elif name not in signature.sizes:
            yield ("sizes", name), unknown("size", name, signature.sizes)
        elif isinstance(value, dict) and value["min"] > value["max"]:
            yield ("sizes", name), f"the range is empty: min {value['min']} is more than max {value['max']}"
    if raw.get("input", "generated") == "generated":
        for name in signature.sizes:
            if name not in given:
                yield ("sizes",), f"missing size {name!r} of the operation {signature.name!r}"


def _scalars(raw: Mapping[str, Any], signature: Signature) -> Iterator[Fault]:
    given = raw.get("scalars", {})
    for name, value in given.items():
        if name not in signature.scalars:
            yield ("scalars", name), unknown("scalar", name, signature.scalars)
            continue
        scalar = signature.scalars[name]
        if isinstance(value, dict) and scalar.type not in ("real", "int"):
            yield ("scalars", name), f"is of type {scalar.type} and cannot have a range; expected a list of choices"
        elif isinstance(value, dict) and value["min"] > value["max"]:
            yield ("scalars", name), f"the range is empty: min {value['min']} is more than max {value['max']}"
        else:
            listed = [value["min"], value["max"]] if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for message in filter(None, (scalar_fault(scalar, item) for item in listed)):
                yield ("scalars", name), message
    if raw.get("input", "generated") == "generated":
        for name, scalar in signature.scalars.items():
            if name not in given and scalar.default is None:
                yield ("scalars",), f"missing scalar {name!r} of the operation {signature.name!r}; it has no default"


def _optional(raw: Mapping[str, Any], signature: Signature) -> Iterator[Fault]:
    known = [name for name, array in signature.inputs.items() if array.optional]
    for name in raw.get("optional", {}):
        if name not in known:
            yield ("optional", name), unknown("optional input", name, known)


def _require(raw: Mapping[str, Any], signature: Signature) -> Iterator[Fault]:
    known = [*raw.get("sizes", signature.sizes), *signature.derived]
    for index, condition in enumerate(raw.get("require", ())):
        try:
            for name in sorted(names(condition) - set(known)):
                yield ("require", index), f"in {condition!r}: {unknown('size', name, known)}"
            if not is_condition(condition):
                yield ("require", index), f"{condition!r} is not a condition; expected a comparison such as 'hidden % 2 == 0'"
        except SizeError as error:
            yield ("require", index), str(error)


def _satisfiable(domain: Domain, signature: Signature) -> Iterator[Fault]:
    if set(domain.sizes) != set(signature.sizes):
        return
    sampled, complete = combinations(domain.sizes)
    tried = 0
    try:
        for combination in sampled:
            tried += 1
            if holds(domain.require, resolve(signature, combination)):
                return
    except SizeError as error:
        yield ("sizes",), str(error)
        return
    extent = f"none of the {tried} size combinations" if complete else f"none of {tried} sampled size combinations"
    yield ("require",), f"the domain is empty: {extent} meets {' and '.join(map(repr, domain.require))}"


def _boundary(raw: Mapping[str, Any], domain: Domain, signature: Signature) -> Iterator[Fault]:
    allowed: dict[str, Mapping[str, Any]] = {"sizes": domain.sizes, "scalars": domain.scalars, "optional": domain.optional}
    for index, entry in enumerate(raw.get("boundary", ())):
        outside: list[Fault] = []
        for part, choices in allowed.items():
            for name, value in entry.get(part, {}).items():
                if name not in choices:
                    outside.append((("boundary", index, part, name), unknown(part.removesuffix("s"), name, choices)))
                elif not included(choices[name], value) and not (part == "sizes" and _beyond(choices[name], value)):
                    outside.append((("boundary", index, part, name), f"{shown(value)} is outside the domain {_written(choices[name])}"))
        if entry.get("flavour", domain.flavours[0]) not in domain.flavours:
            outside.append((("boundary", index, "flavour"), f"{entry['flavour']!r} is outside the domain's {', '.join(domain.flavours)}"))
        yield from outside
        if not outside:
            yield from _boundary_sizes(index, domain, signature)


def _beyond(drawn: Choice, value: Any) -> bool:
    """Whether a size is larger than a range that is drawn: a boundary case is one case, and may be large where draws are many and small."""
    return isinstance(drawn, Range) and isinstance(value, int) and value > drawn.max


def _boundary_sizes(index: int, domain: Domain, signature: Signature) -> Iterator[Fault]:
    given = domain.boundary[index].sizes
    try:
        unmet = [condition for condition in domain.require if not evaluate(condition, resolve(signature, given))]
    except SizeError as error:
        yield ("boundary", index), str(error)
        return
    if unmet:
        values = ", ".join(f"{name} = {value}" for name, value in given.items())
        yield ("boundary", index), f"does not meet {unmet[0]!r} with {values} (sizes left out take their minimum or first value)"


def _written(value: Any) -> str:
    return f"{value.min} to {value.max}" if isinstance(value, Range) else ", ".join(map(str, value))


def _tolerance(raw: Mapping[str, Any]) -> Iterator[Fault]:
    if raw.get("basis") == "band" and raw["low"] >= raw["high"]:
        yield ("tolerance", "low"), f"the band is empty: low {raw['low']} is not less than high {raw['high']}"


def _factors(raw: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[Fault]:
    """A rounding tolerance has factors for exactly the dtypes of its domain, in calibration.json or in the claim."""
    tolerance = raw.get("tolerance", {})
    if tolerance.get("basis") != "rounding":
        return
    dtypes = set(raw.get("domain", {}).get("dtype", Domain().dtype))
    path: KeyPath = ("tolerance", "factors")
    measured = None if vocabulary.factors is None else vocabulary.factors.get(raw["id"], {})
    if "factors" in tolerance:
        if measured:
            yield path, f"the claim has factors in {CALIBRATION.name} too; expected them there alone"
        yield from ((path + key, message) for key, message in _own_factors(tolerance["factors"], dtypes))
    elif measured is not None:
        for name in sorted(dtypes - set(measured)):
            measure = f"python -m falsifiers calibrate --claim {raw['id']} --dtype {name} --write"
            yield ("tolerance",), f"{CALIBRATION.name} has no factors for {raw['id']} in {name}; measure them: {measure}"


def _own_factors(given: Mapping[str, Any], dtypes: set[str]) -> Iterator[Fault]:
    if mixed := given.keys() & set(_METRICS):
        yield from (((name,), "factors are keyed by rms, row, max or by dtype, not by both") for name in sorted(given.keys() - mixed))
        yield from (((), f"missing factor {name!r}") for name in _METRICS if name not in mixed)
        return
    for name in sorted(given.keys() - dtypes):
        yield (name,), f"the domain has no dtype {name}; expected exactly {', '.join(sorted(dtypes))}"
    for name in sorted(dtypes - given.keys()):
        yield (), f"missing factors for the dtype {name}"
