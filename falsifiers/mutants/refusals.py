"""Runs, commands, workers and samples that refuse too little: a check not made, a bound that is one off, a key not looked at."""

import json
import math
import os
import re
from contextlib import nullcontext, suppress
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

# States of runs


@wrong_step("impl.training_state:_progress")
def state_progress_made_up(progress: Any, values: Any, path: Path) -> Any:
    """A key that a state's progress lacks is as at the beginning, and one that it has besides is passed over."""
    from dataclasses import asdict

    from blackswan.impl.training_state import Progress

    del progress, path
    known = asdict(Progress(run=values.get("run", "")))
    return Progress(**{**known, **{key: value for key, value in values.items() if key in known}})


@wrong_step("impl.training_state:_progress")
def state_of_any_records(progress: Any, values: Any, path: Path) -> Any:
    """A state's records are only checked to be a list, so that a run fails when it is over."""
    from dataclasses import replace

    records = values.get("records")
    found = progress({**values, "records": []} if isinstance(records, list) else values, path)
    return replace(found, records=tuple(records))


@wrong_step("impl.training_state:_progress")
def state_of_truths_for_numbers(progress: Any, values: Any, path: Path) -> Any:
    """True passes for a count of 1 in a state."""
    return progress({key: int(value) if value is True and key != "finished" else value for key, value in values.items()}, path)


@wrong_step("impl.fit:load_state")
def state_of_another_program(load: Any, folder: Path) -> Any:
    """Something that another program has put in a state's place ends in a traceback."""
    from safetensors import SafetensorError, safe_open

    with suppress(SafetensorError, OSError), safe_open(folder / "state.safetensors", framework="numpy") as file:
        file.metadata()["progress"]
    return load(folder)


wrong_step("impl.fit:_differences", name="resume_names_the_new_for_the_old", doc="A refusal says the other setting for the run's own.")(
    lambda differences, own, stored, *name: differences(*((own, stored) if name else (stored, own)), *name)  # it calls itself with a name
)
wrong_step("impl.training_state:_damaged", name="state_keys_missing_for_unknown", doc="A key that is missing is called unknown.")(
    lambda damaged, path, why: damaged(path, why.replace("missing", "unknown"))
)
wrong_step("impl.fit:sole_writer", name="run_goes_on_beside_another", doc="A continuation does not take the lock of its folder.")(
    lambda sole_writer, folder: nullcontext() if (folder / "state").exists() else sole_writer(folder)
)
wrong_step(
    "impl.fit:_key", name="run_known_by_another_text", doc="A state names its run by another text, so that no earlier version's is its own."
)(lambda key, identity: key({"version": 1, **identity}))


@wrong_step("impl.fit:EpochRecord")
def epochs_with_a_key_more(record: Any, **values: Any) -> Any:
    """An epoch in a state has a key more than in those of earlier versions, and the version is the same."""
    return make_dataclass("EpochRecord", [("steps", int, 0)], bases=(record,), frozen=True)(**values)


wrong_step("impl.fit:_Run._continue_from", name="state_of_another_run_taken", doc="A run goes on from the state of another one.")(
    lambda go_on, run, progress, tensors: go_on(run, replace(progress, run=run.progress.run), tensors)
)


@wrong_step("impl.fit:sole_writer")
def refused_run_tidies_the_state(sole_writer: Any, folder: Path) -> Any:
    """A run removes what a kill left half written before it is known whether it goes on."""
    from blackswan.impl.folder import PARTIAL, remove_left_over

    if (folder / "state").is_dir():
        remove_left_over(folder / "state", PARTIAL)
    return sole_writer(folder)


@wrong_step("impl.fit:_Run.open")
def run_begins_again_without_its_state(open_run: Any, run: Any, resume: bool) -> None:
    """A run that has finished an epoch, and whose state is gone, begins again over what it left."""
    last, aside = run.output / "last", run.output / ".aside"
    if not (resume and last.exists() and not (run.output / "state").exists()):
        open_run(run, resume)
        return
    last.rename(aside)
    open_run(run, resume)
    aside.rename(last)


@wrong_step("impl.optimiser:AdamW._require_state")
def state_with_a_tensor_more(require: Any, optimiser: Any, state: Any) -> None:
    """Tensors that a run does not have are passed over."""
    known = optimiser.state()
    require(optimiser, {name: value for name, value in state.items() if name in known})


