"""Wrong runs where two of their features meet: workers, interrupts, several labels, rates set by hand, continuations, and what is shown."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

# Interrupts

Pretended = tuple[Any, str, Callable[[], Any]]


def _ignored() -> bool:
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def _pretending(pretended: Pretended) -> Callable[..., Any]:
    """`impl.fit`'s way with interrupts, begun where a name of a module is something else."""
    module, name, value = pretended

    @contextmanager
    def interruptible(right: Any, workers: int) -> Iterator[Callable[[], bool]]:
        context = right(workers)
        with mock.patch.object(module, name, value()):
            interrupted = context.__enter__()
        try:
            yield interrupted
        finally:
            context.__exit__(None, None, None)

    return interruptible


wrong_steps(
    "impl.fit:_interruptible",
    by=_pretending,
    interrupts_of_a_program_taken=(
        "A program's own handler of Ctrl-C is not called during a run.",
        (signal, "default_int_handler", lambda: signal.getsignal(signal.SIGINT)),
    ),
    ignored_interrupts_end_a_run=(
        "Ctrl-C ends a run in a program that ignores it, as one that nohup or a script has put in the background.",
        (signal, "default_int_handler", lambda: signal.SIG_IGN if _ignored() else signal.default_int_handler),
    ),
    fit_in_the_main_thread_alone=(
        "A run takes Ctrl-C, which no other thread than the main one can.",
        (threading, "current_thread", lambda: threading.main_thread),
    ),
)


@wrong_step("impl.fit:_interruptible")
@contextmanager
def second_interrupt_waits(interruptible: Any, workers: int) -> Iterator[Callable[[], bool]]:
    """The second Ctrl-C waits for the end of the step too."""
    usual = signal.getsignal(signal.SIGINT)
    with interruptible(workers) as interrupted:
        note: Any = signal.getsignal(signal.SIGINT)

        def again(number: int, frame: Any) -> None:
            note(number, frame)
            signal.signal(signal.SIGINT, again)

        if note is not usual:
            signal.signal(signal.SIGINT, again)
        yield interrupted


wrong_step("impl.fit:_interruptible", name="workers_take_interrupts", doc="Each worker ends after the step in which it was interrupted.")(
    lambda interruptible, _: interruptible(1)
)


@wrong_step("impl.fit:_Run._epoch")
def later_epochs_take_no_interrupts(epoch: Any, run: Any) -> None:
    """Ctrl-C ends a run in its first epoch alone."""
    if run.progress.epoch:
        run.interrupted = lambda: False
    epoch(run)


@wrong_step("impl.fit:_Run.train")
def interrupted_end_of_an_epoch(train: Any, run: Any) -> Any:
    """One more step, of the next epoch, is made after Ctrl-C at the end of an epoch."""
    interrupted = run.interrupted
    run.interrupted = lambda: run.progress.position > 0 and interrupted()
    return train(run)


@wrong_step("impl.pipeline:ClassifyPipeline.fit")
def interrupted_fit_leaves_its_trainer(fit: Any, pipeline: Any, *given: Any, **options: Any) -> Any:
    """An interrupted run leaves its schedule and its moments to what comes after."""
    start = pipeline.start
    with mock.patch.object(pipeline, "start", lambda steps, weights=None: None if steps is None else start(steps, weights)):
        result = fit(pipeline, *given, **options)
    start(None)
    return result


# Rates set by hand, and what a continuation is compared by


@wrong_step("impl.trainer:Trainer._step")
def set_rate_holds_for_all_steps(step: Any, trainer: Any, gradient: Any) -> Any:
    """A rate that was set in a run holds for all later steps, and the schedule is over."""
    rates, at = trainer.learning_rates, trainer.optimiser.steps
    scheduled = trainer.__dict__.setdefault("_scheduled", list(rates))
    if not trainer.endless and rates[at] != scheduled[at]:
        trainer.learning_rates = scheduled[:at] + [rates[at]] * (len(rates) - at)
    return step(trainer, gradient)


wrong_step("impl.fit:fingerprint", name="base_known_by_its_first_mib", doc="A base weight is known by its first MiB in float32.")(
    lambda fingerprint, tensor: fingerprint(tensor.flatten()[: 1 << 18])
)


@wrong_step("impl.fit:fingerprint")
def base_digest_in_any_order(fingerprint: Any, tensor: Any) -> Any:
    """A run is continued on base weights that changed places."""
    import torch

    return fingerprint(tensor.detach().contiguous().flatten().view(torch.uint8).sort().values)


