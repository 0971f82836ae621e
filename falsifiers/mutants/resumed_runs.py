"""Wrong runs that go on: their state, an interruption or another end, and the model that they go on with."""

import hashlib
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from blackswan.falsifiers.mutants.parallel import without_moments
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl.training_state import save_state

# Resuming


wrong_steps("impl.fit:_Run._continue_from", resume_forgets_moments=("Moments are zero after continuing.", without_moments))


wrong_step("impl.fit:_Run.__init__", name="fit_validates_on_two_samples_or_more", doc="A single validation sample is as good as none.")(
    lambda init, run, pipeline, train, validation, output: init(
        run, pipeline, train, validation if validation is not None and len(validation) > 1 else None, output
    )
)


wrong_step("impl.fit:remove_left_over", name="state_half_written_stays", doc="What a kill left of a state stays in its folder for good.")(
    lambda *_: None
)


@wrong_step("impl.fit:_Run._save")
def state_taken_beside_the_next_step(save: Any, run: Any) -> None:
    """A thread hashes how far a run is, takes its state and writes it, while the next step is made."""
    if run.progress.step == 0 or run.progress.finished:
        save(run)
        return
    progress = run.progress

    def beside() -> None:
        hashlib.sha256(repr(progress).encode())  # which a slow disk holds up until the next step, so that no race decides
        save_state(run.output / "state", progress, run.trainer.state())

    threading.Thread(target=beside).start()


@wrong_step("impl.fit:_Run._continue_from")
def resume_forgets_schedule(continue_from: Any, run: Any, progress: Any, tensors: Any) -> None:
    """Schedule and bias correction begin again after continuing."""
    continue_from(run, progress, tensors)
    run.trainer.optimiser.steps = 0


@wrong_step("impl.fit:_Run._continue_from")
def resume_knows_4_from_4_0(continue_from: Any, run: Any, progress: Any, tensors: Any) -> None:
    """A state belongs to the run's settings as they are spelled, so that one with 4 for 4.0 is the state of another run."""
    if progress.run != run.progress.run:
        raise ValueError("the state of another run")
    continue_from(run, progress, tensors)


@wrong_step("impl.fit:_Run._continue_from")
def resume_spells_the_run_anew(continue_from: Any, run: Any, progress: Any, tensors: Any) -> None:
    """A run that goes on with 4 for 4.0 writes states of the run as it is spelled now, from which nobody can go on."""
    own = run.progress.run
    continue_from(run, progress, tensors)
    run.progress = replace(progress, run=own)


@wrong_step("impl.fit:_Run._continue_from")
def resume_of_an_ended_run_without_tensors(continue_from: Any, run: Any, progress: Any, tensors: Any) -> None:
    """A run that has ended is taken at its word: what it left is not loaded."""
    continue_from(run, progress, run.trainer.state() if progress.finished else tensors)


@wrong_step("impl.fit:_Run.train")
def ended_run_leaves_the_best_epoch(train: Any, run: Any) -> Any:
    """A run that has ended leaves the model at the best epoch, where files and documents say the last."""
    result, best = train(run), run.output / "best" / "adapter_model.safetensors"
    if result.best_epoch not in (None, len(result.epochs)):
        stored = {name.removeprefix("base_model.model."): value for name, value in load_file(best).items()}
        run.pipeline.classifier.load_state_dict(stored, strict=False)
    return result


@wrong_step("impl.fit:_Run.train")
def interrupted_run_leaves_what_it_began_with(train: Any, run: Any) -> Any:
    """Ctrl-C takes the steps back in the model in memory, though the state in the folder has them."""
    begun = {name: value.clone() for name, value in run.trainer.state().items()}
    try:
        return train(run)
    except KeyboardInterrupt:
        run.trainer.load_state(begun)
        raise


@wrong_step("impl.trainer:Trainer.load_state")
def resume_forgets_rates(load_state: Any, trainer: Any, state: Any) -> None:
    """Rates that were set are the schedule's again after continuing."""
    kept = list(trainer.learning_rates)
    load_state(trainer, state)
    trainer.learning_rates = kept


wrong_steps(
    "impl.fit:_Run._continue_from",
    by=lambda changes: lambda continue_from, run, progress, tensors: continue_from(run, replace(progress, **changes), tensors),
    resume_forgets_position=("The epoch begins again after continuing, its first samples are read twice.", {"position": 0}),
    resume_forgets_best_loss=("The first epoch after continuing is the best one.", {"best_loss": None}),
    resume_forgets_patience=("Epochs without a better loss are counted from zero after continuing.", {"stale_epochs": 0}),
    resume_forgets_loss_sum=("The epoch's training loss leaves out the steps before the kill.", {"loss_sum": 0.0}),
    resume_forgets_seconds=("The epoch's seconds leave out the steps before the kill.", {"epoch_seconds": 0.0}),
)