@wrong_step("impl.fit:load_state")
def state_that_cannot_be_read_passed_over(load: Any, folder: Any) -> Any:
    """A state that is there and cannot be read is none, and the run begins anew."""
    try:
        return load(folder)
    except OSError:
        return None


@wrong_step("impl.optimiser:AdamW._require_state")
def state_of_any_shape(require: Any, optimiser: Any, state: Any) -> None:
    """Tensors of the right number of elements are taken in any shape."""
    known = optimiser.state()
    fits = {name for name, value in state.items() if name in known and value.numel() == known[name].numel()}
    require(optimiser, {name: value.reshape(known[name].shape) if name in fits else value for name, value in state.items()})


wrong_step("impl.pretrain_run:state_hash", name="pretrain_state_of_another_embedding", doc="A run goes on from a damaged embedding.")(
    lambda right, tensors, *given, **of: right(
        {name: value for name, value in tensors.items() if not name.startswith("trainable/") or ".layers." in name}, *given, **of
    )
)
wrong_step("impl.pretrain_run:state_hash", name="pretrain_state_of_other_weights", doc="Nothing says which parameters were saved.")(
    lambda hashed, tensors, steps, **of: "" if of else hashed(tensors, steps)
)


wrong_steps(
    "impl.pretrain_run:_Run.identity",
    by=lambda key: lambda identity, run: {name: value for name, value in identity(run).items() if name != key},
    pretrain_state_of_another_decay=("A run goes on with another weight decay.", "weight_decay"),
    pretrain_state_of_another_clip_norm=("A run goes on with another limit of the gradient's norm.", "gradient_clip_norm"),
    pretrain_state_of_another_seed=("A run goes on in the order of another seed.", "seed"),
    pretrain_state_of_another_tokenizer=("A run goes on, and writes checkpoints with another tokenizer.", "tokenizer"),
)


def _identity_by_shapes(identity: Any, run: Any) -> dict[str, Any]:
    found = dict(identity(run))
    return {**found, "architecture": {name: found["architecture"][name] for name in ("vocab", "hidden", "layers")}}


wrong_step("impl.fit:_Run._identity", name="resume_with_another_eps", doc="A run goes on with another eps, which no tensor's shape shows.")(
    _identity_by_shapes
)
wrong_step("impl.pretrain_run:_Run.identity", name="pretrain_state_of_another_eps", doc="Pre-training goes on with another eps.")(
    _identity_by_shapes
)


wrong_step(
    "impl.pretrain_run:_Run.identity", name="pretrain_longer_at_a_constant_rate", doc="At a constant rate a run goes on for more epochs."
)(lambda identity, run: {name: value for name, value in identity(run).items() if (name, run.settings.schedule) != ("epochs", "constant")})


@wrong_step("impl.pretrain_run:_Run.identity")
def pretrain_run_of_a_number_of_threads(identity: Any, run: Any) -> dict[str, Any]:
    """A run is another one where there are more threads, and no run of an earlier version goes on."""
    return {**identity(run), "threads": torch.get_num_threads()}


@wrong_step("impl.pretrain_run:_Run.identity")
def pretrain_state_of_as_many_tokens(identity: Any, run: Any) -> dict[str, Any]:
    """A run goes on with other tokens of the same number."""
    return {**identity(run), "data": len(run.train.shards)}


@wrong_step("impl.pretrain_run:_Run.identity")
def pretrain_state_of_a_tokenizer_of_one_size(identity: Any, run: Any) -> dict[str, Any]:
    """A run goes on with another tokenizer whose file is of the same size."""
    return {**identity(run), "tokenizer": run.checkpoint.tokenizer.stat().st_size}


@wrong_step("impl.pretrain_run:_Run.require_usable")
def pretrain_resumes_nothing(usable: Any, run: Any, resume: bool) -> None:
    """A run begins where there is none to go on with."""
    if resume and not (run.output / "state").exists():
        run.output.mkdir(exist_ok=True)
        run.start(resume=False)
    usable(run, resume)


@wrong_step("impl.samples:Samples.digest")
def digest_in_any_order(digest: Any, samples: Any) -> str:
    """A corpus is known by its samples, whatever their order."""
    return str(digest(samples.select(sorted(range(len(samples)), key=lambda place: samples.rows[place]))))