@wrong_step("impl.fit:_weights_digest")
def base_digest_of_layers(digest: Any, classifier: Any) -> str:
    """A run is continued on another embedding: of the base the weights of its layers alone are compared."""
    embedding = classifier.model.embed_tokens
    with mock.patch.object(embedding, "weight", type(embedding.weight)(embedding.weight.new_zeros(1), requires_grad=False)):
        return str(digest(classifier))


@wrong_step("impl.samples:Samples.digest")
def digest_of_the_first_label(digest: Any, samples: Any) -> str:
    """Only the first of a sample's labels is compared."""
    return str(digest(replace(samples, targets=samples.targets[:, :1] if samples.multi_label else samples.targets)))


wrong_step("impl.samples:Samples.digest", name="digest_of_this_process", doc="Data are compared by a hash that each process salts.")(
    lambda digest, samples: str(hash(digest(samples)))
)


@wrong_step("impl.fit:_differences")
def resume_refuses_class_weights(differences: Any, own: Any, stored: Any, *name: str) -> Any:
    """Class weights count as another setting, since run.json has them as a list."""
    weights = own.get("settings", {}).get("class_weights") if isinstance(own, dict) else None
    if isinstance(weights, list):
        own = {**own, "settings": {**own["settings"], "class_weights": tuple(weights)}}
    return differences(own, stored, *name)


class _Since(int):
    """A number of steps between two states, which are counted after the step `first`."""

    first = 0

    def __rmod__(self, step: int) -> int:
        return (step - self.first) % int(self)


@wrong_step("impl.fit:_Run.open")
def states_counted_since_the_resume(open_: Any, run: Any, resume: bool) -> None:
    """A run that goes on counts the steps between two states from where it goes on."""
    open_(run, resume)
    if run.save_every is not None:
        run.save_every = _Since(run.save_every)
        run.save_every.first = run.progress.step


@wrong_step("impl.fit:load_state")
def states_in_folders_of_letters(load: Any, folder: Any) -> Any:
    """A state is called damaged where its folder's name holds a byte that is no letter."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{folder}: damaged ({error})") from None
    return load(folder)


@wrong_step("impl.fit:_Run._continue_from")
def resume_forgets_moments_beside_nf4(continue_from: Any, run: Any, *given: Any) -> None:
    """A run with NF4 that is continued starts with moments of zero."""
    continue_from(run, *given)
    if run.config.quantize_nf4:
        run.trainer.optimiser.exp_avg.zero_()


@wrong_step("impl.fit:_Run._continue_from")
def resume_forgets_the_best_of_several_labels(continue_from: Any, run: Any, progress: Any, tensors: Any) -> None:
    """The first epoch after continuing is the best one where samples have several labels."""
    continue_from(run, replace(progress, best_loss=None) if run.config.multi_label else progress, tensors)


# What a run finds, and what it leaves where it fails


@wrong_step("impl.fit:_Run._begin_or_compare")
def run_begins_over_a_state(begin: Any, run: Any, resume: bool) -> None:
    """A run begins where the state of another one is, which it writes over."""
    with mock.patch("blackswan.impl.fit.STATE", "none"):
        begin(run, resume)


@wrong_step("impl.trainer:Trainer._step")
def failed_step_forgets_its_samples(step: Any, trainer: Any, gradient: Any) -> Any:
    """A step that is not made takes the samples that waited for it."""
    try:
        return step(trainer, gradient)
    except FloatingPointError:
        trainer.discard()
        raise


# What is shown


wrong_step("impl.metrics:TensorBoard._open", name="board_hides_all_before", doc="A run that goes on hides every step before it.")(
    lambda right, board, step: right(board, step and 1)
)


@wrong_step("impl.metrics:TensorBoard.__init__")
def board_made_before_its_run(init: Any, board: Any, folder: Any) -> None:
    """TensorBoard's folder is made at once, so that a new run finds it in its own folder and refuses that."""
    folder.mkdir(parents=True, exist_ok=True)
    init(board, folder)


def _closed_at_the_end(kind: str) -> Callable[..., Any]:
    def over(right: Any, watch: Any, fit: Any) -> Any:
        shown = getattr(watch, kind)
        with mock.patch.object(shown, "close") if shown else nullcontext():
            result = right(watch, fit)
        if shown:
            shown.close()
        return result

    return over


wrong_steps(
    "impl.commands.train:_Watch.over",
    by=_closed_at_the_end,
    board_left_open_by_an_interrupt=("The last numbers for TensorBoard stay in memory after Ctrl-C.", "board"),
    message_on_the_line_of_a_step=("The message after Ctrl-C stands behind what was drawn of a step.", "progress"),
)


