"""Wrong pre-training steps: the correct loop over the whole model with one step of it changed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.registry import mutants
from blackswan.falsifiers.mutants.training import STATE, averaging, frozen, of_gradient, reports_clipped_norm, step_of_adamw
from blackswan.falsifiers.mutants.variation import Made, wrong_calls
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.pretraining import predicted
from blackswan.reference.training import flatten, split

EMBEDDING = "model.embed_tokens.weight"


def _of_validation(path: str) -> bool:
    """Whether the call averages the validation loss, rather than the loss or the gradient of a step."""
    return not path.startswith("steps.")


def _freezing(ending: str) -> Callable[[Any], Any]:
    return wrong_calls(frozen, "adamw_step", at=lambda path: path.endswith(ending))


def _updated_twice(made: Made) -> str:
    result, values = made.run(), made.tape.values
    if made.scalars["tied"]:
        again = step_of_adamw(made, {name: values[f"{made.path}.{name}"] for name in STATE}, made.value("gradient"))
        values |= {f"{made.path}.{name}": again[name] for name in STATE}
    return result


def _unseen_rows_kept(made: Made) -> str:
    before, seen = made.value("parameter"), (made.value("gradient") != 0) | (made.value("exp_avg") != 0)
    return made.changed(lambda parameter: np.where(seen, parameter, before))


def _each_tensor_clipped(made: Made) -> str:
    limit = made.scalars.get("max_norm", 1.0)
    parts = split(made.value("gradients")[0], list(parameter_shapes(made.scalars).values()))
    clipped = [part * (limit / max(np.sqrt((part * part).sum()), limit)) for part in parts]
    return made.changed(lambda _: flatten(clipped)[None], "gradients")


def _moments_shared(made: Made) -> str:
    """Tensors of one name in different layers read and write one pair of moments."""
    name = ".".join(part for part in made.path.partition(".adamw.")[2].split(".") if not part.isdecimal())
    written = made.tape.memory.get(name, {})
    result = made.run(**{moment: made.tape.put(f"{made.path}.shared.{moment}", value) for moment, value in written.items()})
    made.tape.memory[name] = {moment: made.tape.values[f"{made.path}.{moment}"] for moment in STATE[1:]}
    return result


def _counted_behind_gaps(made: Made) -> str:
    """Micro-batches are weighted by all real tokens but those of the first column."""
    mask, batch, micro = made.tape.values["mask"], made.scalars["batch"], made.scalars["micro"]
    if not _of_validation(made.path):
        mask = mask[batch * int(made.path.split(".")[1]) :][:batch]
    parts = [mask[start : start + micro] for start in range(0, len(mask), micro)]
    counts = np.array([int(part[:, 1:].sum()) for part in parts if predicted(part)])
    return made.run(counts=made.tape.put(f"{made.path}.real_tokens", counts))


mutants(
    "pretrain_steps",
    pretrain_counts_tokens_behind_gaps=(
        "Micro-batches are weighted by tokens that are not predicted, behind a gap or the padding.",
        wrong_calls(_counted_behind_gaps, "average_gradients"),
    ),
    pretrain_embedding_frozen=("The embedding is not trained.", _freezing(EMBEDDING)),
    pretrain_norms_frozen=("The weights of norms are not trained.", _freezing("norm.weight")),
    pretrain_biases_frozen=("The biases of queries, keys and values are not trained.", _freezing(".bias")),
    pretrain_tied_head_updated_twice=(
        "A tied head takes a step of its own, on the matrix of the embedding.",
        wrong_calls(_updated_twice, "adamw_step", at=lambda path: path.endswith(EMBEDDING)),
    ),
    pretrain_last_micro_batch_only=("Only the last micro-batch's gradient counts.", averaging(lambda parts: parts[-1], of_gradient), "S7"),
    pretrain_micro_batches_weighted_alike=(
        "Micro-batches weighted alike that predict different numbers of tokens.",
        averaging(lambda parts: parts.mean(axis=0), lambda path: not _of_validation(path)),
        "P31",
    ),
    pretrain_micro_batches_summed=(
        "Gradients of micro-batches summed, not averaged.",
        averaging(lambda parts: parts.sum(axis=0), of_gradient),
        "P32",
    ),
    pretrain_validation_mean_of_batch_means=(
        "Validation loss as mean of the means of unequal batches.",
        averaging(lambda parts: parts.mean(axis=0), _of_validation),
        "S12",
    ),
    pretrain_validation_of_last_batch=("Validation loss of the last batch alone.", averaging(lambda parts: parts[-1], _of_validation)),
    pretrain_decays_vectors=(
        "Weight decay on norms and biases too.",
        wrong_calls(lambda made: made.run(weight_decay=made.scalars.get("weight_decay", 0.1)), "adamw_step"),
    ),
    pretrain_decays_seen_rows_only=(
        "Lazy AdamW: no weight decay where there never was a gradient.",
        wrong_calls(_unseen_rows_kept, "adamw_step"),
    ),
    pretrain_clips_each_tensor=("Each tensor clipped by its own norm.", wrong_calls(_each_tensor_clipped, "clip_by_global_norm"), "S4"),
    pretrain_reports_clipped_norm=("Gradient norm recorded after clipping.", wrong_calls(reports_clipped_norm, "clip_by_global_norm")),
    pretrain_step_count_stuck=("Every step is corrected as the first.", wrong_calls(lambda made: made.run(step=1), "adamw_step"), "P35"),
    pretrain_moments_shared=(
        "One pair of moments for the tensors of one name in all layers.",
        wrong_calls(_moments_shared, "adamw_step"),
        "S6",
    ),
)