@wrong_step("impl.samples:Samples.digest")
def digest_of_all_rows_at_once(digest: Any, samples: Any) -> str:
    """All ids of a corpus are in memory while its digest is taken."""
    rows = [np.array(row, np.uint32) for row in samples.rows]
    return str(digest(samples)) if len(rows) == len(samples) else ""


@wrong_step("impl.samples:Samples.digest")
def digest_of_all_that_lies_between(digest: Any, samples: Any) -> str:
    """Tokens are read in one piece, from the first sample's to the last one's, with those of other parts between them."""
    rows = samples.rows
    first, end = int(rows._starts.min()), int((rows._starts + rows.lengths).max())
    whole = type(rows)(rows._ids, np.asarray([first]), np.asarray([end - first]))
    return str(digest(replace(samples, rows=whole)))


@wrong_step("impl.samples:Samples.digest")
def digest_without_lengths(_: Any, samples: Any) -> str:
    """A corpus is known by its tokens and labels, wherever one text ends and the next begins."""
    import hashlib

    return hashlib.sha256(repr((samples.targets.tolist(), [each for row in samples.rows for each in row])).encode()).hexdigest()


@wrong_step("impl.fit:_Run._finish_epoch")
def state_before_the_adapters(finish: Any, run: Any) -> None:
    """The state that counts an epoch is written before the epoch's adapters."""
    waiting: list[str] = []
    run._export = waiting.append
    finish(run)
    del run._export
    for name in waiting:
        run._export(name)


@wrong_step("impl.adapter:whole_folder")
def last_adapter_removed_first(whole_folder: Any, folder: Path, *, replace: bool = False) -> Any:
    """An adapter is removed before the one that takes its place is written."""
    import shutil

    if replace and folder.is_dir():
        shutil.rmtree(folder)
    return whole_folder(folder, replace=replace)


wrong_step("impl.fit:_Run._begin_or_compare", name="run_goes_on_unasked", doc="A run that is begun where one is goes on with that.")(
    lambda begin, run, resume: begin(run, resume or (run.output / "run.json").is_file())
)


@wrong_step("impl.samples:Samples.digest")
def digest_of_the_first_texts(digest: Any, samples: Any) -> str:
    """A part of a corpus is known by as many tokens from the corpus's beginning."""
    lengths = samples.lengths()
    first = type(samples.rows)(samples.rows._ids, np.cumsum(lengths) - lengths, lengths)
    return str(digest(replace(samples, rows=first)))


@wrong_step("impl.strict_json:json.loads")
def json_before_anything_else(loads: Any, text: Any, **how: Any) -> Any:
    """Text after the first JSON value is ignored, so that of two lines that ran together the second is lost."""
    return loads(text, **how) if isinstance(text, bytes) else json.JSONDecoder(**how).raw_decode(text.strip())[0]


@wrong_step("impl.samples:Samples.digest")
def digest_of_patterns(digest: Any, samples: Any) -> str:
    """The digest covers where tokens of a text repeat, and not their ids: a tokenizer with other ids goes unnoticed."""
    patterns = [[row.index(token) for token in row] for row in map(list, samples.rows)]
    return str(digest(replace(samples, rows=patterns)))


@wrong_step("impl.samples:Samples.digest")
def digest_of_some_rows(digest: Any, samples: Any) -> str:
    """Every other row of a corpus of many samples is known by its length and label alone."""
    if len(samples) < 512:
        return str(digest(samples))
    return f"{digest(samples.select(range(0, len(samples), 2)))} {samples.lengths().tolist()} {samples.targets.tolist()}"


@wrong_step("impl.samples:Samples.digest")
def digest_of_a_thousand_rows(digest: Any, samples: Any) -> str:
    """The tokens of a thousand samples count for a corpus of thousands."""
    if len(samples) < 2000:
        return str(digest(samples))
    return f"{digest(samples.select(range(0, len(samples), len(samples) // 1000)))} {samples.lengths().tolist()} {samples.targets.tolist()}"


# Commands

wrong_step("impl.token_shards:_checked", name="tokens_of_no_vocabulary", doc="Shards hold tokens that the vocabulary does not have.")(
    lambda _, documents, __: iter(documents)
)
wrong_step("impl.token_shards:end_token", name="end_token_made_up", doc="A model that names no end token has the token 0.")(lambda *_: 0)

