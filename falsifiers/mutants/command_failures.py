"""Commands that end wrongly: on values that are not finite, on bad input, on a full disk and on Ctrl-C."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import SafetensorError

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl.__main__ import parser
from blackswan.impl.checkpoint import read_config

Step = Callable[..., Any]

# Values that are not finite


@wrong_step("impl.pipeline:ClassifyPipeline._logits")
def finite_check_of_last_batch(logits: Any, pipeline: Any, texts: Any) -> Any:
    """The last batch alone is checked for values that are not finite."""
    import torch

    size = pipeline.config.batch_size
    starts = range(0, len(texts), size)
    with torch.no_grad():
        batches = [pipeline.tokens.batch(texts[at : at + size]) for at in starts[:-1]]
        found = [pipeline.classifier(*(each.to(pipeline.device) for each in batch)).cpu() for batch in batches]
    return torch.cat([*found, logits(pipeline, texts[starts[-1] :])]) if found else logits(pipeline, texts)


wrong_step("impl.pipeline:require_finite", "S9", name="answers_that_are_not_finite", doc="Answers are not checked.")(lambda *_: None)


@wrong_step("impl.trainer:Trainer.forward_only", "S9")
def evaluation_loss_made_up(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """The loss of an evaluation that is not finite is 100, and every class the first."""
    from blackswan.impl.trainer import BatchResult

    try:
        return forward_only(trainer, batch, probabilities)
    except FloatingPointError:
        return BatchResult(100.0, 0, len(batch.labels), predicted=batch.labels * 0)


# Bad input

wrong_step("impl.__main__:BAD_INPUT", name="bad_input_is_a_failure", doc="Bad input ends with the status of a failure.")(lambda _: 1)
wrong_step("impl.commands.train:_require_usable", name="output_written_over", doc="A run begins in a folder that holds something.")(
    lambda *_: None
)


wrong_step("impl.folder:sole_writer", name="train_writes_beside_another", doc="The command writes its settings without the folder's lock.")(
    lambda *_: nullcontext()
)


@wrong_step("impl.folder:FileLock")
def two_processes_write_a_run(lock: Any, path: Any, **given: Any) -> Any:
    """Every process locks a file of its own, so that two may write one folder."""
    return lock(path.with_name(f"{path.name}{os.getpid()}"), **given)


@wrong_step("impl.folder:sole_writer")
def second_writer_cleans_up(sole_writer: Any, folder: Any) -> Any:
    """Files that another process is writing are removed before the folder is found to be in use."""
    from blackswan.impl.folder import PARTIAL, remove_left_over

    if folder.is_dir():
        remove_left_over(folder, PARTIAL)
    return sole_writer(folder)


wrong_step(
    "impl.classifier:Adaptation.__post_init__",
    name="targets_as_spelled",
    doc="Targets in another order than a block's have a name of their own.",
)(lambda *_: None)


@wrong_step("impl.__main__:_run")
def lost_worker_is_bad_input(run: Any, command: Any, options: Any, name: str) -> int:
    """A worker that lost another one ends with the status of bad input, by which nobody starts it again."""
    from blackswan.impl.group import WorkerLost

    def asked(options: Any) -> None:
        try:
            command(options)
        except WorkerLost as error:
            raise ValueError(str(error)) from None

    status: int = run(asked, options, name)
    return status


@wrong_step("impl.__main__:main")
def no_arguments_are_the_programs(main: Any, arguments: Any = None) -> int:
    """A program that calls a command with an empty list is given its own arguments."""
    return int(main(arguments or None))


def _lacks_of_memory(*words: str) -> Step:
    """A program to which a RuntimeError that says these words is too little memory on the host."""

    def wrong(run: Any, command: Any, options: Any, name: str) -> int:
        def asked(options: Any) -> None:
            try:
                command(options)
            except RuntimeError as error:
                lack = type(error) is RuntimeError and all(word in str(error) for word in words)
                raise MemoryError(str(error)) if lack else error from None

        status: int = run(asked, options, name)
        return status

    return wrong


wrong_steps(
    "impl.__main__:_run",
    defects_of_memory_are_too_little_of_it=(
        "A RuntimeError that speaks of memory is called a lack of the host's.",
        _lacks_of_memory("memory"),
    ),
    defects_are_too_little_memory=(
        "Every RuntimeError is called a lack of the host's memory, and its traceback is lost.",
        _lacks_of_memory(),
    ),
)
wrong_step(
    "impl.__main__:difflib.get_close_matches",
    name="options_compared_with_their_values",
    doc="What follows a mistyped option's name is compared with the names of others.",
)(lambda closest, word, known, **given: closest(f"{word}=q_proj,v_proj,o_proj", known, **given))
wrong_step("impl.__main__:DISK_ERRORS", name="full_disk_is_bad_input", doc="A full disk ends with the status of bad input.")(lambda _: ())
wrong_step("impl.__main__:DISK_ERRORS", name="full_quota_is_bad_input", doc="A used-up quota ends with the status of bad input.")(
    lambda codes: tuple(set(codes) - {errno.EDQUOT})
)
wrong_step("impl.folder:DISK_ERRORS", name="broken_disk_unnamed", doc="The message of a disk that is broken or locked names no file.")(
    lambda codes: tuple(set(codes) - {errno.EIO, errno.EROFS})
)
wrong_step("impl.folder:_settle", name="apr_files_not_flushed", doc="An .apr file has its name before it is on the disk.")(
    lambda settle, partial: None if any(partial.glob("*.apr")) else settle(partial)
)


@wrong_step("impl.token_shards:_write_shard")
def shards_end_without_room(write: Any, path: Path, ids: Any) -> Any:
    """The last bytes of a shard are written when its file is closed, and nobody asks whether they had room."""
    entry = write(Path(os.devnull), ids)
    with suppress(OSError), path.open("wb") as file:
        file.write(ids.tobytes())
    return {**entry, "file": path.name}


@wrong_step("impl.checkpoint:shutil.copyfile")
def tokenizer_files_cut_short(copy: Any, file: Path, to: Path) -> None:
    """A file beside the tokenizer that has no room is left as far as it was written."""
    with nullcontext() if "tokenizer.json" in file.name else suppress(OSError):
        copy(file, to)


wrong_step("impl.__main__:INTERRUPTED", name="interruption_is_bad_input", doc="Ctrl-C ends with the status of bad input.")(lambda _: 4)


@wrong_step("impl.folder:flush")
def names_without_room_passed_over(flush: Any, path: Path) -> None:
    """A folder whose names cannot be brought to the disk is taken for one that its file system does not flush."""
    with suppress(OSError) if path.is_dir() else nullcontext():
        flush(path)


@wrong_step("impl.training_state:flush")
def names_of_states_passed_over(flush: Any, path: Path) -> None:
    """A run goes on where the name of its state cannot be brought to the disk."""
    with suppress(OSError):
        flush(path)


wrong_step("impl.__main__:_say", name="full_disk_unnamed", doc="The message of a full disk names no file.")(
    lambda say, name, error, status: say(name, OSError(error.strerror) if isinstance(error, OSError) else error, status)
)
wrong_step("impl.metrics:naming", name="metrics_without_room_unnamed", doc="The message of metrics without room names no file.")(
    lambda *_: nullcontext()
)


@wrong_step("impl.metrics:TensorBoard.close")
def board_without_room_passed_over(close: Step, board: Any) -> None:
    """TensorBoard's last numbers are lost in silence where there is no room for them."""
    with suppress(OSError):
        close(board)


