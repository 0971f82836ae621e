"""Mutants: wrong operations and procedures with a pedigree, which a falsifier must report. See README.md for where each comes from."""

from collections.abc import Mapping
from importlib import import_module

from falsifiers.mutants.registry import MUTANTS as _REGISTERED
from falsifiers.mutants.registry import Mutant, correct, mutant
from falsifiers.subjects.reference import ReferenceSubject

for _module in ("layers", "norms", "attention", "losses", "lora", "nf4", "optimiser", "decoder", "training"):
    import_module(f"{__name__}.{_module}")

MUTANTS: Mapping[str, Mutant] = _REGISTERED

_BLOCK = {"embedding", "linear", "residual_add", "rms_norm", "qk_norm", "rope", "attention", "swiglu"}
_CLASSIFIER = {*_BLOCK, "pool", "lora_linear", "nf4_quantize", "nf4_dequantize"}
_OPTIMISER = {"average_gradients", "clip_by_global_norm", "adamw_step", "learning_rate_schedule"}

USES: Mapping[str, frozenset[str]] = {
    "decoder_forward": frozenset(_BLOCK),
    "language_model_loss": frozenset({*_BLOCK, "decoder_forward", "lm_cross_entropy"}),
    "classifier_forward": frozenset(_CLASSIFIER),
    "classifier_loss": frozenset({*_CLASSIFIER, "classifier_forward", "weighted_cross_entropy"}),
    "train_steps": frozenset({*_CLASSIFIER, "classifier_forward", "classifier_loss", "weighted_cross_entropy", *_OPTIMISER}),
}
"""What a composition calls, for some of its scalars."""


def reaching(operation: str) -> list[Mutant]:
    """The mutants whose wrong operation is the given one or is called by it, in the order of registration."""
    used = USES.get(operation, frozenset()) | {operation}
    return [entry for entry in MUTANTS.values() if entry.operation in used]


def subject(name: str) -> ReferenceSubject:
    """The reference with the mutant's operation in it, as a subject."""
    return ReferenceSubject(MUTANTS[name].build(), name)


__all__ = ["MUTANTS", "USES", "Mutant", "correct", "mutant", "reaching", "subject"]
