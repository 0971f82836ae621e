"""Wrong pre-training steps: the correct loop over the whole model with one step of it changed."""

from collections.abc import Callable

import numpy as np

from blackswan.falsifiers.mutants.registry import mutant
from blackswan.falsifiers.mutants.variation import Change, Made, varied
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.table import Array, Composition, Scalars
from blackswan.reference.training import flatten, split

STATE = ("parameter", "exp_avg", "exp_avg_sq")
EMBEDDING = "model.embed_tokens.weight"
Wrong = Callable[[Made, Scalars], str]


def _wrong(operation: str, pedigree: str, at: Callable[[str], bool] = bool) -> Callable[[Wrong], Wrong]:
    """Enters a function that makes, of the loop with those scalars, the calls of an operation whose paths are chosen."""

    def register(wrong: Wrong) -> Wrong:
        def change(scalars: Scalars) -> Change:
            return lambda made: wrong(made, scalars) if made.operation == operation and at(made.path) else made.run()

        def make(correct: Composition) -> Composition:
            return varied(correct, change)

        mutant("pretrain_steps", pedigree, name=wrong.__name__, doc=wrong.__doc__)(make)
        return wrong

    return register


def _of_gradient(path: str) -> bool:
    return path.endswith(".gradient")


def _of_validation(path: str) -> bool:
    """Whether the call averages the validation loss, rather than the loss or the gradient of a step."""
    return not path.startswith("steps.")


def _frozen(made: Made) -> str:
    """A step that leaves the parameter and its moments where they were."""
    before = {name: made.tape.values[made.arguments[name]] for name in STATE}
    result = made.run()
    made.tape.values |= {f"{made.path}.{name}": value for name, value in before.items()}
    return result


def _averaged(made: Made, average: Callable[[Array], Array]) -> str:
    """Another average of the micro-batches' gradients or losses, [micro-batches, …]."""
    result = made.run()
    made.tape.values[result] = average(made.tape.values[made.arguments["gradients"]])
    return result


@_wrong("adamw_step", "own", lambda path: path.endswith(EMBEDDING))
def pretrain_embedding_frozen(made: Made, _: Scalars) -> str:
    """The embedding is not trained."""
    return _frozen(made)


@_wrong("adamw_step", "own", lambda path: path.endswith("norm.weight"))
def pretrain_norms_frozen(made: Made, _: Scalars) -> str:
    """The weights of norms are not trained."""
    return _frozen(made)


@_wrong("adamw_step", "own", lambda path: path.endswith(".bias"))
def pretrain_biases_frozen(made: Made, _: Scalars) -> str:
    """The biases of queries, keys and values are not trained."""
    return _frozen(made)


@_wrong("adamw_step", "own", lambda path: path.endswith(EMBEDDING))
def pretrain_tied_head_updated_twice(made: Made, scalars: Scalars) -> str:
    """A tied head takes a step of its own, on the matrix of the embedding."""
    result, tape = made.run(), made.tape
    if scalars["tied"]:
        state = {name: tape.values[f"{made.path}.{name}"] for name in STATE}
        update = {name: made.arguments[name] for name in ("step", "learning_rate", "weight_decay")}
        again = tape.operation("adamw_step").run({**state, "gradient": tape.values[made.arguments["gradient"]], **update})
        tape.values |= {f"{made.path}.{name}": again[name] for name in STATE}
    return result


@_wrong("average_gradients", "S7", _of_gradient)
def pretrain_last_micro_batch_only(made: Made, _: Scalars) -> str:
    """Only the last micro-batch's gradient counts."""
    return _averaged(made, lambda parts: parts[-1])


@_wrong("average_gradients", "P31", lambda path: not _of_validation(path))
def pretrain_micro_batches_weighted_alike(made: Made, _: Scalars) -> str:
    """Micro-batches weighted alike that predict different numbers of tokens."""
    return _averaged(made, lambda parts: parts.mean(axis=0))


@_wrong("average_gradients", "P32", _of_gradient)
def pretrain_micro_batches_summed(made: Made, _: Scalars) -> str:
    """Gradients of micro-batches summed, not averaged."""
    return _averaged(made, lambda parts: parts.sum(axis=0))


@_wrong("average_gradients", "S12", _of_validation)
def pretrain_validation_mean_of_batch_means(made: Made, _: Scalars) -> str:
    """Validation loss as mean of the means of unequal batches."""
    return _averaged(made, lambda parts: parts.mean(axis=0))


@_wrong("average_gradients", "own", _of_validation)
def pretrain_validation_of_last_batch(made: Made, _: Scalars) -> str:
    """Validation loss of the last batch alone."""
    return _averaged(made, lambda parts: parts[-1])


@_wrong("adamw_step", "own")
def pretrain_decays_vectors(made: Made, scalars: Scalars) -> str:
    """Weight decay on norms and biases too."""
    return made.run(weight_decay=scalars.get("weight_decay", 0.1))


@_wrong("adamw_step", "own")
def pretrain_decays_seen_rows_only(made: Made, _: Scalars) -> str:
    """Lazy AdamW: no weight decay where there never was a gradient."""
    before = made.tape.values[made.arguments["parameter"]]
    moments = (made.tape.values[made.arguments[name]] for name in ("gradient", "exp_avg"))
    seen = np.any([moment != 0 for moment in moments], axis=0)
    result = made.run()
    made.tape.values[result] = np.where(seen, made.tape.values[result], before)
    return result


@_wrong("clip_by_global_norm", "S4")
def pretrain_clips_each_tensor(made: Made, scalars: Scalars) -> str:
    """Each tensor clipped by its own norm."""
    result, limit = made.run(), scalars.get("max_norm", 1.0)
    parts = split(made.tape.values[made.arguments["gradients"]][0], list(parameter_shapes(scalars).values()))
    factors = [limit / max(np.sqrt((part * part).sum()), limit) for part in parts]
    made.tape.values[f"{made.path}.gradients"] = flatten([part * factor for part, factor in zip(parts, factors, strict=True)])[None]
    return result


@_wrong("clip_by_global_norm", "own")
def pretrain_reports_clipped_norm(made: Made, scalars: Scalars) -> str:
    """Gradient norm recorded after clipping."""
    result, norm = made.run(), f"{made.path}.norm"
    made.tape.values[norm] = np.minimum(made.tape.values[norm], made.tape.values[norm].dtype.type(scalars.get("max_norm", 1.0)))
    return result


@_wrong("adamw_step", "P35")
def pretrain_step_count_stuck(made: Made, _: Scalars) -> str:
    """Every step is corrected as the first."""
    return made.run(step=1)


@mutant("pretrain_steps", "S6")
def pretrain_moments_shared(correct: Composition) -> Composition:
    """One pair of moments for the tensors of one name in all layers."""

    def change_for(scalars: Scalars) -> Change:
        del scalars
        written: dict[str, dict[str, Array]] = {}

        def shared(made: Made) -> str:
            """Tensors of one name in different layers read and write one pair of moments."""
            if made.operation != "adamw_step":
                return made.run()
            name = ".".join(part for part in made.path.partition(".adamw.")[2].split(".") if not part.isdecimal())
            found = {f"{made.path}.shared.{moment}": value for moment, value in written.get(name, {}).items()}
            result = made.run(**{path.rpartition(".")[2]: made.tape.put(path, value) for path, value in found.items()})
            written[name] = {moment: made.tape.values[f"{made.path}.{moment}"] for moment in STATE[1:]}
            return result

        return shared

    return varied(correct, change_for)