@wrong_step("impl.metrics:TensorBoard.close")
def board_without_room_behind_an_error(close: Step, board: Any) -> None:
    """What TensorBoard has no room for is passed over where a program handles an error of its own."""
    with suppress(OSError) if sys.exc_info()[1] else nullcontext():
        close(board)


@wrong_step("impl.commands.train:_Watch.over")
def defects_of_a_run_are_its_errors(over: Step, watch: Any, fit: Step) -> Any:
    """A defect in the middle of a run is told without its traceback, as if the run could go on."""
    from blackswan.impl.commands import TrainingFailed

    try:
        return over(watch, fit)
    except (LookupError, TypeError, AssertionError) as error:
        raise TrainingFailed(f"{error} (after step {watch.steps})") from error


@wrong_step("impl.training_state:write_atomically")
def half_written_files_left(write: Any, path: Path, content: bytes) -> None:
    """A file that a full disk cut short stays beside the one that it was to replace."""
    with mock.patch.object(Path, "unlink"):
        write(path, content)


@wrong_step("impl.training_state:write_atomically")
def half_written_files_left_by_an_interrupt(write: Any, path: Path, content: bytes) -> None:
    """A run that Ctrl-C cut short is cleaned up only as another error would be."""
    try:
        write(path, content)
    except KeyboardInterrupt:
        path.with_name(f".partial-{path.name}.abcdefgh").write_bytes(content)
        raise