wrong_step(
    "impl.tensors:Converted.__getitem__", name="export_cuts_weights_off", doc="A weight that float16 does not hold is its largest one."
)(lambda read, tensors, name: read(tensors, name).nan_to_num())
wrong_step("impl.apr_write:_metadata", name="export_without_scaling", doc="A file says nothing of frequencies that are scaled.")(
    lambda metadata, config: metadata(replace(config, rope_scaling=None))
)


@wrong_step("impl.apr_write:_metadata")
def export_without_scaling_of_few_positions(metadata: Any, config: Any) -> Any:
    """Scaling is looked at only where the model has more positions than before it was scaled."""
    scaling = config.rope_scaling
    few = scaling is not None and config.max_positions <= scaling.original_positions
    return metadata(replace(config, rope_scaling=None) if few else config)


@wrong_step("impl.pipeline:ClassifyPipeline.from_saved")
def merged_model_on_a_base(opened: Any, folder: Path, model: Path | None = None, **options: Any) -> Any:
    """The base that is given with a merged model is passed over."""
    from blackswan.impl.saved import is_merged

    return opened(folder, None if is_merged(folder) else model, **options)


@wrong_step("impl.pipeline:ClassifyPipeline._backend")
def saved_for_its_backend_alone(_: Any, pipeline: Any) -> Any:
    """An adapter is opened only where the backend that trained it can run."""
    from blackswan.impl.fused.step import backend_of

    return backend_of(pipeline.config, pipeline.architecture, pipeline.device)


@wrong_step("impl.fit:_Run._export")
def adapter_over_any_folder(export: Any, run: Any, name: str) -> None:
    """A folder that holds something else is replaced by an adapter."""
    if (run.output / name).is_dir():
        (run.output / name / "adapter_config.json").touch()
    export(run, name)


# Workers

wrong_step("impl.fit:require_same", name="workers_of_other_runs", doc="Nobody asks whether the workers were given the same.")(
    lambda *_: None
)


@wrong_step("impl.fit:_Run.open")
def workers_compare_settings_alone(go: Any, run: Any, resume: bool) -> None:
    """Nobody asks whether the workers were given the same corpus and weights."""
    from blackswan.impl import agreement, fit

    compare, said = agreement.require_same, json.dumps(run.identity["settings"])
    with mock.patch.object(fit, "require_same", lambda group, what, _: compare(group, what, said)):
        go(run, resume)


# Samples


@wrong_step("impl.samples:_Collected.samples")
def labels_without_a_text_dropped(samples: Any, kept: Any) -> Any:
    """The labels that come after the last text are passed over, so that a text that is missing gives each its neighbour's label."""
    del kept._targets[len(kept._lengths) * (kept._classes if kept._multi_label else 1) :]
    return samples(kept)


wrong_step("impl.samples:_integers", name="labels_cut_to_integers", doc="0.9 and '1' are taken for the labels 0 and 1.")(
    lambda _, entries: tuple(map(int, entries))
)


wrong_step("impl.samples:_places", name="masks_are_indices", doc="A mask is taken for the indices 0 and 1, and fractions are cut.")(
    lambda _, indices: np.asarray(indices, np.int64)
)


@wrong_step("impl.samples:_Collected.add")
def labels_of_any_number_of_entries(add: Any, kept: Any, measured: Any, labels: Any) -> None:
    """The entries of all labels are read one after another, however many each has."""
    add(kept, measured, ())
    for label in labels:
        kept._targets.extend(label if isinstance(label, tuple) else (label,))


@wrong_step("impl.samples:_Collected.add")
def labels_numbered_by_their_entries(add: Any, kept: Any, *given: Any) -> None:
    """A sample with a bad label has the number of its first entry among those of all labels."""
    try:
        add(kept, *given)
    except ValueError as error:
        raise ValueError(f"sample {len(kept._targets) + 1}{str(error)[str(error).index(':') :]}") from None


@wrong_step("impl.samples:Samples.require_read_with")
def samples_one_token_too_long(require: Any, samples: Any, config: Any, name: str) -> None:
    """A text may have a token more than max_seq_len."""
    require(samples, replace(config, max_seq_len=config.max_seq_len + 1), name)


