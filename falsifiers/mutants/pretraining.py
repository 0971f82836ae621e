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


def _on(operation: str, change: Change, chosen: Callable[[str], bool] = bool) -> Change:
    """The change, where a call of the operation stands at a chosen path."""
    return lambda made: change(made) if made.operation == operation and chosen(made.path) else made.run()


def _is_average(path: str) -> bool:
    """Whether the call averages the loss or the gradient of a step, rather than the validation loss."""
    return path.startswith("steps.")


def _frozen(made: Made) -> str:
    """A step that leaves the parameter and its moments where they were."""
    before = {name: made.tape.values[made.arguments[name]] for name in STATE}
    result = made.run()
    made.tape.values |= {f"{made.path}.{name}": value for name, value in before.items()}
    return result


def _unweighted(made: Made) -> str:
    """A mean of the micro-batches' means, whatever they count."""
    result = made.run()
    made.tape.values[result] = made.tape.values[made.arguments["gradients"]].mean(axis=0)
    return result


@mutant("pretrain_steps", "own")
def pretrain_embedding_frozen(correct: Composition) -> Composition:
    """The embedding is not trained."""
    return varied(correct, lambda _: _on("adamw_step", _frozen, lambda path: path.endswith(EMBEDDING)))


@mutant("pretrain_steps", "own")
def pretrain_norms_frozen(correct: Composition) -> Composition:
    """The weights of norms are not trained."""
    return varied(correct, lambda _: _on("adamw_step", _frozen, lambda path: path.endswith("norm.weight")))


@mutant("pretrain_steps", "own")
def pretrain_biases_frozen(correct: Composition) -> Composition:
    """The biases of queries, keys and values are not trained."""
    return varied(correct, lambda _: _on("adamw_step", _frozen, lambda path: path.endswith(".bias")))


@mutant("pretrain_steps", "own")
def pretrain_tied_head_updated_twice(correct: Composition) -> Composition:
    """A tied head takes a step of its own, on the matrix of the embedding."""

    def twice(made: Made) -> str:
        result, tape = made.run(), made.tape
        state = {name: tape.values[f"{made.path}.{name}"] for name in STATE}
        update = {name: made.arguments[name] for name in ("step", "learning_rate", "weight_decay")}
        again = tape.operation("adamw_step").run({**state, "gradient": tape.values[made.arguments["gradient"]], **update})
        tape.values |= {f"{made.path}.{name}": again[name] for name in STATE}
        return result

    def change_for(scalars: Scalars) -> Change:
        return _on("adamw_step", twice, lambda path: bool(scalars["tied"]) and path.endswith(EMBEDDING))

    return varied(correct, change_for)


@mutant("pretrain_steps", "S7")
def pretrain_last_micro_batch_only(correct: Composition) -> Composition:
    """Only the last micro-batch's gradient counts."""

    def last(made: Made) -> str:
        result = made.run()
        made.tape.values[result] = made.tape.values[made.arguments["gradients"]][-1]
        return result

    return varied(correct, lambda _: _on("average_gradients", last, lambda path: path.endswith(".gradient")))


@mutant("pretrain_steps", "P31")
def pretrain_micro_batches_weighted_alike(correct: Composition) -> Composition:
    """Micro-batches weighted alike that predict different numbers of tokens."""
    return varied(correct, lambda _: _on("average_gradients", _unweighted, _is_average))


@mutant("pretrain_steps", "P32")
def pretrain_micro_batches_summed(correct: Composition) -> Composition:
    """Gradients of micro-batches summed, not averaged."""

    def summed(made: Made) -> str:
        result = made.run()
        made.tape.values[result] = made.tape.values[made.arguments["gradients"]].sum(axis=0)
        return result

    return varied(correct, lambda _: _on("average_gradients", summed, lambda path: path.endswith(".gradient")))


@mutant("pretrain_steps", "S12")
def pretrain_validation_mean_of_batch_means(correct: Composition) -> Composition:
    """Validation loss as mean of the means of unequal batches."""
    return varied(correct, lambda _: _on("average_gradients", _unweighted, lambda path: not _is_average(path)))


