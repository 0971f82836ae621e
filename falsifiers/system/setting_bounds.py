"""The values that every setting may have: those at its bounds are taken, those beyond or of another kind are refused by its name."""

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.system.command_problem import piped
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.token_streams import write_shards
from blackswan.falsifiers.system.trial import Trial

LARGEST = 2**63 - 1
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOO_LONG = 16**5000
WORDS = ("many", "", "nan", "none of these")


@dataclass(frozen=True)
class Values:
    """What a setting may be and what not; `beside` are the settings without which its values mean nothing.

    What is `alike` is another spelling of the value behind it: it is refused, or it is that value.
    """

    taken: tuple[Any, ...]
    refused: tuple[Any, ...]
    beside: Mapping[str, Any]
    alike: tuple[tuple[Any, Any], ...] = ()

    def or_none(self) -> "Values":
        """The setting may be left open too."""
        return replace(self, taken=(*self.taken, None), refused=tuple(value for value in self.refused if value is not None))

    def or_like(self, **alike: str) -> "Values":
        """The setting may have other spellings of its words."""
        return replace(self, alike=(*self.alike, *alike.items()))


def _values(taken: tuple[Any, ...], *refused: Any, **beside: Any) -> Values:
    return Values(taken, (*refused, *WORDS, None, {"a": 1}), beside)


def _whole(low: int, high: int = LARGEST) -> Values:
    found = _values((low, high), low - 1, -LARGEST, high + 1, 10**400, "1_0", low + 0.5, True, [low], math.nan, math.inf)
    return replace(found, alike=((float(low + 1), low + 1),))


def _real(low: float, high: float, *, low_in: bool = False, high_in: bool = True) -> Values:
    """A number of an interval, with the next ones on either side of its ends."""
    inside = (low if low_in else math.nextafter(low, math.inf), high if high_in else math.nextafter(high, -math.inf))
    outside = (math.nextafter(low, -math.inf) if low_in else low, math.nextafter(high, math.inf) if high_in else high)
    return _values(inside, *outside, -1, 10**400, True, [inside[1]], math.nan, math.inf, -math.inf)


def _one_of(*words: str) -> Values:
    found = _values(words, *(f"{word}s" for word in words), 1, True, [words[0]], math.nan)
    return replace(found, alike=tuple((odd, words[0]) for odd in (words[0].upper(), f" {words[0]}")))


