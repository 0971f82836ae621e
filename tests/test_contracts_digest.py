"""A claim's digest sees what the vocabulary says of its operation, of what that calls, and of its check: evidence turns stale with them."""

from dataclasses import replace
from typing import Any

import pytest

from blackswan.contracts import Vocabulary, contract_digest, load, load_vocabulary

VOCABULARY = load_vocabulary()


def digests(vocabulary: Vocabulary) -> dict[str, str]:
    return {claim.id: contract_digest(claim) for contract in load(vocabulary=vocabulary) for claim in contract.claims}


def described(operation: str, **changes: Any) -> Vocabulary:
    entry = VOCABULARY.operations[operation]
    return replace(VOCABULARY, operations={**VOCABULARY.operations, operation: replace(entry, **changes)})


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("swiglu", "OP-SWIGLU"),
        ("lm_cross_entropy", "PRE-TRAJECTORY"),
        ("weighted_cross_entropy", "TRN-TWENTY-STEPS"),
        ("train_steps", "TRN-TWENTY-STEPS"),
    ],
)
def test_the_digest_sees_the_operation_and_what_it_calls(operation: str, name: str) -> None:
    outputs = {key: replace(output, order=7.0) for key, output in VOCABULARY.operations[operation].outputs.items()}
    before, after = digests(VOCABULARY), digests(described(operation, outputs=outputs))
    assert before[name] != after[name]
    assert before["OP-ROPE"] == after["OP-ROPE"]


def test_the_digest_is_blind_to_docs() -> None:
    assert digests(described("swiglu", doc="In other words.")) == digests(VOCABULARY)


def test_the_digest_sees_what_a_check_may_answer() -> None:
    check = replace(VOCABULARY.checks["loss_is_lipschitz"], non_finite=("*",))
    before, after = digests(VOCABULARY), digests(replace(VOCABULARY, checks={**VOCABULARY.checks, check.name: check}))
    assert {name for name in before if before[name] != after[name]} == {"LOSS-CE-LIPSCHITZ"}
