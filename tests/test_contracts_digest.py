"""A claim's digest sees what the vocabulary says of its operation, of what that calls, and of its check: evidence turns stale with them."""

from dataclasses import replace
from typing import Any

import pytest

from blackswan.contracts import Vocabulary, contract_digest, load, load_vocabulary

VOCABULARY = load_vocabulary()
OUTPUTS = {
    name: {key: replace(output, order=7.0) for key, output in entry.outputs.items()} for name, entry in VOCABULARY.operations.items()
}


def digests(vocabulary: Vocabulary) -> dict[str, str]:
    return {claim.id: contract_digest(claim) for contract in load(vocabulary=vocabulary) for claim in contract.claims}


BEFORE = digests(VOCABULARY)


def described(operation: str, **changes: Any) -> Vocabulary:
    entry = VOCABULARY.operations[operation]
    return replace(VOCABULARY, operations={**VOCABULARY.operations, operation: replace(entry, **changes)})


def checked(name: str, **changes: Any) -> Vocabulary:
    return replace(VOCABULARY, checks={**VOCABULARY.checks, name: replace(VOCABULARY.checks[name], **changes)})


@pytest.mark.parametrize(
    ("vocabulary", "seen", "not_seen"),
    [
        (described("weighted_cross_entropy", outputs=OUTPUTS["weighted_cross_entropy"]), "TRN-TWENTY-STEPS", "OP-ROPE"),
        (described("train_steps", outputs=OUTPUTS["train_steps"]), "TRN-TWENTY-STEPS", "OP-ROPE"),
        (checked("loss_is_lipschitz", non_finite=("*",)), "LOSS-CE-LIPSCHITZ", "LOSS-CE"),
        (described("swiglu", doc="In other words."), None, "OP-SWIGLU"),
    ],
    ids=["an operation that is called", "the operation", "what the check may answer", "a docstring"],
)
def test_the_digest_sees_what_a_claim_means(vocabulary: Vocabulary, seen: str | None, not_seen: str) -> None:
    after = digests(vocabulary)
    assert seen is None or BEFORE[seen] != after[seen]
    assert BEFORE[not_seen] == after[not_seen]