SWITCH = _values((True, False), 0, 1, 1.0, "on", "yes", [True], math.nan)
TRAINING: dict[str, Values] = {
    "num_classes": _whole(2),
    **dict.fromkeys(("lora_rank", "epochs", "max_seq_len", "log_interval", "batch_size", "accumulation_steps"), _whole(1)),
    **dict.fromkeys(("lora_alpha", "learning_rate"), _real(0.0, 1e30)),
    **dict.fromkeys(("warmup_fraction", "weight_decay"), _real(0.0, 1.0, low_in=True)),
    "gradient_clip_norm": _real(0.0, 1e30).or_none(),
    "early_stop_patience": _whole(1).or_none(),
    "validation_fraction": _real(0.0, 1.0, low_in=True, high_in=False),
    "seed": _whole(0),
    "schedule": _one_of("constant", "linear", "cosine"),
    "pooling": _one_of("mean", "last", "first"),
    "padding_side": _one_of("right", "left"),
    "dtype": _one_of("float32", "bfloat16"),
    "backend": _one_of("auto", "torch", "fused"),
    "lora_targets": _values(
        ("q_v", "all", *MODULES, ",".join(MODULES[::2])),
        "full",
        "q_prj",
        ",q_proj",
        "q_proj;v_proj",
        "q_proj,all",
        *(["q_proj", "v_prj"], ["q_prj"], [["q_proj"], "v_proj"], []),
        1,
        True,
    ),
    "quantize_nf4": replace(SWITCH, beside={"double_quantize": False}),
    "double_quantize": replace(SWITCH, beside={"quantize_nf4": True}),
    "multi_label": SWITCH,
    "class_weights": _values(
        ("balanced", "balanced_over_classes", [5e-324, 1e300, 1]),
        *([1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 1.0], [1.0, -5e-324, 1.0], [1.0, math.nan, 1.0], [1.0, math.inf, 1.0]),
        *([1.0, "many", 1.0], [1.0, True, 1.0], [], "balance", "1,2,,3", "1,2,3,", 1, 3.0, True),
        num_classes=3,
    )
    .or_none()
    .or_like(Balanced="balanced"),
}
TOGETHER: dict[str, dict[str, Any]] = {
    "double_quantize": {"double_quantize": True, "quantize_nf4": False},
    "class_weights": {"class_weights": "balanced", "multi_label": True},
}
"""Settings that contradict each other, by the one that is named."""
PRETRAINING: dict[str, Values] = {
    **dict.fromkeys(("epochs", "micro_batch"), _whole(1)),
    "save_every": _whole(1).or_none(),
    "learning_rate": _real(0.0, 1e30),
    "gradient_clip_norm": _real(0.0, 1e30).or_none(),
    **dict.fromkeys(("warmup_fraction", "weight_decay"), _real(0.0, 1.0, low_in=True)),
    "schedule": _one_of("constant", "linear", "cosine"),
}
BATCHES: dict[str, Values] = {"batch": _values((1, 40), 0, -1, 1.0), "seq": _whole(2, 512), "seed": _whole(0)}
"""Options of the command alone; the shipped checkpoint is for 512 positions, and a batch of more rows than there are has all of them."""
DEFAULTS: dict[str, Any] = {
    **{"epochs": 1, "micro_batch": 8, "learning_rate": 3e-4, "warmup_fraction": 0.06, "schedule": "cosine", "weight_decay": 0.1},
    **{"gradient_clip_norm": 1.0, "save_every": None},
}
OF_BATCHES = {"batch": 8, "seq": 512, "seed": 0}
HELP = {"learning_rate": "3e-4", "gradient_clip_norm": "1", "save_every": "after each epoch"}
"""What a pre-training run has where nothing is given, and how the help says it where it does so otherwise than Python."""
AWAY = {
    **{"epochs": 2, "micro_batch": 3, "learning_rate": 2e-4, "warmup_fraction": 0.25, "schedule": "linear", "weight_decay": 0.2},
    **{"gradient_clip_norm": None, "save_every": 1},
}
"""Other settings of a pre-training run, all of them."""
FILES: dict[str, tuple[bytes, int | None]] = {
    "epochs is given twice, first in line 1": (b"epochs: 2\nseed: 1\nepochs: 2\n", 3),
    "the nearest is 'lora_rank'": (b"seed: 1\nlora_rnk: 2\n", 2),
    "the nearest is 'lora_rank' ": (b"lora-rank: 2\n", 1),
    "the nearest is 'epochs'": (b"Epochs: 2\n", 1),
    "epochs is '2'": (b"seed: 1\nepochs: '2'\n", 2),
    "no setting is named": (b"[a, b]: 2\n", 1),
    "is not UTF-8": (b"dtype: float32 # \xff\n", None),
    "is not UTF-8 ": ("epochs: 2\n".encode("utf-16"), None),
    "is not YAML": (b"seed: 1\nepochs: [1\n", None),
    "is not YAML ": (b"seed: 1\n\tepochs: 1\n", 2),
    "is not YAML  ": (b"seed: 1\n---\nepochs: 2\n", 2),
    "is not YAML   ": (b"seed: 1 # \x07\n", None),
    "expected lines": (b"- epochs\n- 2\n", None),
    "expected lines ": (b"", None),
    "expected lines  ": (b"epochs", None),
    "expected lines   ": (b"epochs: " + 500 * b"[" + 500 * b"]", None),
    "class_weights is a list": (b"seed: 1\nclass_weights: &own [1, *own]\n", 2),
    "lora_targets is a list": (b"lora_targets: [[q_proj], v_proj]\n", 1),
    "nearest: linear": (b"schedule: linera\n", 1),
    "nearest: q_proj": (b"seed: 1\nlora_targets: q_prj\n", 2),
    "expected an integer or none": (b"early_stop_patience: 1.5\n", 1),
    "model_params is given twice, first in line 1": (b"model_params: 7\nseed: 1\nmodel_params: 7\n", 3),
    "quantize_nf4 is 'yes'": (b"quantize_nf4: !!bool yes\n", 1),
    "early_stop_patience is 'never'": (b"early_stop_patience: !!null never\n", 1),
    "epochs is '3.5'": (b"epochs: !!int 3.5\n", 1),
    "weight_decay is 'much'": (b"weight_decay: !!float much\n", 1),
    "epochs is": (b"seed: 1\nepochs: " + 5000 * b"9", 2),
    "learning_rate is": (b"learning_rate: 0x" + 5000 * b"f", 1),
}
"""Files that hold no settings: what is said of each, and the line that is named."""
SEVERAL = ("--epochs=many", "--seed=some")
GOOD = "\ufeff# a comment\nepochs:   2\nseed: 0x10\nlora_targets: [q_proj, v_proj]\ngradient_clip_norm: ~\nmodel_params: 7\n"
GOOD += f"lora_alpha: {10**30}\nclass_weights: [{10**30}, 1, 1.0]\nnum_classes: 3\n"  # beyond 64 bits, and at the bound
GOOD += "batch_size: &few 4\naccumulation_steps: *few\nlearning_rate: !!float 1\n"
JSON = '{"epochs": 2, "lora_targets": ["q_proj", "v_proj"],\n "gradient_clip_norm": null, "quantize_nf4": false, "schedule": "linear"}'


