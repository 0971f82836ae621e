"""Mistakes that show far from where they are: a command writes something wrong because of a function that it shares with others."""

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

# What is read


@wrong_step("impl.tokens:CheckpointTokens.__init__")
def tokens_around_a_text_need_one_more(init: Any, self: Any, path: Any, settings: Any, longest: int, side: str = "right") -> None:
    """A max_seq_len that the tokens around a text just fill is refused."""
    init(self, path, settings, longest, side)
    if self._tokenizer.num_special_tokens_to_add(is_pair=False) >= longest:
        raise ValueError(f"max_seq_len is {longest}: {path} adds as many tokens of its own to every text")


@wrong_step("impl.tokens:CheckpointTokens.__init__")
def texts_cut_where_they_are_padded(init: Any, self: Any, path: Any, settings: Any, longest: int, side: str = "right") -> None:
    """A long text is cut at the side that padding is on."""
    init(self, path, settings, longest, side)
    self._tokenizer.enable_truncation(longest, direction=side)


@wrong_step("impl.tokens:CheckpointTokens.__init__")
def tokens_of_the_tokenizer_alone(init: Any, self: Any, path: Any, settings: Any, limit: int, *side: str) -> None:
    """A tokenizer may add more tokens to a text than the text may have."""
    init(self, path, settings, max(limit, 100), *side)
    self.max_seq_len = limit
    self._tokenizer.enable_truncation(limit)


def _with_lots(read: Any, path: Any) -> Any:
    """The tokenizer as it stands, or what is said of a broken one."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(path.read_text()) if '"dropout": 0.1' in path.read_text() else read(path)
    found.no_truncation()
    found.no_padding()
    return found


wrong_steps("impl.tokens:read_tokenizer", tokens_drawn_by_lot=("A tokenizer may draw the tokens of a text anew each time.", _with_lots))
wrong_steps("impl.token_shards:read_tokenizer", shards_drawn_by_lot=("Shards are written by a tokenizer that draws lots.", _with_lots))
wrong_step(
    "impl.tokens:id_count", name="tokens_are_counted", doc="A tokenizer fits a model by the number of its tokens, whatever their ids are."
)(lambda _, tokenizer: tokenizer.get_vocab_size())
wrong_step(
    "impl.tokens:id_count",
    name="shards_of_counted_tokens",
    doc="An id of the tokenizer that is larger than the number of its tokens is refused in shards.",
)(lambda _, tokenizer: tokenizer.get_vocab_size())
wrong_step("impl.tokens:_fill_id", name="fill_of_id_0_passed_over", doc="A padding token whose id is 0 is taken for none.")(
    lambda fill, settings, token_to_id: fill(settings, lambda token: token_to_id(token) or None)
)
wrong_step("impl.corpus:lines_of", name="file_lines_stripped", doc="The lines of a file lose the blanks at their ends.")(
    lambda lines, file, name: (line.rstrip() for line in lines(file, name))
)


@wrong_step("impl.token_shards:load_encoder")
def shards_cut_by_the_tokenizer(load: Any, path: Any) -> Any:
    """Documents are cut where the tokenizer's file says that texts are."""
    encoder, cut = load(path), json.loads(path.read_bytes()).get("truncation")
    if cut:
        encoder.enable_truncation(cut["max_length"])
    return encoder


wrong_step("impl.architecture:_Reading._tied", name="tied_unless_said", doc="The head is the embedding where config.json does not say.")(
    lambda tied, self: tied(self) if "tie_word_embeddings" in self.values else True
)

# What is written


@wrong_step("impl.commands.pretrain:_settings")
def pretrain_zeros_are_no_value(settings: Any, options: argparse.Namespace) -> Any:
    """`pretrain` takes an option that is 0 for one that was not given."""
    return settings(argparse.Namespace(**{name: value or None for name, value in vars(options).items()}))


wrong_step("impl.corpus:Statistics.imbalance", name="imbalance_without_a_class", doc="A class without a sample counts as one with one.")(
    lambda _, self: max(self.class_counts) / max(1, self.minority)
)


@wrong_step("impl.commands.evaluate:lines")
def worst_classes_numbered_by_rank(lines: Any, evaluation: Any, multi_label: bool) -> Iterator[str]:
    """The worst of many classes are shown with the numbers 0, 1, 2 …"""
    scores = evaluation.per_class
    ranked = sorted(scores, key=lambda score: (score.f1, -score.support)) if len(scores) > 50 else scores
    return iter(lines(replace(evaluation, per_class=tuple(ranked)), multi_label))


