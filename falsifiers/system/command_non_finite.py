"""Commands on a text whose numbers are not finite: each ends with an error that says so, and none prints or writes such a number."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import product

from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.subjects.doors.commands import Said
from blackswan.falsifiers.system.adapter_files import WEIGHTS
from blackswan.falsifiers.system.command_problem import (
    METRICS,
    ODD,
    Small,
    options,
    small,
    tokenizer,
)
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files


@reads_files
def non_finite_values_are_errors(trial: Trial) -> Iterator[Comparison]:
    """A text on which the model computes NaN, in the first, a middle or the last batch, ends every command with an error that says so.

    Nothing that is not finite is printed or written, and the library raises an error too, also of what was merged. Of two workers the
    message names those that computed it, and the call that it came from, as that of one worker does.
    """
    fixed = {"multi_label": False, "lora_targets": "q_v", "quantize_nf4": False, "pooling": "mean", "epochs": 1}
    with small(trial, "non-finite", fixed, family="llama") as problem:
        word = _poison(problem)
        rng = trial.rng("non-finite")
        clean = [f"rm {index}" for index in range(7)]
        labels = problem.labels(rng, 7)
        where = [f"--model={problem.base}", *options(problem.settings)]
        corpus, run = problem.corpus("clean", clean, labels), problem.folder / "run"
        trial.commands.run(
            "train", f"--corpus={corpus}", f"--validation={problem.corpus('other', clean, labels)}", f"--output={run}", *where
        )
        trial.commands.run("merge", f"--adapter={run / 'last'}", f"--output={problem.folder / 'merged'}")
        for place, at in (("first", 0), ("middle", 4), ("last", 6)):
            texts = [*clean[:at], word, *clean[at + 1 :]]
            bad = problem.corpus(place, texts, labels)
            out = f"--output={problem.folder / place}"
            asked = {
                "predict --corpus": ("predict", f"--adapter={run}", f"--corpus={bad}"),
                "predict TEXT": ("predict", f"--adapter={run}", *texts),
                "evaluate": ("evaluate", f"--adapter={run}", f"--corpus={bad}"),
                "evaluate --json": ("evaluate", f"--adapter={run}", f"--corpus={bad}", "--json"),
                "train, training": ("train", f"--corpus={bad}", f"--validation={corpus}", f"{out} 1", *where),
                "train, validation": ("train", f"--corpus={corpus}", f"--validation={bad}", f"{out} 2", *where),
            }
            for name, arguments in asked.items():
                said = trial.commands.attempt(*arguments)
                yield from _failed(name, place, said)
                if name.startswith("predict") and at >= 2 * problem.settings["batch_size"]:
                    yield from same(f"whether {name} prints answers to earlier batches <{place} batch>", True, said.out.endswith("}\n"))
            for path in problem.folder.glob(f"{place} */{METRICS}"):
                yield from same(
                    f"numbers in {METRICS} that are not there <{place} batch>",
                    False,
                    bool(re.search("NaN|Infinity|null", path.read_text())),
                )
            for call, folder in product(("predict", "probabilities"), (run / "last", problem.folder / "merged")):
                ask = partial(trial.commands.library, call, folder, texts)
                name = f"{call} of the library, {folder.name} <{place} batch>"
                yield trial.refuses(name, ask, "nan|not finite|non-finite", "FloatingPointError")
            spoilt = problem.corpus("of every worker", [word] * 7, labels) if place == "middle" else bad
            arguments = ("train", f"--corpus={corpus}", f"--validation={spoilt}", f"{out} 3", *where)
            by_two = partial(trial.commands.by_workers, 2, problem.folder, [], [], *arguments)
            message = rf"status 1: [\s\S]*validation after epoch 1: {BY_TWO[place]}; origin: model\."
            yield trial.refuses(f"validation by two workers <{place} batch>", by_two, message, "RuntimeError")


BY_TWO = {
    "first": r"rank 0 of 2: [^()]*",
    "middle": r"rank 0 of 2: [^()]* \(also on rank 1\)",
    "last": r"rank 1 of 2: [^()]*",
}
"""The workers that the message names where a text of the first one, of both, or of the second one gives NaN."""


def _failed(name: str, place: str, said: Said) -> Iterator[Comparison]:
    yield from same(f"exit status of {name} <{place} batch>", 1, said.status)
    yield from same(f"numbers that {name} prints <{place} batch>", [], re.findall(r"(?i)\bnan\b|\binf\w*", said.out))
    if not re.search("(?i)nan|not finite|non-finite", said.err):
        yield broken(f"message of {name} <{place} batch>", "does not say why", "a value that is not finite", said.err[-300:])


def _poison(problem: Small) -> str:
    """Makes the scores of attention infinite where a token is, and nowhere else; gives a text that has it.

    It alone has a first component, which the weights of queries and keys multiply by 10²⁰.
    """
    clean = {token for index in range(7) for token in tokenizer().encode(f"rm {index}").ids}
    word = next(text for text in ODD if text and not clean & set(tokenizer().encode(text).ids))
    tensors = load_file(problem.base / WEIGHTS)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0] = 0.0
        elif name.endswith(("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")):
            value[0, 0] = 1e20
        elif name.endswith("layers.0.input_layernorm.weight"):
            value[0] = 1.0
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0.0
    embedding[tokenizer().encode(word).ids[0], 0] = 50.0
    save_file(tensors, problem.base / WEIGHTS)
    return word
