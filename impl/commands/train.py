"""Trains low-rank updates and a head on a labelled corpus.

The output folder then holds last/ and best/ (adapters in PEFT's format), metrics.jsonl, config.yaml and statistics.yaml (what `python -m
contracts check` judges), run.json and state/ (from which --resume goes on).
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from blackswan.impl import settings
from blackswan.impl.commands.common import (
    DEVICE_HELP,
    BadInput,
    Interrupted,
    TrainingFailed,
    memory_of_a_step,
    parameter_count,
    require_place,
)
from blackswan.impl.folder import LOCK, PARTIAL, naming

if TYPE_CHECKING:
    import torch

    from blackswan.impl.config import ClassifyConfig
    from blackswan.impl.fit import EpochRecord, FitResult, StepRecord
    from blackswan.impl.group import Group
    from blackswan.impl.metrics import MetricsFile, TensorBoard
    from blackswan.impl.pipeline import ClassifyPipeline
    from blackswan.impl.samples import Samples

CONFIG, STATISTICS, METRICS = "config.yaml", "statistics.yaml", "metrics.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--model", metavar="PATH", type=Path, required=True, help="checkpoint folder or .apr file (Llama, Qwen2/2.5, Qwen3)"
    )
    parser.add_argument("--corpus", metavar="FILE", type=Path, required=True, help="JSONL: {input, label} or {input, labels} a line")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder of the run; new, or with --resume the run's own")
    parser.add_argument("--validation", metavar="FILE", type=Path, help="corpus for validation, in the place of a part of --corpus")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file of settings; options on the command line come before it")
    parser.add_argument("--device", default="cpu", metavar="NAME", help=DEVICE_HELP)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output: the same command, and this option")
    parser.add_argument("--save-every", metavar="N", type=_count, help="write the state after every N steps too (default: every epoch)")
    parser.add_argument("--tensorboard", metavar="DIR", type=Path, help="write the metrics for TensorBoard as well")
    settings.add_options(parser)


def run(options: argparse.Namespace) -> None:
    """Trains, alone or as one of torchrun's workers, of which the first one speaks and writes."""
    given = (settings.read_file(options.config) if options.config else {}, settings.given_options(options))
    from blackswan.impl.group import joined, restarted

    resume = options.resume or (restarted() and (options.output / "run.json").is_file())
    _require_usable(options.output, resume)
    with joined(options.device) as (group, device):
        _train(options, given, group, device, resume)


def _train(
    options: argparse.Namespace, given: tuple[dict[str, settings.Setting], ...], group: "Group", device: "torch.device", resume: bool
) -> None:
    from blackswan.impl.folder import sole_writer
    from blackswan.impl.ledger import reserve
    from blackswan.impl.metrics import TensorBoard
    from blackswan.impl.pipeline import ClassifyPipeline
    from blackswan.impl.residency import require_residency

    config = settings.resolve(parameter_count(options.model), *given)
    train, validation = _samples(options, config, group)
    config = _with_weights(config, train)
    _require_a_rate(config, len(train))
    board = TensorBoard(options.tensorboard) if options.tensorboard and group.rank == 0 else None
    with reserve(device, _memory(options.model, config, train, validation, device)):
        pipeline = ClassifyPipeline.from_pretrained(options.model, config, device=device, group=group)
        require_residency(pipeline.classifier, pipeline.trainer.optimiser, device)
        if group.rank == 0:
            with sole_writer(options.output):
                _lead(options, pipeline, train, validation, board, resume)
        else:
            pipeline.fit(train, validation, options.output, resume=resume, save_every=options.save_every)