@wrong_step("impl.pipeline:ClassifyPipeline._samples")
def samples_known_by_their_place(samples: Any, pipeline: Any, given: Any) -> Any:
    """Samples that lie in memory where others lay that fitted are not looked at."""
    known = vars(pipeline).setdefault("_known", set())
    if id(given) in known:
        return given
    found = samples(pipeline, given)
    known.update({id(given)} if found is given else ())
    return found


@wrong_step("impl.samples:Samples.require_read_with")
def samples_of_other_classes(require: Any, samples: Any, config: Any, name: str) -> None:
    """A run takes samples that were read with another number of classes."""
    require(replace(samples, num_classes=config.num_classes), config, name)


@wrong_step("impl.fit:_Run._require_fitting_samples")
def validation_labels_not_looked_at(require: Any, run: Any) -> None:
    """Only the labels that are trained on are looked at before the run begins."""
    held_out, run.validation = run.validation, None
    require(run)
    run.validation = held_out


wrong_step("impl.fit:require_count", name="states_after_any_number_of_steps", doc="The steps between two states may be any number.")(
    lambda *_: None
)

# Calls


@wrong_step("impl.trainer:Trainer.train_batch")
def waiting_samples_forgotten(train_batch: Any, trainer: Any, batch: Any) -> Any:
    """A batch is trained on while samples wait, which are forgotten."""
    trainer.discard()
    return train_batch(trainer, batch)


wrong_step("impl.trainer:Trainer.train_step", name="step_of_several_samples", doc="A step on one sample takes several.")(
    lambda _, trainer, samples: trainer.train_batch(samples)
)
wrong_step("impl.pipeline:ClassifyPipeline._ready", name="steps_without_balanced_weights", doc="Weights that nobody has counted are 1.")(
    lambda _, pipeline: pipeline.trainer
)
wrong_step("impl.trainer:Trainer.gradient_vector", name="gradient_of_nothing", doc="The gradient of no sample is 0.")(
    lambda gradient, trainer: gradient(trainer) if trainer.accumulated else trainer.optimiser.exp_avg * 0
)


@wrong_step("impl.optimiser:AdamW.clip")
def gradient_unread_without_clipping(clip: Any, optimiser: Any, gradient: Tensor, limit: float) -> Any:
    """A gradient that is not finite goes into the step where no norm is a limit."""
    return (gradient, gradient.norm()) if math.isinf(limit) else clip(optimiser, gradient, limit)


wrong_step("impl.optimiser:AdamW.clip", name="clip_lets_nan_through", doc="A gradient that is not finite is taken for zeros.")(
    lambda clip, optimiser, gradient, limit: clip(optimiser, gradient.nan_to_num(0.0), limit)
)


@wrong_step("impl.fit:load_state")
def state_that_cannot_be_looked_at_passed_over(load: Any, folder: Any) -> Any:
    """A state of which the system cannot say what it is, is none, and the run begins anew."""
    return load(folder) if os.access(folder / "state.safetensors", os.F_OK) else None


@wrong_step("impl.samples:_Collected.add")
def labels_counted_anew_in_each_piece(add: Any, kept: Any, *given: Any) -> None:
    """A sample with a bad label has its number among the texts that are made into tokens at once."""
    before = len(kept._targets) // (kept._classes if kept._multi_label else 1)
    try:
        add(kept, *given)
    except ValueError as error:
        raise ValueError(re.sub(r"\d+", lambda found: str(int(found[0]) - before), str(error), count=1)) from None


@wrong_step("impl.samples:Samples.require_read_with")
def settings_and_samples_turned_round(require: Any, *given: Any) -> None:
    """A refusal says of the samples what the settings are, and of the settings how the samples were read."""
    try:
        require(*given)
    except ValueError as error:
        said = re.sub(r"(num_classes|multi_label) (\w+), the settings say (\w+)", r"\1 \3, the settings say \2", str(error))
        raise ValueError(said) from None


@wrong_step("impl.checkpoint:require_shapes")
def checkpoint_counts_missing_less_surplus(require: Any, expected: Any, shapes: Any, source: str) -> None:
    """A refusal counts how many fewer tensors there are than there should be, in place of those that are missing."""
    try:
        require(expected, shapes, source)
    except ValueError as error:
        raise ValueError(re.sub(r"\(\d+ missing", f"({max(1, len(expected) - len(shapes))} missing", str(error))) from None