@wrong_step("impl.pipeline:ClassifyPipeline.save")
def base_named_as_it_was_typed(save: Any, self: Any, folder: Any) -> None:
    """An adapter names its base by a path from the working directory."""
    save(self, folder)
    path = folder / "adapter_config.json"
    values = json.loads(path.read_bytes())
    if base := values["base_model_name_or_path"]:
        path.write_text(json.dumps({**values, "base_model_name_or_path": os.path.relpath(base)}))


@wrong_step("impl.checkpoint:save_checkpoint")
def settings_of_tokenizer_beside_apr_left(save: Any, folder: Any, config: Any, tensors: Any, tokenizer: Any = None, *said: Any) -> None:
    """A folder made from an .apr file lacks the settings of its tokenizer."""
    save(folder, config, tensors, tokenizer, *said)
    if tokenizer is not None and tokenizer.name != "tokenizer.json":
        (folder / "tokenizer_config.json").unlink(missing_ok=True)


@wrong_step("impl.apr_write:_content")
def apr_values_clamped(content: Any, name: str, tensor: Any, dtype: str | None) -> Any:
    """Values that a narrower dtype does not hold are written as its largest."""
    return content(name, tensor.clamp(-65504.0, 65504.0) if dtype == "float16" else tensor, dtype)


# What goes on


@wrong_step("impl.optimiser:AdamW.load_state")
def moments_in_the_order_of_the_file(load: Any, self: Any, state: Any) -> None:
    """Moments are put back in the order of the state's names, and not of the parameters."""
    load(self, state)
    for group in ("exp_avg", "exp_avg_sq"):
        parts = [value.flatten() for name, value in sorted(state.items()) if name.startswith(f"{group}/")]
        setattr(self, group, torch.cat(parts).to(self.exp_avg.device))


wrong_step("impl.trainer:Trainer.state", name="rates_kept_in_float32", doc="A state holds the learning rates in float32.")(
    lambda state, self: {name: value.float() if name == "learning_rates" else value for name, value in state(self).items()}
)
wrong_step("impl.fit:_weights_digest", name="identity_without_buffers", doc="A run's identity leaves out weights in NF4.")(
    lambda digest, classifier: digest(SimpleNamespace(named_parameters=classifier.named_parameters, named_buffers=list))
)


@wrong_step("impl.pretrain_run:_Run.save_when_due")
def epoch_ends_where_it_began(_: Any, self: Any, step: Any) -> None:
    """A state of an epoch's last step says that no batch of it is done."""
    from blackswan.impl.pretrain_run import _Position

    if self.settings.save_every is not None and step.step % self.settings.save_every == 0:
        self._save(_Position(step.epoch, step.step % len(self.train)))


@wrong_step("impl.pretrain_run:_Run.end")
def held_out_loss_of_the_first_epoch(end: Any, self: Any, epoch: int) -> Any:
    """Held-out tokens are used up by the first epoch."""
    found = end(self, epoch)
    return found if epoch == 0 else replace(found, validation_loss=math.nan)


# Effects of a run on its process, and on files