def training_settings_have_bounds(trial: Trial) -> Iterator[Comparison]:
    """Every value of the table by Python, and every other one by an option or a file; two settings that contradict each other.

    A refusal names the setting, and the option or the file and its line, whatever line that is. Files that are none are refused too.
    """
    rng = trial.rng("ways")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        for name, values in TRAINING.items():
            for value, taken in _each(values):
                given = {**values.beside, name: value}
                before = repr(given)[:400]
                yield from _in_python(trial, partial(trial.classifiers.settings, given), name, value, taken=taken)
                yield from same(f"what was given with {name} = {str(value)[:40]}", before, repr(given)[:400])
                way = [None, None, _by_file, _by_option if _is_option(name, value) else _by_file][int(rng.integers(4))]
                if isinstance(value, str) and "," in value:  # which is how an option lists values
                    way = _by_option
                if isinstance(value, list) and name == "lora_targets":  # which only a file has
                    way = _by_file
                yield from way(trial, folder, name, given, taken=taken) if way else ()
            yield from _of_numpy(trial, trial.classifiers.settings, name, values)
            for value, plain in values.alike:
                yield from _alike(trial, partial(trial.classifiers.settings, {**values.beside, name: value}), name, value, plain)
        for name, given in TOGETHER.items():
            yield from _in_python(trial, partial(trial.classifiers.settings, given), name, given, taken=False)
            yield from (each for way in (_by_option, _by_file) for each in way(trial, folder, name, given, taken=False))
        kept = trial.classifiers.weights_of_a_list([0.5, 2.0, 1.25])
        yield from same("class weights of a list that was emptied since", (0.5, 2.0, 1.25), kept)
        for said, odd in [*_unknown(), *_too_long()]:
            yield from _in_python(trial, partial(trial.classifiers.settings, odd), said, said, taken=False)
        yield from _files(trial, folder)
    yield from (each for odd in ("q_proj, o_proj", "q_proj,o_proj,") for each in _listed_loosely(trial, odd))


def _alike(trial: Trial, ask: Callable[[], Mapping[str, Any]], name: str, value: Any, plain: Any) -> Iterator[Comparison]:
    """Another spelling of a value is refused, or is that value, also by its type."""
    try:
        found = ask()[name]
    except SubjectError:
        yield trial.refuses(f"{name} = {value!r} by Python", ask, name, "ValueError")
    else:
        yield from same(f"{name} = {value!r} by Python", repr(plain), repr(found))


def _of_numpy(trial: Trial, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]], name: str, values: Values) -> Iterator[Comparison]:
    """A number of NumPy that is a float in Python too, as those of a range are, is taken where the float is. One of another kind, of which
    JSON has none, is refused, or is Python's."""
    for given in (value for value in values.taken if isinstance(value, float)):
        yield from _in_python(trial, partial(ask, {**values.beside, name: np.float64(given)}), name, np.float64(given), taken=True)
        for odd in (np.float32(given), Fraction(given)):
            yield from _alike(trial, partial(ask, {**values.beside, name: odd}), name, odd, float(odd))
    for whole in (value for value in values.taken if isinstance(value, int) and not isinstance(value, bool)):
        yield from _alike(trial, partial(ask, {**values.beside, name: np.int64(whole)}), name, np.int64(whole), whole)


def _listed_loosely(trial: Trial, odd: str) -> Iterator[Comparison]:
    """Projections with a blank or a comma too many are refused by the setting's name, or are those that they are without it."""
    plain, given = "q_proj,o_proj", {"num_classes": 2, "lora_rank": 1, "max_seq_len": 4}
    shown = [trial.commands.attempt("summary", f"--model={CHECKPOINT}", f"--lora-targets={each}") for each in (plain, odd)]
    if shown[1].status:
        yield from same(f"{odd} by option", (4, "", True), (shown[1].status, shown[1].out, "--lora-targets: " in shown[1].err))
    else:
        yield from same(f"{odd} by option", *(said.out.replace(odd, plain) for said in shown))
    ask = [partial(trial.classifiers.fresh, CHECKPOINT, {**given, "lora_targets": each}, ["ls"]) for each in (plain, odd)]
    try:
        found = ask[1]()
    except SubjectError:
        yield trial.refuses(f"{odd} by Python", ask[1], "lora_targets", "ValueError")
    else:
        yield from same(f"{odd} by Python", sorted(ask[0]().trainable), sorted(found.trainable))


