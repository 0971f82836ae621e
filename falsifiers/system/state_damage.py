"""States of runs of which a key or a tensor is damaged: a run goes on from none of them, and changes none."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.training import Plan, Pretraining, Problem
from blackswan.falsifiers.system.continued import other_architectures
from blackswan.falsifiers.system.derived_damage import ABSENT, Damage, another, edited, forms, judged, other_types, tensors
from blackswan.falsifiers.system.pretraining import small_pretraining
from blackswan.falsifiers.system.run_problem import STATE, read_state, small_run
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.token_streams import write_shards
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

POSITION, RUN = "state/state.json", "run.json"
RANK = 80
"""The largest factors of such a rank have more than 4 KiB, so that a checksum that is not that of all of a tensor shows."""
LARGE_RANK = 20_000
"""Factors of such a rank have more than a MiB."""
UNREADABLE = Path("/proc/self/mem")
"""A regular file of Linux whose first bytes cannot be read, as on a disk that fails."""
UNNAMED = Path("x" * 300)
"""No system looks for a file of so long a name: a link to it is there, and what is asked of it is an error, as on a disk that fails."""
IDENTITY = ("settings", "architecture", "base_weights", "data")
"""Keys of run.json that say which run it is."""
PROGRESS = ["best_epoch", "best_loss", "epoch", "epoch_seconds", "finished", "loss_sum", "position", "records", "run", "sample_count"]
PROGRESS += ["stale_epochs", "step", "version"]
RECORD = ["best", "epoch", "seconds", "train_loss", "validation_accuracy", "validation_loss"]
"""Keys of a state and of an epoch in it, as in all states of version 1."""
FREE = "save_every"
"""The setting of a pre-training run that a continuation may change."""
TORCH = {"float32": "torch.float32", "float64": "torch.float64", "int64": "torch.int64", "int32": "torch.int32"}


def refuses_training_state(trial: Trial) -> Iterator[Comparison]:
    """Each key of the progress and each tensor, with a checksum that fits; the state of another run; each key of run.json."""
    rng, problem = trial.rng("state"), small_run(trial, lora_rank=RANK)
    with tempfile.TemporaryDirectory() as parent:
        folder, other = Path(parent) / "run", Path(parent) / "other"
        trial.trainer.fit(problem, folder, Plan(save_every=1, stop_after=2))
        trial.trainer.fit(replace(problem, settings={**problem.settings, "learning_rate": 0.02}), other, Plan(save_every=1, stop_after=2))
        ask = _on_a_copy(folder, lambda copy: trial.trainer.fit(problem, copy, Plan(resume=True)).result)
        damages = [*_progress_damage(folder / STATE, rng), *_tensor_damage(folder / STATE, rng), *_other_files(folder / STATE)]
        damages += forms(folder, RUN, rng)
        damages.append(Damage("the state of another run", {STATE: (other / STATE).read_bytes()}, "/state: .*another run"))
        for key in IDENTITY:
            value = json.loads((folder / RUN).read_text())[key]
            damages += [edited(folder, RUN, {key: each}) for each in (ABSENT, another(value), other_types(value)[0])]
        damages += [edited(folder, RUN, {"source_model": "elsewhere"}, taken=True), Damage("no run.json", {RUN: None}, RUN)]
        settings = json.loads((folder / RUN).read_text())["settings"]
        without = str(rng.choice([name for name, value in settings.items() if value is None]))
        damages += [
            edited(folder, RUN, {f"settings/{name}": value}, rf"run\.json.*settings\.{name} is in {has},")
            for name, value, has in ((without, ABSENT, "this run"), ("surplus", None, "the file"))
        ]
        yield from judged(trial, folder, damages, ask)
        bare = folder.with_name("a state alone")
        shutil.copytree(folder / "state", bare / "state")
        waiting = replace(problem, validation=None, settings={**problem.settings, "early_stop_patience": 1, "validation_fraction": 0.0})
        for half in (folder, bare):
            (half / "state" / ".partial-state.safetensors.half").touch()  # as a kill leaves it
        for name, (given, there, plan, message, error) in {
            "a run begun twice": (problem, folder, Plan(), re.escape(folder.name), "FileExistsError"),
            "a run begun over a state": (problem, bare, Plan(), re.escape(bare.name), "FileExistsError"),
            "no run to go on with": (problem, folder.with_name("none"), Plan(resume=True), "run.json", "FileNotFoundError"),
            "patience without validation": (waiting, folder.with_name("none"), Plan(), "early_stop_patience", "ValueError"),
        }.items():
            before = content(there)
            yield trial.refuses(name, partial(trial.trainer.fit, given, there, plan), message, error)
            left = sorted(file for file, _ in content(there).items() ^ before.items() if file != ".lock")
            yield from same(f"files that {name} changes", [], left)
        yield from _of_a_large_run(trial, folder.with_name("large"))
        yield from _beside_another(trial, problem, folder)
        shutil.copytree(folder, unread := folder.with_name("unread"))
        for cannot, place, number in (("read", UNREADABLE, errno.EIO), ("look at", UNNAMED, errno.ENAMETOOLONG)):
            if place == UNREADABLE and not place.exists():
                continue
            (unread / STATE).unlink()
            (unread / STATE).symlink_to(place)
            ask = partial(trial.trainer.fit, problem, unread, Plan(resume=True))
            yield trial.refuses(f"a state that the system cannot {cannot}", ask, os.strerror(number), "OSError")
        trial.trainer.fit(problem, lost := folder.with_name("lost"), Plan())
        yield from _as_before(lost)
        shutil.rmtree(lost / "state")
        ask, before = partial(trial.trainer.fit, problem, lost, Plan(resume=True)), content(lost)
        yield trial.refuses("a run of an epoch whose state is gone", ask, "state", "FileNotFoundError")
        yield from same("the folder whose state is gone", before, content(lost))
        notes = folder.with_name("in use") / "last" / "notes.txt"
        notes.parent.mkdir(parents=True)
        notes.write_text("mine")
        ask = partial(trial.trainer.fit, problem, notes.parents[1], Plan())
        yield trial.refuses("a folder of others in an adapter's place", ask, "last.*no adapter", "FileExistsError")
        yield from same("what the folder holds", {notes.name: b"mine"}, content(notes.parent))


def _as_before(folder: Path) -> list[Comparison]:
    """A state names its run by what run.json says of it, and has the keys of states of earlier versions, from which runs go on."""
    _, progress = read_state(folder / STATE)
    said = json.loads((folder / RUN).read_text())
    own = hashlib.sha256(json.dumps({key: said[key] for key in IDENTITY}, sort_keys=True).encode()).hexdigest()
    found = same("the run that the state names", own, progress["run"])
    keys = [sorted(each) for each in (progress, *progress["records"])]
    return found + same("keys of the state and of its epochs", [PROGRESS, *[RECORD] * len(progress["records"])], keys)


def _of_a_large_run(trial: Trial, folder: Path) -> Iterator[Comparison]:
    """The checksum is that of all of a tensor of more than a MiB, whose last number is another one, or the same."""
    problem = small_run(trial, lora_rank=LARGE_RANK)
    trial.trainer.fit(problem, folder, Plan(save_every=1, stop_after=1))
    whole, progress = read_state(folder / STATE)
    large = max(whole, key=lambda name: whole[name].nbytes)
    other = whole[large].copy()
    other.flat[-1] = -1.0 - other.flat[-1]
    sealed = sealed_state(whole, progress)
    spoiled = sealed.replace(whole[large].tobytes(), other.tobytes())
    damages = [
        Damage(f"state: another last number of {large}", {STATE: spoiled}, "state.*damaged"),
        Damage("state: large, with its own checksum", {STATE: sealed}, "", taken=True),
    ]
    yield from judged(trial, folder, damages, _on_a_copy(folder, lambda copy: trial.trainer.fit(problem, copy, Plan(resume=True)).result))


def _beside_another(trial: Trial, problem: Problem, folder: Path) -> Iterator[Comparison]:
    """A run does not go on while another process writes its folder."""
    with (folder / ".lock").open("a") as lock:
        before = content(folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        ask = partial(trial.trainer.fit, problem, folder, Plan(resume=True))
        yield trial.refuses("a run that another process writes", ask, "another process", "ValueError")
        yield from same("the folder that another process writes", before, content(folder))


def _on_a_copy(folder: Path, go_on: Callable[[Path], object]) -> Callable[[], object]:
    """A run that goes on in a copy of the folder, which a refusal has to leave as it is."""

    def ask() -> object:
        copy = folder.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        try:
            return go_on(copy)
        except SubjectError as error:
            changed = sorted(file for file, _ in content(copy).items() ^ content(folder).items())
            if not changed:
                raise
            raise SubjectError(f"changed {changed[0]}") from RuntimeError(f"{changed[0]} was changed before: {error}")

    return ask


def _progress_damage(path: Path, rng: Generator) -> Iterator[Damage]:
    """Each key of the progress: edited without the checksum, and removed or of another type with one that fits."""
    whole, progress = read_state(path)
    for key, value in progress.items():
        missing = "version None" if key == "version" else f"state.*{key} is missing"
        yield _sealed(f"{key} edited", whole, {**progress, key: another(value)}, "state.*damaged", seal=False)
        yield _sealed(f"{key} removed", whole, {name: each for name, each in progress.items() if name != key}, missing)
        other = other_types(value)[int(rng.integers(len(other_types(value))))] if value is not None else [1.5]
        yield _sealed(f"{key} = {other}", whole, {**progress, key: other}, f"state.*({key}|version)")
    yield _sealed("records of no epochs", whole, {**progress, "records": [1]}, "state.*records")
    yield _sealed("an epoch that is true", whole, {**progress, "epoch": True}, "state.*epoch")
    yield _sealed("an unknown key", whole, {**progress, "surplus": 1}, "state.*surplus is unknown")
    yield from (_sealed(f"version {number}", whole, {**progress, "version": number}, f"version {number}") for number in (0, 2))
    yield replace(_sealed("with its own checksum", whole, progress, ""), taken=True)


def _tensor_damage(path: Path, rng: Generator) -> Iterator[Damage]:
    """Each tensor missing, or of another shape or dtype; one more; a step that is no count."""
    whole, progress = read_state(path)
    for name, value in whole.items():
        kind = str(rng.choice(["missing", "of another shape", *(["of another dtype"] if value.dtype == np.float32 else [])]))
        held = {key: each for key, each in whole.items() if key != name}
        if kind != "missing":
            held[name] = _other_shape(value, rng) if kind == "of another shape" else value.astype(np.float64)
        yield _sealed(f"{name} {kind}", held, progress, f"state.*{re.escape(name.rpartition('/')[2])}")
    yield _sealed("a tensor more", {**whole, "trainable/surplus": whole["step"]}, progress, "surplus")
    yield _sealed("a step below 0", {**whole, "step": np.asarray(-whole["step"])}, progress, "step")


def _other_files(path: Path) -> Iterator[Damage]:
    """Files in the state's place that are none: of other programs, without what a state says of itself, empty, torn, of text."""
    whole, progress = read_state(path)
    said = {"progress": json.dumps(progress)}
    others = {
        "of no metadata": save(whole),
        "of another program": save(whole, metadata={"format": "pt"}),
        "without a checksum": save(whole, metadata=said),
        "with a checksum alone": save(whole, metadata={"sha256": "0" * 64}),
        "of no tensor": save({}, metadata=said),
        "that is empty": b"",
        "that is torn": path.read_bytes()[: path.stat().st_size // 2],
        "of text": b"a state\n" * 9,
    }
    for name, written in others.items():
        yield Damage(f"a state {name}", {STATE: written}, "state.*damaged")


def _other_shape(value: Array, rng: Generator) -> Array:
    """A tensor of one element more, or of as many: transposed, or with one axis more."""
    if rng.integers(2):
        return np.concatenate([value.reshape(-1), value.reshape(-1)[:1]])
    return np.ascontiguousarray(value.T) if value.T.shape != value.shape else value[None]


def _sealed(name: str, held: Mapping[str, Array], progress: Mapping[str, Any], named: str, *, seal: bool = True) -> Damage:
    """A state with the checksum of its content, or with that of none."""
    return Damage(f"state: {name}", {STATE: sealed_state(held, progress, seal=seal)}, named)


def sealed_state(held: Mapping[str, Array], progress: Mapping[str, Any], *, seal: bool = True) -> bytes:
    """The file of a state, with the checksum of its content or with that of none."""
    text = json.dumps(progress)
    digest = hashlib.sha256(text.encode())
    for key in sorted(held):
        digest.update(f"\n{key} {TORCH[held[key].dtype.name]} {list(held[key].shape)}\n".encode() + held[key].tobytes())
    return save(dict(held), metadata={"progress": text, "sha256": digest.hexdigest() if seal else "0" * 64})


def refuses_pretraining_state(trial: Trial) -> Iterator[Comparison]:
    """Each key of state.json, of the run in it, and each tensor; the state of another run."""
    rng = trial.rng("state")
    with small_pretraining(trial, 1, save_every=1, weight_decay=0.0) as (problem, _):
        problem = _of_several_shards(problem)
        folder, other = problem.output, problem.output.with_name("other")
        trial.pretrainer.run(problem, stop_after=2)
        trial.pretrainer.run(replace(problem, output=other, settings={**problem.settings, "weight_decay": 0.2}), stop_after=2)
        ask = _on_a_copy(folder, partial(_goes_on, trial, problem))
        make, values = partial(edited, folder, POSITION), json.loads((folder / POSITION).read_text())
        yield from same("what the state says of its run", _said_before(trial, problem), values["run"])
        damages = [*forms(folder, POSITION, rng)]
        for key, value in values.items():
            damages += [make({key: each}, "state.json|state.safetensors") for each in (ABSENT, another(value), other_types(value)[0])]
        damages += [make({key: value}) for key in ("steps", "epoch", "batch") for value in (-1, 1.0, True)]
        for key, value in values["run"].items():
            damages.append(make({f"run/{key}": ABSENT if value is None or rng.integers(2) else another(value)}))
        damages += [make({"run/surplus": 1}), make({"run/surplus": None}), make({"surplus": 1})]
        damages += [replace(each, named="state.safetensors") for each in tensors(folder, STATE, "", rng)]
        damages += [Damage(f"no {file}", {file: None}, file) for file in (POSITION, STATE)]
        whole = (folder / STATE).read_bytes()
        damages += [Damage(f"{STATE} of {size} bytes", {STATE: whole[:size]}, "state.safetensors") for size in (0, 7, 99, len(whole) - 1)]
        held = load(whole)
        for name in ("trainable/model.embed_tokens.weight", "trainable/model.norm.weight"):  # neither is of a layer
            other_value = save({**held, name: np.nextafter(held[name], np.float32(np.inf))})
            damages.append(Damage(f"{STATE} with another {name}", {STATE: other_value}, "state.safetensors"))
        more = save({**held, "surplus": np.zeros(1, np.float32)})
        damages.append(Damage(f"{STATE} with a tensor of another kind", {STATE: more}, "state.safetensors.*surplus"))
        for files in ((POSITION,), (STATE,), (POSITION, STATE)):
            damages.append(Damage(f"{files} of another run", {file: (other / file).read_bytes() for file in files}, "state"))
        yield from judged(trial, folder, damages, ask)
        for key, given in _other_runs(trial, problem).items():
            run, name = _on_a_copy(folder, partial(_goes_on, trial, given)), key.partition(".")[0]
            said = re.escape(f"state.json: {name} is {values['run'].get(name)!r}, this run has ") + ".*same"
            yield trial.refuses(f"a run of another {key}", run, said, "ValueError")
        yield _longer_refused(trial, problem)
        end = ask()
        others = _same_runs(problem)
        for key, given in others.items():
            yield from same(f"end of a run of another {key}", end, _on_a_copy(folder, partial(_goes_on, trial, given))())
        given = others["place"]  # whose tokens and tokenizer, which it has read, are its own
        again, moved = _on_a_copy(folder, partial(_goes_on, trial, given)), given.tokenizer
        before = moved.read_bytes()
        moved.write_bytes(_of_one_size(before))
        yield trial.refuses("a run whose tokenizer was replaced", again, r"state\.json: tokenizer is ", "ValueError")
        moved.write_bytes(before)
        write_shards(given.train.folder, [np.fromfile(path, "<u2")[::-1] for path in sorted(given.train.folder.glob("part-*"))])
        yield trial.refuses("a run whose tokens were replaced", again, r"state\.json: data is ", "ValueError")
        yield from _begun_over_a_run(trial, problem)
        none, beginning = problem.output.with_name("none"), partial(trial.pretrainer.run, resume=True)
        yield trial.refuses("no run to go on with", partial(beginning, replace(problem, output=none)), "state", "FileNotFoundError")
        stream = write_shards(problem.output.with_name("one token"), [np.zeros(1, np.int64)])
        short = replace(problem, output=none, train=replace(problem.train, folder=stream))
        yield trial.refuses("a stream of one token", partial(trial.pretrainer.run, short), "at least two", "ValueError")
        yield from same("files of no run", {}, content(none))
        yield from _optimiser_refuses(trial, problem)


def _said_before(trial: Trial, problem: Pretraining) -> dict[str, Any]:
    """Earlier versions' states say this of such a run, which goes on from them."""
    digests = {"data": problem.train.folder / "index.json", "tokenizer": problem.tokenizer}
    said = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in digests.items()}
    settings = {name: value for name, value in trial.pretrainer.settings(problem.settings).items() if name != FREE}
    batches = {name: getattr(problem.train, name) for name in ("batch", "seq", "seed")}
    return {**settings, **said, **batches, "architecture": {**problem.architecture, "rope_scaling": None}}