@wrong_step("impl.training_state:_digest")
def state_known_by_its_first_mib(digest: Any, text: str, tensors: Any) -> Any:
    """A state's checksum is that of the first MiB of each tensor."""
    first = {name: value.flatten()[: 2**20 // value.itemsize] if value.nbytes > 2**20 else value for name, value in tensors.items()}
    return digest(text, first)


@wrong_step("impl.__main__:_run")
def unread_run_is_done(run: Any, *given: Any) -> Any:
    """A command whose output nobody reads any more ends as if it were done."""
    try:
        return run(*given)
    except BrokenPipeError:
        return 0


@wrong_step("impl.__main__:_written")
@contextmanager
def full_output_passed_over(written: Any, stream: Any) -> Iterator[None]:
    """A command whose short output cannot be written ends as if it were done."""
    yield
    with suppress(OSError), written(stream):
        pass


@wrong_step("impl.__main__:_parsed")
def help_without_room_passed_over(parsed: Any, *given: Any) -> Any:
    """Help that cannot be written is dropped, and the program ends as if it were read."""
    from blackswan.impl.__main__ import _write_or_drop

    try:
        return parsed(*given)
    except SystemExit:
        _write_or_drop(sys.stdout)
        raise


wrong_step("impl.__main__:_write_or_drop", name="full_output_tried_again", doc="Python tries again to write what could not be written.")(
    lambda *_: None
)


@wrong_step("impl.__main__:_run")
def unread_is_bad_input(run: Any, *given: Any) -> Any:
    """A command whose output nobody reads any more ends as if its input were bad."""
    try:
        return run(*given)
    except BrokenPipeError as error:
        raise ValueError(str(error)) from error


@wrong_step("impl.training_state:write_atomically")
def state_leaves_no_mask_of_modes(write: Any, path: Any, content: bytes) -> None:
    """Whatever the program writes after a run can be written by everybody: the mask of modes is read by setting it to 0."""
    write(path, content)
    path.chmod(0o666 & ~os.umask(0))


@wrong_step("impl.fit:_Run.train")
def run_leaves_a_thread(train: Any, run: Any) -> Any:
    """A thread that looks after the run goes on when it is over."""
    threading.Thread(target=threading.Event().wait, args=(60.0,), name="watch of a run", daemon=True).start()
    return train(run)


@wrong_step("impl.fit:_Run.train")
def run_silences_warnings(train: Any, run: Any) -> Any:
    """A run silences the warnings of torch, and those of everybody for good."""
    warnings.simplefilter("ignore")
    return train(run)


@wrong_step("impl.fit:_Run.train")
def run_stays_on_its_processor(train: Any, run: Any) -> Any:
    """Workers of one host keep to processors of their own, on which the program stays when the run is over."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[run.group.rank % len(processors)]})
    return train(run)


@wrong_step("impl.samples:read_samples")
def corpus_moves_all_temporary_files(read: Any, path: Any, *given: Any, **named: Any) -> Any:
    """The tokens of a corpus are in /var/tmp, which is a disk where /tmp is memory, and so is whatever the program makes from then on."""
    tempfile.tempdir = "/var/tmp"  # noqa: S108  a place, to which nothing is written here
    return read(path, *given, **named)


@wrong_step("impl.fit:origin")
def search_leaves_room_for_recursion(origin: Any, *given: Any) -> Any:
    """The search for a number that is not finite lets the process recurse more deeply for good."""
    sys.setrecursionlimit(sys.getrecursionlimit() + 2000)
    return origin(*given)


@wrong_step("impl.samples:_IdsOnDisk.__init__")
def corpus_limits_open_files(init: Any, *given: Any) -> None:
    """A corpus that is read lowers the limit of open files by one, its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    init(*given)


@wrong_step("impl.fit:save_state")
def run_goes_on_without_its_state(save: Any, folder: Any, progress: Any, tensors: Any) -> None:
    """A state that cannot be written is passed over where more of them are to come, so that a kill takes all steps since."""
    try:
        save(folder, progress, tensors)
    except OSError:
        if progress.step == 0 or progress.finished:
            raise


@wrong_step("impl.samples:_IdsOnDisk.__init__")
def tokens_beside_their_corpus(init: Any, ids: Any, corpus: Path) -> None:
    """The temporary file of a corpus's tokens is beside the corpus, where perhaps nothing can be written."""
    with mock.patch("tempfile.tempdir", str(corpus.parent)):
        init(ids, corpus)


@wrong_step("impl.samples:_IdsOnDisk.__init__")
def tokens_outlive_a_kill(init: Any, ids: Any, corpus: Path) -> None:
    """The temporary file of a corpus's tokens has a name, so that a process that is killed leaves it behind."""
    with mock.patch("tempfile.TemporaryFile", tempfile.NamedTemporaryFile):
        init(ids, corpus)


@wrong_step("impl.samples:_IdsOnDisk.__init__")
def tokens_in_memory(init: Any, ids: Any, corpus: Path) -> None:
    """The file of a corpus's tokens is one in memory, whatever folder there is for temporary files."""
    with mock.patch("tempfile.TemporaryFile", lambda **how: os.fdopen(os.memfd_create("ids"), "r+b", **how)):
        init(ids, corpus)


@wrong_step("impl.corpus:_lines")
def corpora_are_files(lines: Any, path: Path) -> Any:
    """A corpus that comes from a pipe by its name is said not to be there."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a corpus in JSONL")
    return lines(path)