def _unknown() -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that there are not, one of them like no other in name, and what is said of each."""
    yield from (("lora_rank", {"lora_rnk": 1}), ("bias", {"bias": None}))


def _too_long() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every setting with a number of more digits than Python writes."""
    for name, values in TRAINING.items():
        yield name, {**values.beside, name: [1.0, TOO_LONG, 1.0] if name == "class_weights" else TOO_LONG}


def pretraining_settings_have_bounds(trial: Trial) -> Iterator[Comparison]:
    """The same of a pre-training run, by Python and by options; with the options of its batches. The help says each default as it is.

    A file of settings is refused, or each of them is the run's as the file says it.
    """
    yield from same("settings where none is given", DEFAULTS, trial.pretrainer.settings({}))
    text = " ".join(trial.pretrainer.help().split())
    said = {name: re.search(rf"--{_dashed(name)} [A-Z]+ [^()]*\(default: ([^)]*)\)", text) for name in (*DEFAULTS, *OF_BATCHES)}
    expected = {name: str(HELP.get(name, value)) for name, value in {**DEFAULTS, **OF_BATCHES}.items()}
    yield from same("defaults by the help", expected, {name: match and match[1] for name, match in said.items()})
    with tempfile.TemporaryDirectory() as parent:
        tokens = write_shards(Path(parent) / "tokens", [np.arange(40)])
        where = ("pretrain", f"--model={CHECKPOINT}", f"--tokens={tokens}", f"--output={parent}/run", f"--validation={parent}/absent")
        for name, values in {**PRETRAINING, **BATCHES}.items():
            for value, taken in _each(values):
                if name in PRETRAINING:
                    yield from _in_python(trial, partial(trial.pretrainer.settings, {name: value}), name, value, taken=taken)
                if not isinstance(value, list | dict) and value not in (None, "1_0"):  # Python's own reading of a number
                    asked = f"{name} = {value!r} by option"
                    yield from _answered(trial, asked, (*where, *_options({name: value})), f"{name}|--{_dashed(name)}", taken=taken)
            yield from _of_numpy(trial, trial.pretrainer.settings, name, values) if name in PRETRAINING else ()
            for value, plain in values.alike if name in PRETRAINING else ():
                yield from _alike(trial, partial(trial.pretrainer.settings, {name: value}), name, value, plain)
        yield from _of_a_file(trial, Path(parent))


def _of_a_file(trial: Trial, folder: Path) -> Iterator[Comparison]:
    """JSON, which YAML is too: with null for a norm that nothing clips, and another value than the default's for each of the others."""
    (folder / "settings.json").write_text(json.dumps(AWAY))
    tokens, run = write_shards(folder / "more tokens", [np.arange(100)]), folder / "of a file"
    where = ("pretrain", f"--model={CHECKPOINT}", f"--tokens={tokens}", f"--output={run}", "--batch=4", "--seq=8")
    said = trial.commands.attempt(*where, f"--config={folder / 'settings.json'}")
    if said.status == 0:
        stated = json.loads((run / "state" / "state.json").read_text())["run"]
        expected = {name: value for name, value in AWAY.items() if name != "save_every"}  # by which no run is another
        yield from same("settings of a run by a file", expected, {name: stated.get(name, "not stated") for name in expected})
    else:
        yield from same(
            "status and output of pretrain by a file, and whether a run is there", (4, "", False), (said.status, said.out, run.exists())
        )


def _each(values: Values) -> Iterator[tuple[Any, bool]]:
    yield from ((value, True) for value in values.taken)
    yield from ((value, False) for value in values.refused if not any(value is one for one in values.taken))


def _in_python(trial: Trial, ask: Callable[[], Mapping[str, Any]], name: str, value: Any, *, taken: bool) -> Iterator[Comparison]:
    if not taken:
        yield trial.refuses(f"{name} = {str(value)[:40]} by Python", ask, name, "ValueError")
    else:
        yield from same(f"{name} = {value!r} by Python", tuple(value) if isinstance(value, list) else value, ask()[name])