@wrong_step("impl.fit:_Run._save")
def resume_state_before_the_step(save: Any, run: Any) -> None:
    """The state counts a step whose tensors it does not have yet."""
    kept, state = run.trainer.state, run.trainer.state()
    earlier = run.__dict__.get("_earlier", state)
    run.trainer.state = lambda: {**earlier, "step": state["step"]}
    try:
        save(run)
    finally:
        run.trainer.state = kept
    run.__dict__["_earlier"] = state


@wrong_step("impl.training_state:write_atomically")
def resume_state_written_in_place(_: Any, path: Any, content: bytes) -> None:
    """The state is written over the old one; a kill leaves half of it."""
    with path.open("wb") as file:
        for part in range(4):
            file.write(content[part * len(content) // 4 : (part + 1) * len(content) // 4])
            file.flush()
            os.fsync(file.fileno())


@wrong_step("impl.training_state:write_atomically")
def state_written_in_one_call(write_atomically: Any, path: Any, content: bytes) -> None:
    """The state is given to the system once, which may take a piece of it: of more than two gibibytes it always does."""
    descriptor = os.memfd_create(path.name)
    try:
        taken = os.write(descriptor, content)
    finally:
        os.close(descriptor)
    write_atomically(path, content[:taken])


@wrong_step("impl.training_state:write_atomically")
def state_written_elsewhere_first(_: Any, path: Any, content: bytes) -> None:
    """The temporary file is in the folder of such files, which may be on another disk, and where a killed run leaves it."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


@wrong_step("impl.fit:_Run._validate")
def resume_state_counts_an_unfinished_epoch(validate: Any, run: Any) -> Any:
    """The state says that an epoch is over before its validation and its adapters are."""
    kept = run.progress
    run.progress = replace(kept, epoch=min(kept.epoch + 1, run.config.epochs - 1), position=0, loss_sum=0.0, sample_count=0)
    run._save()
    run.progress = kept
    return validate(run)


wrong_step(
    "impl.fit:_differences", name="resume_ignores_what_differs", doc="A run is continued with other settings and samples without a word."
)(lambda _, *__: iter(()))


@wrong_step("impl.fit:_differences")
def resume_takes_missing_for_null(differences: Any, own: Any, stored: Any, *name: str) -> Any:
    """A key that run.json has lost, or has besides, is as good as one that is null."""
    if isinstance(own, dict) and isinstance(stored, dict):
        keys = own.keys() | stored.keys()
        own, stored = ({key: each.get(key) for key in keys} for each in (own, stored))
    return differences(own, stored, *name)


@wrong_step("impl.fit:_differences")
def resume_takes_nearly_for_equal(differences: Any, own: Any, stored: Any, *name: str) -> Any:
    """Numbers of the settings may be nearly what they were."""

    def near(one: Any, other: Any) -> Any:
        if isinstance(one, dict) and isinstance(other, dict):
            return {key: near(value, other.get(key)) for key, value in one.items()}
        return other if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other) else one

    return differences(near(own, stored), stored, *name)


wrong_step(
    "impl.fit:_FREE", name="resume_ignores_most_settings", doc="A run is continued with another alpha, schedule or seed without a word."
)(lambda free: (*free, "lora_alpha", "schedule", "seed"))
wrong_steps(
    "impl.training_state:_digest",
    resume_trusts_damage=("The state's checksum is not looked at.", lambda _, *__: ""),
    resume_trusts_progress=("The state's checksum is that of its tensors alone.", lambda digest, text, tensors: digest(text[:0], tensors)),
    resume_trusts_tensors=(
        "The state's checksum leaves out the content of its tensors.",
        lambda digest, text, tensors: digest(text, dict.fromkeys(tensors, torch.zeros(1))),
    ),
    resume_trusts_ends=(
        "The state's checksum is that of the first 1,024 numbers of each tensor.",
        lambda digest, text, tensors: digest(text, {name: value.reshape(-1)[:1024] for name, value in tensors.items()}),
    ),
)


# Ends


@wrong_step("impl.fit:_Run._epoch")
def fit_interrupted_after_the_epoch(epoch: Any, run: Any) -> None:
    """Ctrl-C ends the run when the epoch is over, however long that takes."""
    kept, run.interrupted = run.interrupted, lambda: False
    try:
        epoch(run)
    finally:
        run.interrupted = kept


@wrong_step("impl.fit:_Run._epoch")
def states_between_the_steps_of_an_epoch(epoch: Any, run: Any) -> None:
    """No state is written after the last step of an epoch, since the epoch's own comes soon: a kill in its validation takes the steps."""
    save = run._save
    run._save = lambda: None if run.progress.sample_count == len(run.train_samples) and not run.interrupted() else save()
    try:
        epoch(run)
    finally:
        del run._save


@wrong_step("impl.fit:_Run._finish_epoch")
def best_is_what_is_there(finish: Any, run: Any) -> None:
    """An epoch is the best one where the adapter of the best was moved elsewhere, though it is worse."""
    if run.progress.best_loss is not None and not (run.output / "best").exists():
        run.progress = replace(run.progress, best_loss=math.inf)
    finish(run)


@wrong_step("impl.fit:_interruptible")
@contextmanager
def fit_keeps_interrupts(interruptible: Any, workers: int) -> Iterator[Any]:
    """The first Ctrl-C after a run is still swallowed."""
    with interruptible(workers) as interrupted:
        handler = signal.getsignal(signal.SIGINT)
        yield interrupted
    signal.signal(signal.SIGINT, handler)


@wrong_step("impl.folder:_locked")
@contextmanager
def failed_write_stays_open(locked: Any, folder: Path) -> Iterator[None]:
    """The folder of a write that fails stays open, and its lock with it, until the process ends."""
    with locked(folder):
        try:
            yield
        except OSError:
            os.open(folder, os.O_RDONLY)
            raise


@wrong_step("impl.fit:_interruptible")
@contextmanager
def failed_fit_keeps_interrupts(interruptible: Any, workers: int) -> Iterator[Any]:
    """The first Ctrl-C after a run that ended with an error is still swallowed."""
    with interruptible(workers) as interrupted:
        handler = signal.getsignal(signal.SIGINT)
        try:
            yield interrupted
            return
        except BaseException as error:
            raised = error
    signal.signal(signal.SIGINT, handler)
    raise raised


@wrong_step("impl.nonfinite:dispatch.wrapping")
@contextmanager
def failed_fit_stays_watched(wrapping: Any, around: Any) -> Iterator[None]:
    """Once the origin of a value that is not finite was found, every later call is still looked at."""
    from blackswan.impl import dispatch

    try:
        with wrapping(around):
            yield
    except Exception:
        dispatch._around = around
        raise


@wrong_step("impl.folder:flush")
def folder_leaves_files_open(flush: Any, path: Any) -> None:
    """A file that was flushed stays open."""
    flush(path)
    os.open(path, os.O_RDONLY)


# Another model


@wrong_step("impl.fit:_Run._continue_from")
def resume_needs_the_last_adapter(go_on: Any, run: Any, progress: Any, tensors: Any) -> None:
    """A run that has finished an epoch does not go on where its last adapter was moved elsewhere."""
    if progress.epoch and not (run.output / "last").is_dir():
        raise FileNotFoundError(f"{run.output / 'last'}: the adapter of a finished epoch is gone")
    go_on(run, progress, tensors)


wrong_step(
    "impl.samples:Samples.digest",
    name="samples_known_otherwise_than_before",
    doc="Samples are known by another digest than in earlier versions, whose runs are refused as those of other samples.",
)(lambda digest, samples: hashlib.sha256(digest(samples).encode()).hexdigest())
wrong_step(
    "impl.fit:_weights_digest",
    name="base_known_otherwise_than_before",
    doc="A base is known by another digest than in earlier versions, whose runs are refused as those of another model.",
)(lambda digest, model: hashlib.sha256(digest(model).encode()).hexdigest())


@wrong_step("impl.fit:_weights_digest")
def resume_ignores_quantised_weights(digest: Any, classifier: Any) -> Any:
    """A run is continued on other weights in NF4."""
    with mock.patch.object(classifier, "named_buffers", return_value=[]):
        return digest(classifier)


@wrong_step("impl.fit:_weights_digest")
def identity_with_what_is_trained(digest: Any, classifier: Any) -> Any:
    """Trained tensors belong to the identity of a run, so that a model that has moved cannot go on with its own."""
    trained = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        return digest(classifier)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@wrong_step("impl.pipeline:ClassifyPipeline.start")
def failed_run_leaves_its_trainer(start: Any, self: Any, total_steps: int | None, *given: Any) -> Any:
    """A run that ends at a number which is not finite leaves its schedule and its moments to the steps after it."""
    failed = total_steps is None and isinstance(sys.exception(), FloatingPointError)
    return self.trainer if failed else start(self, total_steps, *given)


@wrong_step("impl.fit:_Run.__init__")
def run_of_the_current_folder(init: Any, self: Any, pipeline: Any, train: Any, validation: Any, output: Path) -> None:
    """A run goes on in another folder when the program leaves the one that its output's name begins in."""
    init(self, pipeline, train, validation, Path(os.path.relpath(output)))
