"""An adapter that PEFT alone has written, through every command that takes one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import replace

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.precision import STORAGE
from blackswan.falsifiers.system.adapter_files import target_modules
from blackswan.falsifiers.system.command_models import merged_tensors
from blackswan.falsifiers.system.command_problem import small, texts_of, tokenizer
from blackswan.falsifiers.system.commands import Answers
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files


@reads_files
def adapters_without_settings_serve(trial: Trial) -> Iterator[Comparison]:
    """`predict`, `evaluate`, `summary` and `merge` of an adapter without blackswan.json, whose head has no bias, as transformers' are.

    `summary` says the same where the base is named beside it. Other adapters in its folder, which are named like those of a run, are not
    asked.

    Classes, rank, alpha and targets are its own, and it pools the last token; the base is the one that it names, from where the command is,
    whose weights are not quantised. Its updates are stored in 16 bits, and computed with in 32 all the same. It is merged into the same
    weights, and the merged model answers alike.
    """
    rng = trial.rng("of PEFT")
    with (
        small(trial, "of PEFT", {"multi_label": False, "pooling": "last", "num_classes": int(rng.integers(3, 6))}) as problem,
        chdir(problem.folder),
    ):
        texts = [text for text in texts_of(rng, 9) if len(tokenizer().encode(text).ids) < 9]
        labels = problem.labels(rng, len(texts))
        stored = STORAGE[str(rng.choice(["bfloat16", "float16"]))]
        dtypes = {name: stored if "lora_" in name else STORAGE["float32"] for name in problem.model.trainable}
        rounded = {name: value.astype(dtypes[name]).astype(np.float32) for name, value in problem.model.trainable.items()}
        trainable = {**rounded, "score.bias": np.zeros(problem.classes, np.float32)}
        model = replace(problem.model, trainable=trainable)
        theirs = model.write_peft(problem.folder / "theirs", dtypes, head_bias=False, base_model_name_or_path=problem.base.name)
        for part in ("best", "last"):
            replace(model, trainable={name: -value for name, value in trainable.items()}).write_peft(theirs / part)
        whole, merged = model.write_peft(problem.folder / "whole"), problem.folder / "merged"
        corpus = problem.corpus("corpus", texts, labels)
        summary = trial.commands.run("summary", f"--adapter={theirs}").out
        named = trial.commands.run("summary", f"--adapter={theirs}", f"--model={problem.base}").out
        trial.commands.run("merge", f"--adapter={theirs}", f"--output={merged}")
        yield from merged_tensors(problem, whole, merged)
        for name, option in {"theirs": f"--adapter={theirs}", "merged": f"--model={merged}"}.items():
            shown = [json.loads(line) for line in trial.commands.run("predict", option, f"--corpus={corpus}").out.splitlines()]
            wanted = Answers.of(problem, whole, texts, labels, np.asarray([line["label"] for line in shown]))
            yield trial.near(f"probabilities <{name}>", wanted.probabilities, np.asarray([line["probabilities"] for line in shown]))
            said = json.loads(trial.commands.run("evaluate", option, f"--corpus={corpus}", "--json").out)
            yield trial.near(f"loss <{name}>", wanted.loss, said["loss"])
            yield from same(f"confusion <{name}>", wanted.confusion.tolist(), said["confusion"])
        after = trial.commands.run("summary", f"--adapter={merged}").out
    yield from _summary(after, target_modules(model), problem.model.scalars, ", merged into the base weights")
    for text in (summary, named):
        yield from _summary(text, target_modules(model), problem.model.scalars)


def _summary(text: str, targets: Sequence[str], scalars: dict[str, object], merged: str = "") -> list[Comparison]:
    """The lines about the base weights, the longest texts, the adapter and its head."""
    shown = {name: line.strip() for name, line in (line.split(": ", 1) for line in text.splitlines())}
    adapted = f"rank {scalars['rank']}, alpha {scalars['alpha']:g}, on {', '.join(targets)}{merged}"
    return [
        *same("summary, dtype of the base weights", "base weights in float32", shown["device"].rpartition(", ")[2]),
        *same("summary, LoRA", adapted, shown["LoRA"]),
        *same("summary, longest text", "at most 512", shown["tokens"].split(", ")[-2]),
        *same("summary, a model without steps", bool(merged), shown["steps"].startswith("none")),
        *same("summary, head", f"{scalars['classes']} classes, last pooling", shown["head"]),
    ]