def _is_option(name: str, value: Any) -> bool:
    """Whether a command line can say it: a switch has no value there, and a list is one of several."""
    switch = TRAINING[name].taken == (True, False)
    return isinstance(value, bool) if switch else value is not None and not (isinstance(value, dict | list) and len(value) < 2)


def _by_option(trial: Trial, folder: Path, name: str, given: Mapping[str, Any], *, taken: bool) -> Iterator[Comparison]:
    asked = f"{name} = {str(given[name])[:40]} by option"
    yield from _answered(trial, asked, (*_train(folder), *_options(given)), f"--{_dashed(name)}: {name}", taken=taken)


def _by_file(trial: Trial, folder: Path, name: str, given: Mapping[str, Any], *, taken: bool) -> Iterator[Comparison]:
    """The setting comes last, after a line for each other and a comment."""
    lines = [*(f"{key}: {_written(value)}" for key, value in given.items() if key != name), "# at last", f"{name}: {_written(given[name])}"]
    (folder / "run.yaml").write_text("\n".join(lines) + "\n")
    asked = f"{name} = {str(given[name])[:40]} by file"
    yield from _answered(trial, asked, (*_train(folder), f"--config={folder / 'run.yaml'}"), f"run.yaml:{len(lines)}: {name}", taken=taken)


def _files(trial: Trial, folder: Path) -> Iterator[Comparison]:
    """Files that are no settings; one with all that YAML allows is taken."""
    path = folder / "file.yaml"
    asked = (*_train(folder), f"--config={path}")
    for name, (written, line) in FILES.items():
        path.write_bytes(written)
        place = str(path) if line is None else f"{path}:{line}: "
        yield from _answered(trial, f"file: {name}", asked, place, taken=False, also=name.strip())
    path.write_text("epochs: 0.5\nseed: 1\nlora_rnk: 2\n")
    for name, given, places in (
        ("file", asked, (f"{path}:1: epochs", f"{path}:3: ")),
        ("command line", SEVERAL, ("--epochs: ", "--seed: ")),
    ):
        for place in places:
            yield from _answered(trial, f"two problems in a {name}", (*_train(folder), *given[-2:]), place, taken=False)
    for kind, text in {"a mark and a comment": GOOD, "lines that end by CR and LF": GOOD.replace("\n", "\r\n"), "JSON": JSON}.items():
        path.write_bytes(text.encode())
        yield from _answered(trial, f"file with {kind}", asked, "", taken=True)
    with piped(JSON.encode()) as name:
        yield from _answered(trial, "pipe by name", (*_train(folder), f"--config={name}"), "", taken=True)
    path.write_text("seed: 1\nepochs: 0\nlog_interval: 2\n")
    for option, place in (("--epochs=1", ""), ("--log-interval=0", f"{path}:2: epochs"), ("--epochs=-1", "--epochs: epochs is -1")):
        yield from _answered(trial, f"{option} beside a file", (*asked, option), place, taken=not place)
    yield from _answered(trial, "no such file", (*_train(folder), f"--config={folder / 'none.yaml'}"), "none.yaml", taken=False)
    yield from _answered(trial, "a folder for a file", (*_train(folder), f"--config={folder}"), f"{folder}: cannot be read", taken=False)


def _train(folder: Path) -> tuple[str, ...]:
    return ("train", f"--model={CHECKPOINT}", f"--corpus={folder / 'absent'}", f"--output={folder / 'run'}")


def _answered(trial: Trial, asked: str, arguments: tuple[str, ...], place: str, *, taken: bool, also: str = "") -> Iterator[Comparison]:
    """A command that has nothing to read says so, or that a setting of it is refused: with status 4, and nothing printed."""
    said = trial.commands.attempt(*arguments)
    yield from same(f"{asked}: status and output", (4, ""), (said.status, said.out))
    if taken != ("absent" in said.err):
        yield broken(asked, "refused" if taken else "accepted", place, said.err[-300:])
    elif not taken and not (any(word in said.err for word in place.split("|")) and also in said.err):
        yield broken(asked, "named otherwise", f"{place} {also}", said.err[-300:])


def _options(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, bool) and name in TRAINING and TRAINING[name].taken == (True, False):
            yield f"--{_dashed(name)}" if value else f"--no-{_dashed(name)}"
        elif isinstance(value, list):
            yield f"--{_dashed(name)}={','.join(map(_written, value))}"
        else:
            yield f"--{_dashed(name)}={value if isinstance(value, str) else _written(value)}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _written(value: Any) -> str:
    """As YAML writes it, and a command line alike; no more digits than Python writes at once."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    return json.dumps(value)