def _lead(
    options: argparse.Namespace,
    pipeline: "ClassifyPipeline",
    train: "Samples",
    validation: "Samples | None",
    board: "TensorBoard | None",
    resume: bool,
) -> None:
    """The run, as the one worker that speaks and writes."""
    from blackswan.impl.metrics import MetricsFile

    config, output = pipeline.config, options.output
    _require_usable(output, resume)  # again, now that nobody else can begin here
    if not resume:
        _write_for_rules(output, config, parameter_count(options.model), train)
    print(pipeline.summary())
    print(f"samples:    {len(train)} to train on, {0 if validation is None else len(validation)} for validation")
    if truncated := train.statistics().truncated:
        print(f"truncated:  {truncated} of the training samples are longer than max_seq_len {config.max_seq_len}: their end is cut off")
    print(f"rules:      blackswan contracts check {output / CONFIG} --statistics {output / STATISTICS}", flush=True)
    watch = _Watch(config, len(train), MetricsFile(output / METRICS), board)
    result = watch.over(
        lambda: pipeline.fit(
            train, validation, output, resume=resume, save_every=options.save_every, on_step=watch.step, on_epoch=watch.epoch
        )
    )
    print(_conclusion(output, result))


def _require_a_rate(config: "ClassifyConfig", samples: int) -> None:
    """As `fit` does, before anything is written."""
    from blackswan.impl.fit import total_steps
    from blackswan.impl.operations.optimisation import learning_rate_schedule
    from blackswan.impl.optimiser import require_a_rate

    steps = total_steps(config, samples)
    require_a_rate(learning_rate_schedule(steps, config.learning_rate, config.warmup_fraction, config.schedule).tolist())


def _memory(model: Path, config: "ClassifyConfig", train: "Samples", validation: "Samples | None", device: "torch.device") -> int:
    """Bytes that training needs on a CUDA device; 0 elsewhere, where nothing is reserved.

    On the CPU the estimate would take its time, and for other kinds of device it is not known.
    """
    if device.type != "cuda":
        return 0
    longest = max(int(each.lengths().max()) for each in (train, validation) if each is not None)
    return memory_of_a_step(model, config, len(train), longest, device).total


class _Watch:
    """Passes records on to the terminal and the files; turns what ends a run that has begun into what the command ends with."""

    def __init__(self, config: "ClassifyConfig", samples: int, metrics: "MetricsFile", board: "TensorBoard | None") -> None:
        from blackswan.impl.fit import total_steps
        from blackswan.impl.progress import Progress

        steps = total_steps(config, samples)
        self.progress = Progress(sys.stderr, epochs=config.epochs, total_steps=steps, log_interval=config.log_interval)
        self.metrics, self.board, self.steps = metrics, board, 0

    def step(self, record: "StepRecord") -> None:
        """Notes a step. The file comes first: what was shown is in it."""
        self.steps = record.step
        for sink in (self.metrics, self.board, self.progress):
            if sink is not None:
                sink.step(record)

    def epoch(self, record: "EpochRecord") -> None:
        """Notes an epoch."""
        for sink in (self.metrics, self.board, self.progress):
            if sink is not None:
                sink.epoch(record)

    def over(self, fit: Callable[[], "FitResult"]) -> "FitResult":
        """The result of the run."""
        handled = sys.exc_info()[1]  # where a program starts a run after an error
        try:
            return fit()
        except KeyboardInterrupt:
            when = f"after step {self.steps}" if self.steps else "before a step was made"
            raise Interrupted(f"interrupted {when}; {self._further()}") from None
        except FloatingPointError as error:
            raise TrainingFailed(str(error)) from None
        except (OSError, ValueError, RuntimeError) as error:
            if self.steps == 0 and not isinstance(error, RuntimeError):
                raise
            raise TrainingFailed(f"{error} (after step {self.steps}; {self._further()})") from error
        finally:
            self.progress.close()
            if self.board is not None:
                with nullcontext() if sys.exc_info()[1] is handled else suppress(OSError):  # what ended the run is told
                    self.board.close()

    def _further(self) -> str:
        """What the user can do: --resume asks for a run that has begun."""
        begun = (self.metrics.path.parent / "run.json").is_file()
        return "the same command with --resume goes on" if begun else "the same command begins the run"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def _require_usable(output: Path, resume: bool) -> None:
    """The output folder is new or empty, or with --resume that of a run."""
    require_place(output)
    holds_run = (output / "run.json").is_file()
    if resume and not holds_run:
        raise BadInput(f"--resume: {output} holds no run (it has no run.json); leave the option out to start one")
    if holds_run and not resume:
        raise BadInput(f"--output: {output} holds a run already; go on with it by --resume, or choose another folder")
    # A start that was killed at once leaves these; they are written anew.
    if not resume and output.is_dir() and (foreign := sorted(filter(_foreign, (path.name for path in output.iterdir())))):
        raise BadInput(f"--output: {output} is not empty (it has {foreign[0]}); choose another folder")


