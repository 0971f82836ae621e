"""The learning benchmark's results as a table in Markdown, and its place in benchmarks/README.md."""

import math
from collections.abc import Mapping
from typing import Any

BEGIN, END = "<!-- learning: python benchmarks/learning.py --write-readme -->", "<!-- /learning -->"


def table(results: Mapping[str, Any]) -> str:
    """The table, and what has to be known beside it."""
    unseen, heldout = results["unseen"], results["heldout"]
    tests = unseen["against"]["tf_idf"]
    rows = [
        "| classifier | accuracy | macro-F1 | right where TF-IDF is wrong / wrong where it is right | McNemar p | permutation p "
        "| accuracy on the shipped held-out scripts (used while choosing) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in (("majority", "majority class"), ("tf_idf", results["tf_idf"]["name"])):
        rows.append(f"| {title} | {_scores(unseen['baselines'][name])} | | | | {heldout['baselines'][name]['accuracy']:.3f} |")
    for index, run in enumerate(unseen["runs"]):
        counts = tests["mcnemar"][index]
        adjusted = " | ".join(_p(tests["holm"][name][index]) for name in ("mcnemar", "permutation"))
        rows.append(
            f"| fine-tuned, seed {run['seed']} | {_scores(run)} | {counts['first_only']} / {counts['second_only']} | {adjusted} "
            f"| {heldout['runs'][index]['accuracy']:.3f} |"
        )
    rows.append(f"| fine-tuned, mean of {len(unseen['runs'])} seeds | {_mean(unseen)} | | | | {_mean(heldout).split(' | ')[0]} |")
    return "\n".join([*rows, "", *_notes(results)])


def replaced(text: str, content: str) -> str:
    """The text with what stands between the markers replaced. Raises a ValueError where it has not exactly one pair of them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one line {BEGIN!r} and one {END!r}")
    return text[: text.index(BEGIN)] + f"{BEGIN}\n{content}\n" + text[text.index(END) :]


def _notes(results: Mapping[str, Any]) -> list[str]:
    unseen, settings = results["unseen"], results["settings"]
    over = unseen["against"]["majority"]
    worst = max(p for values in over["holm"].values() for p in values)
    trials = ", ".join(f"{trial['learning_rate']:g}: {trial['accuracy']:.3f}" for trial in results["rates"])
    return [
        f"{unseen['samples']:,} scripts in {unseen['families']:,} families of minimal pairs, made from another seed; none of them is in "
        "the shipped splits, nor is a minimal pair of one that is. p-values are two-sided and adjusted for the number of seeds (Holm): "
        "exact McNemar, and permutation with families exchanged whole. Against the majority class none is above "
        f"{_p(worst)}. Over all seeds the gain on TF-IDF is {_interval(unseen['against']['tf_idf']['pooled'])}, on the majority class "
        f"{_interval(over['pooled'])} (95 % bootstrap interval; families drawn whole).",
        f"LoRA rank {settings['lora_rank']}, alpha {settings['lora_alpha']:g}, q and v, {settings['pooling']} pooling, "
        f"learning rate {settings['learning_rate']:g}, batch {settings['batch_size']}, {settings['epochs']} epochs; "
        f"{results['cpu_seconds'] / 60:.0f} minutes of CPU time in {results['processes']} processes of one thread. "
        f"Chosen by `benchmarks/learning_choice.py` on a fifth of the training split (accuracy by learning rate: {trials}) and, for "
        f"TF-IDF, by cross-validation on it ({results['tf_idf']['accuracy']:.3f}), families kept whole. Pre-training saw that split only.",
        *[f"The rules object: {finding}. Its sources fine-tuned models of 7 to 65 billion parameters; this one has 0.9 million."
          for finding in results["findings"] if "(info)" not in finding],
    ]  # fmt: skip


def _scores(found: Mapping[str, float]) -> str:
    return f"{found['accuracy']:.3f} | {found['macro_f1']:.3f}"


def _mean(compared: Mapping[str, Any]) -> str:
    runs = compared["runs"]
    return " | ".join(f"**{math.fsum(run[name] for run in runs) / len(runs):.3f}**" for name in ("accuracy", "macro_f1"))


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else f"{value:.0e}"


def _interval(gain: Mapping[str, float]) -> str:
    return f"{gain['mean']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}], p = {_p(gain['p'])}"
