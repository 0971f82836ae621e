"""Runs that are killed or broken off, and continued."""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Corpus, Kill, Plan, Run
from blackswan.falsifiers.system.run_problem import BATCH, PARTS, STATE, SmallRun, left_as_kept, read_state, small_run, with_samples
from blackswan.falsifiers.system.runs import FEW, UNSTEADY
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial

KILLED, EMBEDDING = "killed", "model.embed_tokens.weight"
FEATURES: tuple[dict[str, Any], ...] = ({"class_weights": [0.25, 1.5, 4.0]}, {"multi_label": True})
"""Settings of which each has a part in a run's identity or in its steps."""


def killed_run_goes_on(trial: Trial, *, kills: int) -> Iterator[Comparison]:
    """Processes that are killed (SIGKILL) at random writes to the folder or steps, and continued, do what one whole run does.

    This holds bit for bit of every step that any of them made, and in the end of parameters, moments, rates, progress and both adapters.
    The rates are no longer the schedule's: each step sets that of the next one. By turns classes have weights, or samples
    several labels.
    """
    rng, features = trial.rng("kills"), FEATURES[trial.seed % len(FEATURES)]
    problem = small_run(trial, epochs=4, learning_rate=0.1, early_stop_patience=2 + trial.seed % 2, **features)
    plan = Plan(processes=1, save_every=[None, 1, 2][trial.seed % 3], next_rate=0.5)
    with tempfile.TemporaryDirectory() as parent:
        whole = trial.trainer.fit(problem, Path(parent) / "whole", plan)
        parts = _continued(trial, problem, Path(parent) / "killed", plan, _kills(rng, whole.ranks[0].events, kills))
        if parts[-1].ranks[0].ended:
            yield broken(f"after {len(parts) - 1} kills", "the run did not go on", "its end", parts[-1].ranks[0].ended)
            return
        steps = {step.number: step for step in whole.steps}
        made = {step.number: step for run in parts for step in run.steps}
        yield from same("steps made", sorted(steps), sorted(made))
        for number, run in enumerate(parts, start=1):
            yield from (each for step in run.steps for each in same(f"process {number}, step {step.number}", steps.get(step.number), step))
        yield from same("result", whole.result, parts[-1].result)
        yield from same("folder", *(trial.trainer.kept(Path(parent) / name) for name in ("whole", "killed")))


def _continued(trial: Trial, problem: SmallRun, folder: Path, plan: Plan, kills: Sequence[Kill]) -> list[Run]:
    """A process for each kill and one without, up to the first that comes to its own end."""
    parts: list[Run] = []
    for kill in (*kills, None):
        parts.append(trial.trainer.fit(problem, folder, replace(plan, kill=kill, resume=(folder / "run.json").exists())))
        if parts[-1].ranks[0].ended != KILLED and (kill is None or parts[-1].ranks[0].ended):
            break
    return parts