def _of_one_size(text: bytes) -> bytes:
    """Another file of as many bytes: one line less."""
    return text.replace(b"\n", b" ", 1)


def _longer_refused(trial: Trial, problem: Pretraining) -> Comparison:
    """A run of the constant schedule is another one with more epochs too: its warm-up is a share of all steps."""
    given = replace(problem, output=problem.output.with_name("constant"), settings={**problem.settings, "schedule": "constant"})
    trial.pretrainer.run(given, stop_after=1)
    longer = replace(given, settings={**given.settings, "epochs": 2})
    return trial.refuses(
        "more epochs at a constant rate", partial(trial.pretrainer.run, longer, resume=True), r"state\.json: epochs is 1", "ValueError"
    )


def _of_several_shards(problem: Pretraining) -> Pretraining:
    """The run whose tokens lie in two shards at least, which have an order."""
    shards = [np.fromfile(path, "<u2").astype(np.int64) for path in sorted(problem.train.folder.glob("part-*"))]
    cut = shards if len(shards) > 1 else np.split(shards[0], [len(shards[0]) // 2])
    return replace(problem, train=replace(problem.train, folder=write_shards(problem.output.with_name("several shards"), cut)))


def _begun_over_a_run(trial: Trial, problem: Pretraining) -> Iterator[Comparison]:
    """No run begins over the state or a checkpoint of another; these stay as they are."""
    checkpoint = problem.output.with_name("a checkpoint alone")
    (checkpoint / "checkpoints").mkdir(parents=True)
    for folder in (problem.output, checkpoint):
        before = content(folder)
        yield trial.refuses(
            "a run begun twice", partial(trial.pretrainer.run, replace(problem, output=folder)), re.escape(folder.name), "FileExistsError"
        )
        yield from same("what a run begun twice leaves", before, content(folder))
    late = problem.output.with_name("begun meanwhile")
    other = partial(shutil.copytree, problem.output, late, dirs_exist_ok=True)
    run = partial(trial.pretrainer.run, replace(problem, output=late), meanwhile=other)
    yield trial.refuses("a run that another has begun meanwhile", run, late.name, "FileExistsError")
    yield from same("what a run begun too late leaves", content(problem.output), content(late))


def _optimiser_refuses(trial: Trial, problem: Pretraining) -> Iterator[Comparison]:
    """A state of which the last tensor is missing, of another shape or dtype, or not the last one, is refused and changes none."""
    rng = trial.rng("optimiser")
    given, held = (trial.pretrainer.random(problem.architecture, problem.seed) for _ in range(2))
    given.train(rng.integers(0, problem.train.vocab, (3, 8)))
    (steps, state), before = given.state(), held.state()
    last = list(state)[-1]
    others = {"missing": {name: value for name, value in state.items() if name != last}, "another": {**state, "surplus": state[last]}}
    others |= {
        "of another dtype": {**state, last: state[last].astype(np.float64)},
        "of another shape": {**state, last: state[last][..., :-1].copy()},
    }
    for name, other in others.items():
        yield trial.refuses(
            f"last tensor {name}", partial(held.restore, steps, other), "surplus" if name == "another" else last, "ValueError"
        )
        yield from same(f"state after a last tensor {name}", before, held.state())
    held.restore(steps, state)
    yield from same("a state that is put back", (steps, state), held.state())


def _goes_on(trial: Trial, problem: Pretraining, folder: Path) -> str:
    return trial.pretrainer.run(replace(problem, output=folder), resume=True).state_hash


def _other_runs(trial: Trial, problem: Pretraining) -> dict[str, Pretraining]:
    """All that decides what a run computes or writes, another in turn, by the key that its refusal names: each setting, number of the
    architecture and property of the batches, one token, the order of two, and the tokenizer."""
    train, settings = problem.train, trial.pretrainer.settings(problem.settings)
    others = {
        name: replace(problem, settings={**problem.settings, name: "linear" if name == "schedule" else another(value)})
        for name, value in settings.items()
        if name != FREE
    }
    others["gradient_clip_norm"] = replace(problem, settings={**problem.settings, "gradient_clip_norm": None})
    for name, architecture in other_architectures(problem.architecture).items():
        others[f"architecture.{name}"] = replace(problem, architecture=architecture)
    for name in ("batch", "seq", "seed"):
        others[name] = replace(problem, train=replace(train, **{name: getattr(train, name) + 1}))
    shards = [np.fromfile(path, "<u2").astype(np.int64) for path in sorted(train.folder.glob("part-*"))]
    ids, ends = np.concatenate(shards), np.cumsum([len(shard) for shard in shards])[:-1]
    at = int(np.flatnonzero(np.diff(ids))[-1])
    for name, change in (("a token", [(ids[at] + 1) % train.vocab, ids[at + 1]]), ("the order", ids[[at + 1, at]])):
        stream = np.split(np.concatenate([ids[:at], change, ids[at + 2 :]]), ends)
        others[f"data.{name}"] = replace(problem, train=replace(train, folder=write_shards(problem.output.with_name(name), stream)))
    turned = write_shards(problem.output.with_name("turned"), [*shards[1:], shards[0]])
    others["data.shards"] = replace(problem, train=replace(train, folder=turned))
    tokenizer = problem.output.with_name(problem.tokenizer.name)
    tokenizer.write_bytes(_of_one_size(problem.tokenizer.read_bytes()))
    return others | {"tokenizer": replace(problem, tokenizer=tokenizer)}


def _same_runs(problem: Pretraining) -> dict[str, Pretraining]:
    """What may be another in a continuation: the steps between two states, the held-out tokens, the weights, which are the state's, where
    tokens and tokenizer lie, and whether whole numbers have a point, or are NumPy's."""
    free = replace(problem, settings={**problem.settings, FREE: None})
    held_out = replace(problem, validation=replace(problem.train, seed=None))
    tokens, tokenizer = (problem.output.with_name(f"moved {name}") for name in ("tokens", problem.tokenizer.name))
    shutil.copytree(problem.train.folder, tokens)
    shutil.copy(problem.tokenizer, tokenizer)
    moved = replace(problem, train=replace(problem.train, folder=tokens), tokenizer=tokenizer)
    whole = {"gradient_clip_norm": 1, "weight_decay": 0}
    spelled = replace(problem, architecture={**problem.architecture, "theta": 10_000}, settings={**problem.settings, **whole})
    counts: dict[str, Any] = {name: np.int64(getattr(problem.train, name)) for name in ("batch", "seq", "seed")}
    spelled = replace(spelled, train=replace(problem.train, **counts))
    return {FREE: free, "validation": held_out, "start": replace(problem, seed=problem.seed + 1), "place": moved, "spelling": spelled}
