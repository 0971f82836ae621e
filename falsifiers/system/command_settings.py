"""The settings of a run by the command `train`: given by options, in files or not at all, and written down."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system import spelling
from blackswan.falsifiers.system.adapter_files import ADAPTER_WEIGHTS, BESIDE
from blackswan.falsifiers.system.command_problem import (
    CONFIG,
    RUN,
    STATISTICS,
    Small,
    in_yaml,
    metrics,
    options,
    small,
    texts_of,
)
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.stated import LIMIT, QLORA
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.classifier import TARGETS

ALPHA = {
    "one label": {"lora_rank": "option", "lora_alpha": "file", "weight_decay": "back"},
    "several labels": {"lora_rank": "both", "lora_alpha": "default", "accumulation_steps": "back"},
}
"""Alpha follows the rank, wherever that comes from, but only where alpha is given nowhere. With `back` a file has the value, and an option
the default."""


COMMANDS = ("train", "pretrain", "evaluate", "predict", "merge", "export", "tokenize", "summary")


@reads_files
def settings_reach_the_run(trial: Trial) -> list[Comparison]:
    """Each setting, away from its default, arrives bit for bit, given by an option, in a file or by both, of which the option counts, also
    where it has the default's value, in every spelling of YAML's.

    It stands in config.yaml, run.json and beside the adapter, also when that was opened and is saved again or merged; what is not given
    has its default. A run from config.yaml, in an empty folder that a link leads to, is the same run, and goes on with its projections in
    another order. That run is given names that hold where the command is, and goes on from within its folder.
    """
    found = _helped(trial)
    for name, away in _away(trial.rng("settings")).items():
        with small(trial, name, {}, tied=name == "one label") as problem:
            found += _reach(trial, name, problem, away)
    return found


def _helped(trial: Trial) -> list[Comparison]:
    """The program and each command say what they are, in ASCII, which every terminal shows, and those with settings name each of them."""
    said = {name: trial.commands.help(*name.split()) for name in ("", *COMMANDS)}
    found = same("status of the help", dict.fromkeys(said, 0), {name: each.status for name, each in said.items()})
    found += same("help beyond ASCII", [], [name for name, each in said.items() if not each.out.isascii()])
    found += same("commands that the help lacks", [], [name for name in COMMANDS if name not in said[""].out.split()])
    named = [f"--{key.replace('_', '-')}" for key in QLORA]
    for name in ("train", "summary"):
        found += same(f"settings that the help of {name} lacks", [], [option for option in named if option not in said[name].out])
    return found


def _away(rng: Generator) -> dict[str, dict[str, Any]]:
    """Every setting with another value than its default, in two combinations; numbers that no few digits hold."""
    odd = [float(np.nextafter(value, 1.0)) for value in rng.uniform(0.1, 0.9, 6)]
    common: dict[str, Any] = {
        **{"num_classes": 3, "lora_rank": 3, "lora_alpha": 7 * odd[0], "learning_rate": 2e-5 * odd[1], "epochs": 2, "max_seq_len": 9},
        **{"log_interval": 3, "accumulation_steps": 2, "warmup_fraction": odd[2], "weight_decay": odd[3] / 3, "schedule": "cosine"},
        **{
            "seed": int(rng.integers(2**62, 2**63 - 1)),
            "padding_side": "left",
            "backend": "torch",
            "validation_fraction": 0.3 + odd[4] / 1e4,
        },
    }
    one = {"batch_size": 2, "gradient_clip_norm": odd[5], "class_weights": [1 / 3, 1e-7 * odd[0], math.pi], "quantize_nf4": False}
    two = {"batch_size": 3, "gradient_clip_norm": None, "multi_label": True, "double_quantize": True, "dtype": "bfloat16"}
    return {
        "one label": {**common, **one, "lora_targets": "q_proj,down_proj", "pooling": "last", "early_stop_patience": 2},
        "several labels": {**common, **two, "lora_targets": "all", "pooling": "first", "early_stop_patience": 1},
    }


def _reach(trial: Trial, name: str, problem: Small, away: Mapping[str, Any]) -> Iterator[Comparison]:
    rng = trial.rng(f"ways {name}")
    ways = {setting: str(rng.choice(["option", "file", "both", "back", "default"], p=[0.3, 0.3, 0.2, 0.1, 0.1])) for setting in away}
    ways |= dict.fromkeys(("num_classes", "epochs", "class_weights", "multi_label", "double_quantize", "quantize_nf4", "seed"), "option")
    ways |= ALPHA[name]
    ways |= {setting: "both" for setting, value in away.items() if value is None}  # none is a value, which comes before a number too
    expected = QLORA | {setting: value for setting, value in away.items() if ways[setting] not in ("back", "default")}
    if ways["lora_alpha"] == "default":
        expected["lora_alpha"] = 2.0 * expected["lora_rank"]
    by_file = {setting: value for setting, value in away.items() if ways[setting] in ("back", "file")}
    by_file |= {setting: value for setting, value in QLORA.items() if ways.get(setting) == "both"}
    lines = ["# é\n", *(f"{setting}: {json.dumps(value)}\n" for setting, value in by_file.items())]
    (problem.folder / "given.yaml").write_text("".join(lines), encoding="utf-8")
    given = options({setting: value for setting, value in away.items() if ways[setting] in ("option", "both")})
    given += options({setting: QLORA[setting] for setting in away if ways[setting] == "back"})
    yield from _spelled(trial, problem.folder / "spelled.yaml", away)
    texts = texts_of(rng, 10)
    corpus = problem.corpus("corpus", texts, [index % 2 for index in range(10)])
    where = ["train", f"--model={problem.base}", f"--corpus={corpus}"]
    first, second = problem.folder / "first", problem.folder / "second"
    said = trial.commands.run(*where, f"--output={first}", f"--config={problem.folder / 'given.yaml'}", *given).out.splitlines()
    summary = trial.commands.run("summary", f"--adapter={first / 'last'}").out.splitlines()
    yield from same(f"summary of the adapter <{name}>", said[: len(summary)], summary)
    if name == "one label":  # it takes a quarter of a second
        memory = trial.commands.run("summary", "--memory", f"--adapter={first / 'last'}").out.splitlines()
        passes = expected["accumulation_steps"]
        step = f"batch {expected['batch_size']}{f' accumulated {passes} times' * (passes > 1)}, {expected['max_seq_len']} tokens"
        if (title := f"memory of a training step on CUDA, {step}") not in memory:
            yield broken("summary of the memory of an adapter", "is of another step", title, str(memory))
        else:
            apr = problem.folder / "base.apr"
            trial.commands.run("export", f"--model={problem.base}", f"--output={apr}")
            asked = ("summary", "--memory", *options(expected))
            of_model, of_file = (trial.commands.run(*asked, f"--model={each}").out.splitlines() for each in (problem.base, apr))
            yield from same("memory of an adapter, and of its settings", *(said[said.index(title) :] for said in (of_model, memory)))
            yield from same("memory of a folder, and of an .apr file", *(said[said.index(title) :] for said in (of_model, of_file)))
    if ways["lora_alpha"] == "default":
        yield from _alpha_of_a_file(trial, problem, where, expected)
        rank = int(rng.integers(200, 2000))
        shown = trial.commands.run("summary", f"--model={problem.base}", f"--lora-rank={rank}").out
        if (wanted := f"rank {rank}, alpha {2 * rank},") not in shown:
            yield broken("alpha of a large rank", "is another", wanted, shown[-600:])
    (problem.folder / "empty").mkdir()
    second.symlink_to("empty")  # as to a larger disk
    with chdir(problem.folder):
        trial.commands.run(*where[:2], f"--corpus={corpus.name}", "--output=second", f"--config=first/{CONFIG}")
    yield from _stated(name, problem, expected, first)
    trial.commands.run("merge", f"--adapter={first / 'last'}", f"--output={problem.folder / 'merged'}")
    trial.classifiers.saved_again(first / "last", problem.folder / "again")
    for part in ("merged", "again"):
        beside = json.loads((problem.folder / part / BESIDE).read_text())["extra"]["settings"]
        yield _alike(f"settings beside an adapter that was opened, and {part} <{name}>", expected, beside)
    for file in (CONFIG, STATISTICS, RUN):
        yield from same(f"{file} of a run from config.yaml <{name}>", (first / file).read_text(), (second / file).read_text())
    yield from same(f"metrics of a run from config.yaml <{name}>", metrics(first), metrics(second))
    turned = f"--lora-targets={','.join(reversed(_listed(expected['lora_targets'])))}"
    with chdir(second):
        trial.commands.run(*where, "--output=.", f"--config={CONFIG}", turned, "--resume")  # raises where it is another run
    for part in ("best", "last"):
        tensors = (load_file(run / part / ADAPTER_WEIGHTS) for run in (first, second))
        yield from same(f"{part}/ of a run from config.yaml <{name}>", *tensors)


def _alpha_of_a_file(trial: Trial, problem: Small, where: Sequence[str], expected: Mapping[str, Any]) -> Iterator[Comparison]:
    """Alpha is twice the rank of a file, where no option gives one; and the learning rate is that of the model's size, whatever size a file
    says."""
    file, run = problem.folder / "rank.yaml", problem.folder / "rank"
    file.write_text(f"lora_rank: {expected['lora_rank']}\nbackend: torch\nmodel_params: {LIMIT - 1}\n")
    trial.commands.train_as_of(
        LIMIT + 1,
        *where[1:],
        f"--output={run}",
        f"--config={file}",
        "--num-classes=3",
        "--multi-label",
        "--epochs=1",
        "--max-seq-len=9",
        "--warmup-fraction=0",
    )
    settings = json.loads((run / RUN).read_text())["settings"]
    yield from same("alpha by the rank of a file", expected["lora_alpha"], settings["lora_alpha"])
    yield from same("learning rate of a model of more than 13 billion parameters", 1e-4, settings["learning_rate"])


def _spelled(trial: Trial, file: Path, away: Mapping[str, Any]) -> Iterator[Comparison]:
    """Every setting in each spelling of its value, in a file and as an option; a file or a command line has one spelling of each."""
    expected = {setting: tuple(value) if isinstance(value, list) else value for setting, value in away.items()}
    in_files = {setting: spelling.in_a_file(value) for setting, value in away.items()}
    if "," not in (named := away["lora_targets"]):  # a name of some projections, which may be listed in any order
        backwards = [*reversed(_modules(named))]
        in_files["lora_targets"] += (f"[{', '.join(backwards)}]", spelling.in_lines([*backwards, backwards[0]]))
    as_options = {setting: texts for setting, value in away.items() if (texts := spelling.as_option(value))}
    for turn in range(max(map(len, in_files.values()))):
        file.write_text("".join(f"{setting}: {texts[turn % len(texts)]}\n" for setting, texts in in_files.items()))
        yield from same("settings of a file", expected, trial.classifiers.given(file))
        given = [f"--{setting.replace('_', '-')}={texts[turn % len(texts)]}" for setting, texts in as_options.items()]
        yield from same("settings of a command line", {name: expected[name] for name in as_options}, trial.classifiers.given(None, *given))


def _stated(name: str, problem: Small, expected: Mapping[str, Any], run: Path) -> Iterator[Comparison]:
    """The settings in three files."""
    count = sum(value.size for value in problem.model.decoder.values())
    targets = sorted(_listed(expected["lora_targets"]))
    written = in_yaml(run / CONFIG)
    written["lora_targets"] = sorted(written.get("lora_targets", []))
    free = {key: value for key, value in expected.items() if key != "log_interval"}
    yield _alike(f"settings in {RUN} <{name}>", free, json.loads((run / RUN).read_text())["settings"])
    yield _alike(f"settings beside last/ <{name}>", expected, json.loads((run / "last" / BESIDE).read_text())["extra"]["settings"])
    yield _alike(f"settings in {CONFIG} <{name}>", {**expected, "lora_targets": targets, "model_params": count}, written)


def _alike(name: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Comparison:
    """All values by their keys, as one comparison."""
    odd = [key for key in sorted(expected.keys() | actual.keys()) if (key, expected.get(key)) != (key, actual.get(key))]
    if not odd:
        return same(name, 0, 0)[0]
    return broken(name, f"other values of {', '.join(odd)}", repr(expected.get(odd[0])), repr(actual.get(odd[0])))


def _listed(targets: str) -> list[str]:
    return targets.split(",") if "," in targets else _modules(targets)


def _modules(targets: str) -> list[str]:
    return [path.rpartition(".")[2] for path in TARGETS[targets]]
