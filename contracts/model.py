"""The content of contract files as frozen objects. Mappings are plain dictionaries; nobody may change them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ScalarValue = float | int | bool | str | None | list[float] | list[str]


class Location(NamedTuple):
    """The file and the line in which a definition stands; lines count from 1."""

    file: str
    line: int


@dataclass(frozen=True)
class Range:
    """All numbers from min to max, both included."""

    min: float
    max: float


Choice = Range | tuple[Any, ...]


@dataclass(frozen=True)
class Input:
    """An input array: symbolic shape and element type, how to fill it, or the group of named arrays that it stands for."""

    shape: tuple[str, ...] = ()
    dtype: str = "real"
    fill: str | None = None
    below: str | None = None
    optional: bool = False
    group: str | None = None


@dataclass(frozen=True)
class Scalar:
    """A scalar argument: real, int, bool or choice. `default` None means that a domain must give it."""

    type: str
    of: tuple[str, ...] = ()
    default: ScalarValue = None


@dataclass(frozen=True)
class Output:
    """An output array: symbolic shape and dtype (`storage` is the dtype under test), or a group of named arrays.

    `order` is the size of what the output is computed from, where that can be larger than the output itself. `moved_by` is the output
    group of the first moments that an optimiser moves this group by.
    """

    shape: tuple[str, ...] = ()
    dtype: str = "storage"
    group: str | None = None
    order: float = 0.0
    moved_by: str | None = None


@dataclass(frozen=True, eq=False)
class Signature:
    """An operation of operations.yaml.

    `calls` are those that a composition calls for some of its scalars. `conventions` are the values of what honest implementations
    do in more than one way, the default first.
    """

    name: str
    doc: str
    sizes: tuple[str, ...]
    derived: Mapping[str, str]
    inputs: Mapping[str, Input]
    scalars: Mapping[str, Scalar]
    attributes: tuple[str, ...]
    outputs: Mapping[str, Output]
    gradients: tuple[str, ...]
    precision: str
    intermediates: str
    composition: bool
    calls: tuple[str, ...]
    conventions: Mapping[str, tuple[str, ...]]
    location: Location

    def by_row(self, arrays: "Mapping[str, Input | Output]") -> set[str]:
        """Which of the inputs or outputs have rows: their first axis is the operation's first size."""
        return {name for name, array in arrays.items() if array.shape[:1] == self.sizes[:1]}


@dataclass(frozen=True, eq=False)
class Check:
    """A check that claims may name: one of checks.yaml, with the claim kinds that may use it, or one of system_checks.json, for any kind.

    A claim gives it all of `arguments` and may give those of `optional`. `non_finite` names the outputs that may be NaN or
    infinite, with `*` for any part of a name. `backends` says whether a claim about a system may name the backend of the computation.
    """

    name: str
    kinds: tuple[str, ...]
    doc: str
    location: Location | None = None
    non_finite: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    backends: bool = False


@dataclass(frozen=True, eq=False)
class Mutant:
    """A wrong program of mutants.json, and the defects that it comes from. `operation` is what it replaces; None for a changed step.

    `hidden_in` names the dtypes whose rounding is as large as the mutant's error.
    """

    name: str
    operation: str | None
    pedigree: tuple[str, ...]
    doc: str
    hidden_in: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The names that claims may use, and the calibrated factors of their rounding tolerances by claim and dtype.

    `factors` None is for those who calibrate: no claim needs any, and a claim that has none gets ones.
    """

    operations: Mapping[str, Signature]
    checks: Mapping[str, Check]
    mutants: Mapping[str, Mutant]
    factors: "Mapping[str, Mapping[str, Factors]] | None" = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A publication or program that a claim rests on."""

    cite: str
    locator: str | None = None


@dataclass(frozen=True)
class Boundary:
    """A case that always runs: complete sizes and scalars, presence of each optional input, flavour."""

    sizes: Mapping[str, int]
    scalars: Mapping[str, ScalarValue]
    optional: Mapping[str, str]
    flavour: str


@dataclass(frozen=True)
class Domain:
    """The cases that a claim speaks of.

    For generated input `sizes`, `scalars` (with the signature's defaults) and `optional` are complete; a choice is a tuple of values, and
    presence is `absent` or `present`. A claim without dtypes of its own has float32; one without flavours has normal. `device` names the
    kinds of device that the claim speaks of; an empty tuple means the device of the run, whichever it is.
    """

    input: str = "generated"
    sizes: Mapping[str, Choice] = field(default_factory=dict)
    require: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ("float32",)
    scalars: Mapping[str, Choice] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flavours: tuple[str, ...] = ("normal",)
    boundary: tuple[Boundary, ...] = ()
    device: tuple[str, ...] = ()


@dataclass(frozen=True)
class Factors:
    """Multiples of the noise floor that an error may reach: of the tensor's rms, of the worst row's rms and of the maximum."""

    rms: float
    row: float
    max: float


@dataclass(frozen=True)
class Tolerance:
    """Basis exact; rounding (`factors` by dtype); literal (`value`, `unit`, `source`); band (`low` to `high` from `n` at `confidence`)."""

    basis: str
    factors: Mapping[str, Factors] = field(default_factory=dict)
    value: float | None = None
    unit: str | None = None
    source: str | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class Rule:
    """A hyperparameter rule in CEL: where `when` is true, `require` must be; `recommend` gives values by configuration field."""

    when: str
    require: str
    severity: str
    message: str
    recommend: Mapping[str, str]


@dataclass(frozen=True)
class Example:
    """A configuration and data statistics, each partial."""

    config: Mapping[str, ScalarValue]
    statistics: Mapping[str, ScalarValue]


@dataclass(frozen=True)
class Examples:
    """Examples for which a rule holds, and for which it reports."""

    holds: tuple[Example, ...] = ()
    violates: tuple[Example, ...] = ()


@dataclass(frozen=True, eq=False)
class Claim:
    """One statement that can be false.

    `content` is the claim as the file has it, and `resolved_signature` holds the vocabulary's entries of its operation and its check.
    `backend` names the code that it speaks of, such as Triton's, where the subject has several; None leaves the choice to the subject.
    """

    id: str
    contract: str
    severity: str
    kind: str
    operation: str | None
    statement: str
    formula: str | None
    domain: Domain
    cases: int | None
    check: str | None
    arguments: Mapping[str, Any]
    tolerance: Tolerance | None
    must_catch: tuple[str, ...]
    sources: Mapping[str, str]
    origin: tuple[str, ...]
    correction: str | None
    rule: Rule | None
    examples: Examples
    location: Location
    content: Mapping[str, Any] = field(repr=False)
    backend: str | None = None
    resolved_signature: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def system(self) -> bool:
        """Whether the claim is about runs, files, data or devices. Its check is then `module.function` of falsifiers/system."""
        return "." in (self.check or "")


@dataclass(frozen=True, eq=False)
class Contract:
    """A contract file. One that is `on_request` is asked where a claim, an operation or a dtype is named."""

    name: str
    version: str
    title: str
    sources: Mapping[str, Source]
    claims: tuple[Claim, ...]
    path: Path
    on_request: bool = False


def contract_digest(claim: Claim) -> str:
    """SHA-256 over the claim's content and resolved signature, blind to comments, docs, key order and formatting."""
    canonical = json.dumps(
        [claim.contract, claim.content, claim.resolved_signature], sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