def _foreign(name: str) -> bool:
    return name not in (CONFIG, STATISTICS, LOCK) and not name.startswith(PARTIAL)


def _samples(options: argparse.Namespace, config: "ClassifyConfig", group: "Group") -> tuple["Samples", "Samples | None"]:
    """Training and validation samples. Raises a ValueError that names the file and line, and the setting where that may be the reason."""
    from blackswan.impl.progress import reading
    from blackswan.impl.samples import read_samples, training_and_validation
    from blackswan.impl.tokens import load_tokenizer

    paths = [path for path in (options.corpus, options.validation) if path is not None]
    if len(paths) > 1 and all(path.exists() for path in paths) and options.corpus.samefile(options.validation):
        raise BadInput(f"--validation: {options.validation} is what is trained on; leave it out, and a part of --corpus validates")
    for path in paths:
        if group.size > 1 and path.is_fifo():
            raise BadInput(f"{path} is a pipe, of which each of the {group.size} workers would read a part; expected a file")
    tokens, stream = load_tokenizer(options.model, config.max_seq_len, config.padding_side), sys.stderr if group.rank == 0 else None
    try:
        kinds = (config.num_classes, config.multi_label)
        samples, *apart = (read_samples(path, tokens, *kinds, reading(path, stream)) for path in paths)
    except ValueError as error:
        if not _is_about_labels(error, paths):
            raise
        kind = "--multi-label" if config.multi_label else "--no-multi-label"
        raise BadInput(f"{error} (the settings are --num-classes {config.num_classes}, {kind})") from None
    train, validation = training_and_validation(samples, apart[0] if apart else None, config.validation_fraction, config.seed)
    if validation is None and config.early_stop_patience is not None:
        raise BadInput("early_stop_patience waits for a better validation loss: it needs --validation or a validation_fraction above 0")
    return train, validation


def _is_about_labels(error: ValueError, paths: list[Path]) -> bool:
    """Whether the error speaks of a label, and not only the name of the file that it begins with."""
    said = str(error)
    for path in paths:
        said = said.removeprefix(str(path))
    return "label" in said


def _with_weights(config: "ClassifyConfig", train: "Samples") -> "ClassifyConfig":
    """The settings with balanced class weights as numbers."""
    from blackswan.impl.samples import balanced_weights

    kind = config.class_weights
    return dataclasses.replace(config, class_weights=balanced_weights(train, kind)) if isinstance(kind, str) else config


def _write_for_rules(output: Path, config: "ClassifyConfig", parameters: int, train: "Samples") -> None:
    """The two files that `python -m contracts check` reads."""
    statistics = train.statistics()
    ratio = ".inf" if math.isinf(statistics.imbalance) else repr(statistics.imbalance)
    output.mkdir(parents=True, exist_ok=True)
    said = f"p99_length: {statistics.length_percentiles[99]}\nimbalance_ratio: {ratio}\n"
    said += f"minority_count: {statistics.minority}\nsample_count: {statistics.total}\n"
    for name, text in ((CONFIG, settings.written(config, parameters)), (STATISTICS, said)):
        with naming(output / name):
            (output / name).write_text(text, encoding="utf-8")


def _conclusion(output: Path, result: "FitResult") -> str:
    text = f"{result.steps} steps, {len(result.epochs)} epochs" + (" (stopped early)" if result.stopped_early else "")
    if result.best_epoch is None:
        return f"{text}; the adapter is {output / 'last'}"
    return (
        f"{text}; the best adapter, of epoch {result.best_epoch}, is {output / 'best'} (validation loss {result.best_validation_loss:.4f})"
    )