# Micro-batches by hand


@wrong_step("impl.trainer:Batch.split")
def batches_by_hand_are_whole(split: Any, batch: Any, size: int) -> Any:
    """A batch that is given by hand goes through the model at once, whatever memory that takes."""
    return split(batch, max(size, len(batch.labels)))


# Before a run

wrong_step("impl.commands.train:_memory", name="memory_of_training_texts_alone", doc="A longer text to validate on takes no memory.")(
    lambda memory, model, config, train, _, device: memory(model, config, train, None, device)
)


@wrong_step("impl.commands.train:_memory")
def memory_of_texts_before_they_are_cut(memory: Any, model: Any, config: Any, train: Any, *given: Any) -> Any:
    """The longest text counts as it was before it was cut to the longest sample."""
    with mock.patch.object(type(train), "lengths", lambda samples: samples.text_lengths):
        return memory(model, config, train, *given)


@wrong_step("impl.commands.train:_train")
def memory_given_back_before_the_run(train: Any, *given: Any) -> Any:
    """The command gives its reserved memory back before the model is trained, and another process may take it."""
    from blackswan.impl import ledger

    reserve = ledger.reserve

    def at_once(*asked: Any) -> Any:
        with reserve(*asked):
            return nullcontext()

    with mock.patch.object(ledger, "reserve", at_once):
        return train(*given)


wrong_step("impl.pipeline:ClassifyPipeline._require_updates", name="merged_models_are_trained", doc="A merged model's head is trained.")(
    lambda *_: None
)


@wrong_step("impl.pipeline:_require_fitting")
def pipeline_of_any_tokens(fitting: Any, architecture: Any, config: Any, tokens: Any) -> None:
    """A tokenizer may have more tokens than the model has embeddings."""
    fitting(replace(architecture, vocab=max(architecture.vocab, tokens.vocab)), config, tokens)


@wrong_step("impl.pipeline:_require_fitting")
def pipeline_of_any_length(fitting: Any, architecture: Any, config: Any, tokens: Any) -> None:
    """Texts may be longer than the model's positions."""
    fitting(replace(architecture, max_positions=max(architecture.max_positions, config.max_seq_len)), config, tokens)


@wrong_step("impl.pipeline:ClassifyPipeline.summary")
def summary_without_double_quantisation(summary: Any, pipeline: Any) -> str:
    """Weights whose scales are quantised in turn are called NF4, and a merged model's updates are not."""
    text = str(summary(pipeline))
    return text.replace(" with double quantisation", "").replace(", merged into the base weights", "")


@wrong_step("impl.commands.train:_train")
def memory_of_a_share_of_a_batch(train: Any, options: Any, given: Any, group: Any, *others: Any) -> None:
    """A worker reserves memory for its share of a micro-batch, where it computes whole ones."""
    from blackswan.impl.commands.common import memory_of_a_step as right

    def shared(model: Any, config: Any, *named: Any) -> Any:
        return right(model, replace(config, batch_size=-(-config.batch_size // group.size)), *named)

    with mock.patch("blackswan.impl.commands.train.memory_of_a_step", shared):
        train(options, given, group, *others)


# Settings of steps, in a run of another dtype than float32 or on NF4


@wrong_step("impl.pipeline:ClassifyPipeline._trainer")
def run_in_16_bits_not_clipped(make: Callable[..., Any], pipeline: Any, *given: Any) -> Any:
    """A gradient has any norm in bfloat16."""
    trainer = make(pipeline, *given)
    if pipeline.config.dtype == "bfloat16":
        trainer.max_norm = float("inf")
    return trainer


@wrong_step("impl.pipeline:ClassifyPipeline._trainer")
def run_on_nf4_without_decay(make: Callable[..., Any], pipeline: Any, *given: Any) -> Any:
    """Nothing decays where base weights are in NF4 and a sample has several labels."""
    trainer = make(pipeline, *given)
    if pipeline.config.quantize_nf4 and pipeline.config.multi_label:
        trainer.optimiser.weight_decay = 0.0
    return trainer


@wrong_step("impl.fit:_Run._update")
def run_takes_what_waits(update: Any, run: Any, indices: Any, step: int) -> Any:
    """Samples that a callback left waiting are part of a run's next step."""
    run.trainer.discard = lambda: delattr(run.trainer, "discard")
    return update(run, indices, step)