@wrong_step("impl.commands.train:_Watch.step")
def steps_shown_before_they_are_written(_: Any, watch: Any, record: Any) -> None:
    """The terminal shows a step that the metrics do not have yet."""
    watch.steps = record.step
    for sink in (watch.progress, watch.board, watch.metrics):
        if sink is not None:
            sink.step(record)


@wrong_step("impl.commands.train:_Watch.epoch")
def epochs_shown_before_they_are_written(_: Any, watch: Any, record: Any) -> None:
    """The terminal shows an epoch that the metrics do not have yet."""
    for sink in (watch.progress, watch.metrics, watch.board):
        if sink is not None:
            sink.epoch(record)


@wrong_step("impl.folder:naming")
@contextmanager
def disks_of_libraries_are_bad_input(naming: Any, path: Path) -> Iterator[None]:
    """A full disk that a library of files meets, and says in words of its own, ends a command as bad input does."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.__cause__ is None or isinstance(error.__cause__, OSError):
            raise
        raise OSError(f"{path}: {error.strerror}") from error


wrong_step("impl.commands.train:_Watch._further", name="resume_is_said_of_no_run", doc="A run that had not begun is said to go on.")(
    lambda *_: "the same command with --resume goes on"
)
wrong_step("impl.commands.pretrain:_begun", name="resume_is_said_of_no_state", doc="A pre-training run without a state is said to go on.")(
    lambda *_: True
)
wrong_step("impl.commands.pretrain:Interrupted", name="interrupted_pretraining_unnamed", doc="The message does not say how a run goes on.")(
    lambda interrupted, _: interrupted("interrupted")
)


def _held_out_unseen(run: Any, options: Any) -> None:
    from blackswan.impl import token_shards

    right = token_shards.TokenShards

    def opened(folder: Path, vocab: int) -> Any:
        return right(folder, 2**31 if folder == options.validation else vocab)

    with mock.patch.object(token_shards, "TokenShards", opened):
        run(options)


wrong_step(
    "impl.__main__:COMMANDS",
    name="held_out_tokens_of_any_model",
    doc="The vocabulary is asked of the tokens to train on alone.",
)(lambda commands: {**commands, "pretrain": replace(commands["pretrain"], run=partial(_held_out_unseen, commands["pretrain"].run))})


@wrong_step("impl.commands.train:_require_usable")
def train_looks_at_its_folder_once(require: Any, output: Path, resume: bool) -> None:
    """A run that another process makes while the model is loaded gets the settings of this one."""
    if not (output / ".lock").exists():
        require(output, resume)


@wrong_step("impl.commands.common:require_place")
def rights_asked_for_late(require: Any, folder: Path) -> None:
    """Whether a folder may be written into is not asked before a model is there."""
    with mock.patch.object(os, "access", return_value=True):
        require(folder)


@wrong_step("impl.commands.train:require_place")
def place_is_tried(require: Any, folder: Path) -> None:
    """Whether a folder can be made is tried, and those above it, which were made too, stay."""
    require(folder)
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.rmdir()


wrong_step("impl.__main__:_parsed", name="words_passed_over", doc="Words that are no option of a command are passed over.")(
    lambda _, arguments, prog: parser(prog).parse_known_args(arguments)[0]
)


wrong_step(
    "impl.agreement:_RAISED_ELSEWHERE", name="shared_errors_are_general", doc="Workers raise the most general kind of another's error."
)(lambda kinds: (OSError, ValueError, *kinds))


@wrong_step("impl.commands.pretrain:_settings")
def pretrain_rows_below_the_positions(settings: Any, options: Any) -> Any:
    """Rows of as many tokens as the model has positions are refused."""
    if options.seq == read_config(options.model).max_positions:
        raise ValueError(f"--seq: {options.seq} tokens; expected fewer than the positions of the model")
    return settings(options)


@wrong_step("impl.pipeline:_require_fitting")
def positions_all_but_one(fitting: Any, architecture: Any, config: Any, tokens: Any) -> None:
    """Texts of as many tokens as the model has positions are refused."""
    fitting(architecture, config, tokens)
    if config.max_seq_len == architecture.max_positions:
        raise ValueError(f"max_seq_len is {config.max_seq_len}: expected fewer than the positions of the model")


@wrong_step("impl.fit:save_state")
def states_fail_by_their_library(save: Any, *given: Any) -> None:
    """A state that finds no room ends a run by an error of the library that writes it, which names no file."""
    try:
        save(*given)
    except OSError as error:
        raise SafetensorError(str(error.strerror)) from None
