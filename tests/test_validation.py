"""The compiled schemas, held to the verdicts of the library that explains violations: some thousand documents, most of them wrong."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reports_factory import end_record, run_record, verdict

from blackswan.contracts import schema
from blackswan.contracts.document import read
from blackswan.contracts.validation import compiler
from blackswan.contracts.vocabulary import CALIBRATION, FOLDER
from blackswan.reports import records
from blackswan.reports.digests import sealed

FINITE: list[Any] = [None, True, -1, 0, 1, 0.5, 3.0, 10**15, 2**64, 10**400, 1e300, "", "nan", "x", " ", "A-B", "2025-02-30"]
FINITE += [[], {}, [1], [1, 1], [1, True], [0.5, 0.5], ["x", "x"], {"a": None}, {"min": 1, "max": 2.0}]


def mutations(value: Any, wrong: Callable[[], list[Any]]) -> Iterator[Any]:
    """The value, at every depth, with each of its parts replaced by values of other kinds, with each removed, and with one more."""
    yield from wrong()
    if isinstance(value, dict):
        yield {**value, "more": 1}
        for name, entry in value.items():
            yield {key: other for key, other in value.items() if key != name}
            yield from ({**value, name: inner} for inner in mutations(entry, wrong))
    elif isinstance(value, list):
        yield value + value[:1]
        for index, entry in enumerate(value):
            yield from ([*value[:index], inner, *value[index + 1 :]] for inner in mutations(entry, wrong))


def agree(listed: list[Any], fits: Callable[[Any], bool], library: Callable[[Any], bool], wrong: list[Any]) -> bool:
    """Whether both say the same of every mutation, and say yes and no."""
    draw = random.Random(0)  # a reproducible sample, not a secret
    said = set()
    for value in listed:
        for mutation in (value, *mutations(value, lambda: draw.sample(wrong, 2))):
            assert fits(mutation) is library(mutation), mutation
            said.add(fits(mutation))
    return said == {True, False}


def test_records_of_verdicts() -> None:
    whole = verdict(state="FALSIFIED", known_failure={"reason": "slow", "expiry": "2099-01-01"})
    made = [sealed(record, []) for record in (run_record(), whole, verdict(), end_record(whole))]

    def fits(record: Any) -> bool:
        return isinstance(record, dict) and records._fits(record)

    assert agree(made, fits, records._validator().is_valid, FINITE)  # strict JSON has nothing else


def documents() -> dict[str, list[Any]]:
    """By reference: a claim of each kind and tolerance, one in a contract, and the first entries of each file of the vocabulary."""
    contract = read(FOLDER / "decoder-operations-v1.yaml").data
    claims = [claim for path in sorted(FOLDER.glob("*-v*.yaml")) for claim in read(path).data["claims"]]
    claims = list({(claim["kind"], claim.get("tolerance", {}).get("basis")): claim for claim in claims}.values())
    contract |= {"domains": dict(list(contract["domains"].items())[:1]), "claims": claims[:1]}
    failure = {"claim": "OP-ROPE", "dtype": "float32", "device": "cuda", "reason": "slow", "expiry": "2099-01-01"}
    vocabulary: dict[str, Any] = {"known_failures": {"failures": [failure]}, "calibration": first(read(CALIBRATION).data)}
    vocabulary |= {kind: {kind: first(read(FOLDER / f"{kind}.yaml").data[kind])} for kind in ("operations", "checks", "origins")}
    found = {f"vocabulary.schema.json#/$defs/{kind}": [data] for kind, data in vocabulary.items()}
    return {"contract.schema.json": [contract], "contract.schema.json#/$defs/claim": claims, **found}


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return dict(list(entries.items())[:2])


@pytest.mark.parametrize(("reference", "listed"), documents().items(), ids=documents())
def test_contracts_and_their_vocabulary(reference: str, listed: list[Any]) -> None:
    wrong = [*FINITE, float("nan"), float("inf")]
    assert agree(listed, schema._compiled()(reference), schema._validator(reference).is_valid, wrong)


def test_a_keyword_that_is_not_compiled_is_an_error() -> None:
    with pytest.raises(KeyError, match="oneOf"):
        compiler({"file": {"$defs": {"run": {"oneOf": []}}}})("file#/$defs/run")