def _kills(rng: Generator, events: Sequence[str], count: int) -> list[Kill]:
    """Random moments after the run has begun, one of the names of the state's file and one of the others by turns; early ones more often,
    since a continued process has fewer.
    """
    names = sorted({name for name in events if "run.json" not in name and not name.startswith("os.mkdir")})
    chosen = []
    for turn in range(count):
        name = str(rng.choice([name for name in names if ("state" in name) == (turn % 2 == 0)]))
        chosen.append(Kill(name, int(rng.integers(1, max(1, events.count(name) // (turn + 1)) + 1))))
    return chosen


def goes_on_from_every_write(trial: Trial) -> Iterator[Comparison]:
    """The folder as it was before something was done to one of its files: of the moments of each name one is drawn, and the run goes on
    from there, or begins anew where it had not begun, and ends as it did, in its folder and in memory; so it does from its end, where no
    step is left. A state is written after each step, the last one of an epoch too, and is that of its step, even if the next one is made
    before it is written. No file of the run is ever gone or empty after it was there, and none stays half written. Where the system takes a
    piece of what is written at a call, the run leaves the same.
    """
    rng, problem = trial.rng("moments"), small_run(trial, samples=(BATCH, 3), epochs=2, learning_rate=0.1)
    with tempfile.TemporaryDirectory() as parent:
        folder, copies = Path(parent) / "whole", Path(parent) / "copies"
        whole = trial.trainer.fit(problem, folder, Plan(processes=1, save_every=1, copies=copies))
        moments: dict[str, dict[tuple[Any, ...], Path]] = {}
        there: set[str] = set()
        places = _place(folder)
        for copy in sorted(copies.iterdir(), key=lambda copy: int(copy.name.partition(" ")[0])):
            files, name = content(copy), copy.name.partition(" ")[2]
            places |= _place(copy)
            moments.setdefault(name, {})[tuple(sorted(files.items()))] = copy
            whole_files = {file for file, written in files.items() if written and not re.search(r"(^|/)\.", file)}
            yield from same(f"files that are gone before {name}", [], sorted(there - whole_files))
            there |= whole_files
        epochs, steps = problem.settings["epochs"], len(problem.batches)
        due = {(epoch, step) for epoch in range(epochs) for step in range(steps + 1)} | {(epochs, 0)}
        yield from same("epochs and steps in them whose states were not written", [], sorted(due - places - {(0, 0)}))
        seen: set[tuple[Any, ...]] = set()
        for name, different in sorted(moments.items()):
            if new := sorted(different.keys() - seen):
                seen.add(chosen := new[int(rng.integers(len(new)))])
                copy = different[chosen]
                rest = trial.trainer.fit(problem, copy, Plan(resume=(copy / "run.json").is_file()))
                yield from same(f"result after a kill before {name}", whole.result, rest.result)
                yield from same(f"folder after a kill before {name}", *(trial.trainer.kept(each) for each in (folder, copy)))
                yield from same(f"loss of the model after a kill before {name}", whole.left_loss, rest.left_loss)
                yield from left_as_kept(f"after a kill before {name}", rest, trial.trainer.kept(copy))
                more = sorted(content(copy).keys() - content(folder).keys())
                yield from same(f"files that are left half written after a kill before {name}", [], more)
        yield from _goes_on_from_its_end(trial, problem, folder, whole)
        short = trial.trainer.fit(problem, folder.with_name("short"), Plan(save_every=1, at_most=PIECE, leaving=True))
        yield from same("result where a call writes few bytes", whole.result, short.result)
        yield from same(
            "folder where a call writes few bytes", *(trial.trainer.kept(folder.with_name(name)) for name in ("whole", "short"))
        )
        yield from same(
            "run.json where a call writes few bytes", *((folder.with_name(name) / "run.json").read_bytes() for name in ("whole", "short"))
        )
        yield from _goes_on_after_an_early_stop(trial, Path(parent))
        made = trial.trainer.fit(problem, Path(parent) / "slow", Plan(save_every=1, stop_after=2, slowly=True))
        kept, states = trial.trainer.kept(Path(parent) / "slow"), {step.number: step.state for step in made.steps}
        yield from same("state on a slow disk", states.get(kept.progress["step"]), kept.state)


def _place(folder: Path) -> set[tuple[int, int]]:
    """The epoch of the run's state and the steps made in it; of none, and of one that is damaged, nothing."""
    with suppress(SafetensorError, FileNotFoundError):
        _, progress = read_state(folder / STATE)
        return {(progress["epoch"], progress["position"])}
    return set()


def _goes_on_after_an_early_stop(trial: Trial, parent: Path) -> list[Comparison]:
    """A run that has stopped early makes no step, and leaves a model that never trained at the last epoch's tensors, not the best one's.

    Broken off in its last epoch, it ends alike where somebody has moved the best adapter elsewhere, which the last one takes the place of
    only if it is better.
    """
    problem = small_run(trial, samples=FEW, epochs=7, learning_rate=UNSTEADY, early_stop_patience=1)
    run, again = (trial.trainer.fit(problem, parent / "early", Plan(resume=resume)) for resume in (False, True))
    found = same("asked to go on", ([], run.result, run.left_loss), (again.steps, again.result, again.left_loss))
    kept = trial.trainer.kept(parent / "early")
    last = replace(kept, state={f"trainable/{name}": value for name, value in kept.last.items()})
    found += left_as_kept("asked to go on", again, last)
    before = len(problem.batches) * (len(run.result.epochs) - 1) if run.result else 0
    trial.trainer.fit(problem, folder := parent / "without its best", Plan(stop_after=before + 1))
    shutil.rmtree(folder / "best")
    rest = trial.trainer.fit(problem, folder, Plan(resume=True))
    better = run.result is not None and run.result.best_epoch == len(run.result.epochs)
    return found + same("without the best adapter", (run.result, better), (rest.result, (folder / "best").exists()))


def _goes_on_from_its_end(trial: Trial, problem: SmallRun, folder: Path, whole: Run) -> list[Comparison]:
    """The run that has ended is asked to go on by a model that never trained: it changes no file, and leaves what the run itself left."""
    before, kept = content(folder), trial.trainer.kept(folder)
    again = trial.trainer.fit(problem, folder, Plan(resume=True))
    found = same("result of the run that has ended", (whole.result, whole.left_loss), (again.result, again.left_loss))
    return [*found, *same("folder of the run that has ended", before, content(folder)), *left_as_kept("at the end", again, kept)]


PIECE = 1000
"""So many bytes a system takes at a call, fewer than any state has."""
MANY = 3000
"""Samples of a corpus that is larger than others."""
ROWS, BASE = ((1, 2), (3,)), {"embedding": np.arange(6, dtype=np.float32).reshape(2, 3), "norm": np.array([-1.0, 0.5], np.float32)}
"""Token ids of two samples, and the weights of a base, of two classes each."""
EARLIER_SAMPLES: dict[tuple[Any, ...], str] = {
    (0, 1): "267665b6e856bef01d58f935bc9ce0db689e424762d8bb0e4639058cde452f6b",
    ((0, 1), (1, 1)): "71cb9254c259e57a462471695f630675e432264d7c041a9efa5986a44a7a3add",
}
EARLIER_BASE = "c45599bcab8c9179a57c99b2c9e106570624c079d8295f57a4d28be9d35d3551"
"""What run.json of an earlier version, whose runs go on, says of them."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EARLIER_TARGETS: dict[tuple[str, ...], str] = {("q_proj", "v_proj"): "q_v", PROJECTIONS: "all"}
"""What files of earlier versions say of these projections; of any others they say the names, in this order."""
REPEATS = 300
"""So many times an embedding's rows are repeated, until they have more than a million numbers."""
FREE = "log_interval"
"""The setting that a continuation may change: it changes no step."""
_OTHERS: dict[str, tuple[Any, ...]] = {
    "lora_targets": ("q_v", "all"),
    "schedule": ("linear", "cosine"),
    "pooling": ("mean", "last"),
    "padding_side": ("right", "left"),
    "dtype": ("float32", "bfloat16"),
    "backend": ("auto", "torch"),
    "class_weights": ("balanced", "balanced_over_classes"),
    "early_stop_patience": (1,),
}
"""Values of the settings that are neither numbers nor true or false."""


def refuses_to_continue_another_run(trial: Trial) -> Iterator[Comparison]:
    """A run is not continued with another value of any setting but the free one, on other samples or weights, in another architecture, or
    from a damaged state; in half of the cases a sample has several labels.

    The folder is as it was, and with another value of the free setting, and 4 where it had 4.0, the run goes on to its end.
    """
    for labels, digest in EARLIER_SAMPLES.items():
        yield from same(
            f"samples of labels {labels}, as a run of an earlier version knows them", digest, trial.corpora.known_by(ROWS, labels)
        )
    yield from same("weights, as a run of an earlier version knows them", EARLIER_BASE, trial.trainer.base_known_by(BASE))
    for some in (some for count in range(1, len(PROJECTIONS) + 1) for some in combinations(PROJECTIONS, count)):
        known = trial.trainer.targets_known_by(some)
        yield from same("projections, as a run of an earlier version knows them", EARLIER_TARGETS.get(some, ",".join(some)), known)
    problem, rng = small_run(trial, quantize_nf4=True, multi_label=trial.seed % 2 == 1), trial.rng("changes")
    settings = trial.trainer.settings(problem)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        trial.trainer.fit(problem, folder, Plan(save_every=1, stop_after=2))
        for name, (other, message) in other_runs(trial, problem, rng).items():
            yield from _refused(trial, name, other, folder, message)
        (file,) = (folder / "state").iterdir()
        state = file.read_bytes()
        for place in ("file", "tensors", "progress"):
            file.write_bytes(_damaged(state, place, float(rng.random())))
            yield from _refused(trial, f"a damaged state, in its {place}", problem, folder, "state.*damaged")
        file.write_bytes(state)
        yield from _on_many_samples(trial, Path(parent) / "many", rng)
        yield from _on_a_large_base(trial, Path(parent) / "large")
        for edited, word in (("a label", r"data\.training"), ("a weight", "base_weights")):
            plan = Plan(interrupts=1, going_on=True, edited=edited)
            ask = partial(trial.trainer.fit, problem, Path(parent) / edited, plan)
            yield trial.refuses(f"{edited} that has changed in memory", ask, word, "ValueError")
        whole = _whole_numbers(problem.architecture), _whole_numbers({**problem.settings, FREE: settings[FREE] + 1})
        free = replace(problem, architecture=whole[0], settings=whole[1])
        runs = []
        for each in (free, free, problem):
            runs.append(trial.trainer.fit(each, folder, Plan(resume=True)))
            for name in ("last", "best"):  # somebody moves the adapters elsewhere
                shutil.rmtree(folder / name, ignore_errors=True)
    steps = problem.settings["epochs"] * len(problem.batches)
    yield from same(f"steps with another {FREE}, and once more", [steps] * 3, [run.result and run.result.steps for run in runs])


def _whole_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers as a program writes them that has 4 for 4.0."""
    return {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in values.items()}


def _on_many_samples(trial: Trial, folder: Path, rng: Generator) -> list[Comparison]:
    """A run on thousands of samples of several labels is not continued with another token, or with another of its labels, in one."""
    problem = small_run(trial, multi_label=True)
    rows, labels = ([*given] * (MANY // len(problem.training)) for given in (problem.training.rows, problem.training.labels))
    many, found = with_samples(problem, "training", Corpus(rows, labels)), list[Comparison]()
    trial.trainer.fit(many, folder, Plan(save_every=1, stop_after=1))
    for kind, at in enumerate(rng.choice(len(rows), problem.classes, replace=False).tolist()):
        token = Corpus([*rows[:at], [*rows[at][:-1], rows[at][-1] ^ 1], *rows[at + 1 :]], labels)
        turned = [one ^ (place == kind) for place, one in enumerate(labels[at])]
        label = Corpus(rows, [*labels[:at], turned, *labels[at + 1 :]])
        for name, other in (("token", token), ("label", label)):
            found += _refused(trial, f"another {name} in sample {at}", with_samples(problem, "training", other), folder, r"data\.training")
    return found


def _on_a_large_base(trial: Trial, folder: Path) -> list[Comparison]:
    """A run on a base of which one weight has more than a million numbers is not continued where its last two rows changed places."""
    problem = small_run(trial)
    rows = np.tile(problem.parameters[EMBEDDING], (REPEATS, 1))
    exchanged = rows[[*range(len(rows) - 2), -1, -2]]
    architecture = {**problem.architecture, "vocab": len(rows)}
    large, other = (
        replace(problem, architecture=architecture, parameters={**problem.parameters, EMBEDDING: weight}) for weight in (rows, exchanged)
    )
    trial.trainer.fit(large, folder, Plan(save_every=1, stop_after=1))
    return _refused(trial, "the last two rows of a large weight exchanged", other, folder, "base_weights")


def other_runs(trial: Trial, problem: SmallRun, rng: Generator) -> dict[str, tuple[SmallRun, str]]:
    """All that decides what a run computes, another in turn, by its name, and what the refusal names: each setting, number of the
    architecture and kind of change of the samples, and a weight of the base."""
    unlike = {FREE, *(["class_weights"] if problem.several else [])}  # several labels have no class weights
    settings = {name: value for name, value in trial.trainer.settings(problem).items() if name not in unlike}
    others = {
        f"settings.{name}": (_with_another(trial, problem, name, value), rf"settings\.{name} was {_shown(value)} and is ")
        for name, value in settings.items()
    }
    for name, other in other_architectures(problem.architecture).items():
        others[f"architecture.{name}"] = replace(problem, architecture=other), rf"architecture\.{name}"
    for part in PARTS:
        for name, corpus in _other_samples(getattr(problem, part), problem.classes, rng).items():
            others[f"data.{part}, {name}"] = with_samples(problem, part, corpus), rf"data\.{part}"
    others["data.validation, none"] = replace(problem, validation=None), r"data\.validation"
    return others | {name: (other, "base_weights") for name, other in _on_other_bases(problem, rng).items()}


def _shown(value: Any) -> str:
    """A setting as the run's file has it."""
    return re.escape(repr(json.loads(json.dumps(value))))


def other_architectures(architecture: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The architecture with another number that no tensor's shape shows, by its name."""
    changes: dict[str, dict[str, Any]] = {
        **{name: {name: math.nextafter(architecture[name], 1.0)} for name in ("eps", "theta")},
        **{"tied": {"tied": not architecture["tied"]}, "max_positions": {"max_positions": architecture.get("max_positions", 2**31) - 1}},
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 32},
    }
    if architecture["family"] != "qwen3":  # whose heads have a norm of their own
        changes["head_dim"] = {
            **{name: 2 * architecture[name] for name in ("heads", "kv_heads")},
            "head_dim": architecture["head_dim"] // 2,
        }
    return {name: {**architecture, **change} for name, change in changes.items()}


def _refused(trial: Trial, name: str, problem: SmallRun, folder: Path, message: str) -> list[Comparison]:
    before = content(folder)
    refused = trial.refuses(name, partial(trial.trainer.fit, problem, folder, Plan(resume=True)), message, "ValueError")
    changed = sorted(file for file, _ in content(folder).items() ^ before.items())
    return [refused, *(broken(f"{name}: {file}", "the refusal changed the folder") for file in changed)]


def _damaged(whole: bytes, place: str, share: float) -> bytes:
    """A safetensors file with one bit changed, a share of the way through the `file`, its `tensors`, or the digits of its `progress`.

    A digit with its last bit changed is another one, so that the file can still be read.
    """
    content, end = bytearray(whole), 8 + int.from_bytes(whole[:8], "little")
    places: Sequence[int] = range(end if place == "tensors" else 0, len(content))
    if place == "progress":
        text = json.dumps(json.loads(content[8:end])["__metadata__"]["progress"])[1:-1].encode()
        start = content.index(text)
        places = [start + at for at, byte in enumerate(text) if chr(byte).isdigit()]
    content[places[int(share * len(places))]] ^= 1
    return bytes(content)


def _with_another(trial: Trial, problem: SmallRun, name: str, value: Any) -> SmallRun:
    """The same run but for one setting, with the parameters and labels that go with it; a real number is the next that there is."""
    if name in _OTHERS:
        other = next(each for each in _OTHERS[name] if each != value)
    else:
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else math.nextafter(value, 0)
    return small_run(trial, **{"quantize_nf4": True, "multi_label": problem.several, name: other})


def _on_other_bases(problem: SmallRun, rng: Generator) -> dict[str, SmallRun]:
    """A weight that is twice as large in NF4, which changes its scales, and one in NF4, a norm, the embedding and a bias, where there is
    one, whose first two rows change places; by its name."""
    changes = {"twice as large": lambda weight: 2 * weight, "two rows exchanged": lambda weight: weight[[1, 0, *range(2, len(weight))]]}
    found = {}
    exchanged = ["two rows exchanged"]
    for part, kinds in (("_proj.weight", [*changes]), ("norm.weight", exchanged), (EMBEDDING, exchanged), ("_proj.bias", exchanged)):
        names = [name for name in problem.parameters if name.endswith(part)]
        for kind in kinds if names else ():
            name = str(rng.choice(names))
            changed = np.ascontiguousarray(changes[kind](problem.parameters[name]))
            found[f"{name}, {kind}"] = replace(problem, parameters={**problem.parameters, name: changed})
    return found


def _another_label(label: Label, classes: int) -> Label:
    """The next class, or of several labels the last one changed."""
    return [*label[:-1], 1 - label[-1]] if isinstance(label, list) else (label + 1) % classes


def _other_samples(corpus: Corpus, classes: int, rng: Generator) -> dict[str, Corpus]:
    """Another token or label of one sample; two samples, or the ends of two, that change places; one sample less."""
    rows, labels, at = corpus.rows, corpus.labels, int(rng.integers(1, len(corpus)))
    token, label = [list(row) for row in rows], list(labels)
    token[at][-1] ^= 1
    label[at] = _another_label(labels[at], classes)
    order = [at, *range(1, at), 0, *range(at + 1, len(rows))]
    shifted = [*rows[: at - 1], [*rows[at - 1], rows[at][0]], rows[at][1:], *rows[at + 1 :]]
    return {
        "a token": Corpus(token, labels),
        "a label": Corpus(rows, label),
        "their order": Corpus([rows[place] for place in order], [labels[place] for place in order]),
        "where they end": Corpus(shifted, labels),
        "their number": Corpus(rows[:-1], labels[:-1]),
    }