@mutant("pretrain_steps", "own")
def pretrain_validation_of_last_batch(correct: Composition) -> Composition:
    """Validation loss of the last batch alone."""

    def last(made: Made) -> str:
        result = made.run()
        made.tape.values[result] = made.tape.values[made.arguments["gradients"]][-1]
        return result

    return varied(correct, lambda _: _on("average_gradients", last, lambda path: not _is_average(path)))


@mutant("pretrain_steps", "own")
def pretrain_decays_vectors(correct: Composition) -> Composition:
    """Weight decay on norms and biases too."""

    def change_for(scalars: Scalars) -> Change:
        return _on("adamw_step", lambda made: made.run(weight_decay=scalars.get("weight_decay", 0.1)))

    return varied(correct, change_for)


@mutant("pretrain_steps", "own")
def pretrain_decays_seen_rows_only(correct: Composition) -> Composition:
    """Lazy AdamW: no weight decay where there never was a gradient."""

    def lazy(made: Made) -> str:
        before = made.tape.values[made.arguments["parameter"]]
        moments = (made.tape.values[made.arguments[name]] for name in ("gradient", "exp_avg"))
        seen = np.any([moment != 0 for moment in moments], axis=0)
        result = made.run()
        made.tape.values[result] = np.where(seen, made.tape.values[result], before)
        return result

    return varied(correct, lambda _: _on("adamw_step", lazy))


@mutant("pretrain_steps", "S4")
def pretrain_clips_each_tensor(correct: Composition) -> Composition:
    """Each tensor clipped by its own norm."""

    def change_for(scalars: Scalars) -> Change:
        shapes, limit = list(parameter_shapes(scalars).values()), scalars.get("max_norm", 1.0)

        def clipped(part: Array) -> Array:
            norm = np.sqrt((part * part).sum())
            return part * (limit / norm) if norm > limit else part

        def each(made: Made) -> str:
            result, tape = made.run(), made.tape
            parts = split(tape.values[made.arguments["gradients"]][0], shapes)
            tape.values[f"{made.path}.gradients"] = flatten([clipped(part) for part in parts])[None]
            return result

        return _on("clip_by_global_norm", each)

    return varied(correct, change_for)


@mutant("pretrain_steps", "own")
def pretrain_reports_clipped_norm(correct: Composition) -> Composition:
    """Gradient norm recorded after clipping."""

    def change_for(scalars: Scalars) -> Change:
        def after(made: Made) -> str:
            result, norm = made.run(), f"{made.path}.norm"
            made.tape.values[norm] = np.minimum(made.tape.values[norm], made.tape.values[norm].dtype.type(scalars.get("max_norm", 1.0)))
            return result

        return _on("clip_by_global_norm", after)

    return varied(correct, change_for)


@mutant("pretrain_steps", "P35")
def pretrain_step_count_stuck(correct: Composition) -> Composition:
    """Every step is corrected as the first."""
    return varied(correct, lambda _: _on("adamw_step", lambda made: made.run(step=1)))


@mutant("pretrain_steps", "S6")
def pretrain_moments_shared(correct: Composition) -> Composition:
    """One pair of moments for the tensors of one name in all layers."""

    def change_for(scalars: Scalars) -> Change:
        del scalars
        written: dict[str, dict[str, Array]] = {}

        def shared(made: Made) -> str:
            """Tensors of one name in different layers read and write one pair of moments."""
            name = ".".join(part for part in made.path.partition(".adamw.")[2].split(".") if not part.isdecimal())
            found = {f"{made.path}.shared.{moment}": value for moment, value in written.get(name, {}).items()}
            result = made.run(**{path.rpartition(".")[2]: made.tape.put(path, value) for path, value in found.items()})
            written[name] = {moment: made.tape.values[f"{made.path}.{moment}"] for moment in STATE[1:]}
            return result

        return _on("adamw_step", shared)

    return varied(correct, change_for)
