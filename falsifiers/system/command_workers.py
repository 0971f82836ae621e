"""The command `train` and the library's answers by several workers."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.system.command_problem import (
    STANDSTILL,
    Small,
    fed,
    kind_of,
    metrics,
    options,
    piped,
    small,
    texts_of,
)
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files

OF_A_JOB = {"SLURM_JOB_ID": "7311", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OF_A_CLUSTER = {"MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "99999", "PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", **OF_A_JOB}
"""Some clusters set these variables for every process, also for one that is alone, such as the script of a job for four tasks, which runs
once. No port has that number, so that nobody waits there."""
NO_DEVICE, VOCAB = "cuda:15", 257
"""The last card that a name may have, which few hosts do; the tokens of a model that reads bytes."""


@reads_files
def workers_answer_as_one(trial: Trial) -> Iterator[Comparison]:
    """Two and three workers record and evaluate what one does, in every field, some of them without a sample, at once or after steps with
    one; only the first one speaks. A device that all of them would share, or that cannot exchange gradients, is refused.

    The learning rate moves nothing, so that all numbers are those of the start, and patience ends the run after its second epoch; the
    answers are those of every worker.
    """
    settings = {"learning_rate": STANDSTILL, "batch_size": 2, "backend": "torch", "epochs": 3, "early_stop_patience": 1}
    for workers, several in ((3, False), (2, True)):
        weights = {"class_weights": None if several else [0.25, 1.5, 2.0, 0.5]}
        # Not where a program pads that was told nothing. Of three workers each has no sample in some of the steps.
        side = {"padding_side": "left"} if several else {"accumulation_steps": 1}
        with small(trial, f"{workers} workers", settings | weights | side | {"multi_label": several}) as problem:
            rng = trial.rng(f"corpus of {workers}")
            texts = texts_of(rng, 7)
            labels = problem.labels(rng, 7)
            corpora = [f"--corpus={problem.corpus('corpus', texts, labels)}"]
            corpora.append(f"--validation={problem.corpus('validation', texts[:2], labels[:2])}")
            where = ["train", f"--model={problem.base}", *corpora, "--save-every=2", *options(problem.settings)]
            where += ["--device=auto"] if several and not trial.on_gpu else []
            one, all_of_them = problem.folder / "one", problem.folder / "several"
            with piped((problem.folder / "corpus.jsonl").read_bytes()) as pipe:
                given = [*where, f"--corpus={pipe}", f"--output={one}"]
                alone = trial.commands.attempt(*given, environment=OF_A_CLUSTER)
            yield from same("message to one process where the cluster names a job", (0, ""), (alone.status, alone.err * bool(alone.status)))
            expected = trial.commands.opened(one / "last", texts, labels)
            board = problem.folder / "board"
            given = [*where, f"--output={all_of_them}", f"--tensorboard={board}"]
            said, answers = trial.commands.by_workers(workers, all_of_them / "last", texts, labels, *given)
            yield from same("workers that write for TensorBoard", 1, len(list(board.glob("*"))))
            yield from same("what other workers than the first print", [""] * (workers - 1), [each.out for each in said[1:]])
            yield from same("lines of the metrics", *([kind_of(each) for each in metrics(run)] for run in (one, all_of_them)))
            for first, second in zip(metrics(one), metrics(all_of_them), strict=False):
                yield from _same_answers(trial, "metrics", first, second)
            for rank, each in enumerate(answers):
                yield from _same_answers(trial, f"worker {rank}", vars(expected), vars(each))
            if several:  # as torchrun starts them again, each with the same command
                again, _ = trial.commands.by_workers(workers, all_of_them / "last", [], [], *where, f"--output={all_of_them}", restarts=1)
                yield from same("last line when they are started again", said[0].out.splitlines()[-1], again[0].out.splitlines()[-1])
            yield from _handed_on(trial, problem, one) if several else []
            with fed(problem.folder / "pipe", (problem.folder / "corpus.jsonl").read_bytes()) as pipe:
                given = [*where, f"--output={problem.folder / 'of a pipe'}", f"--corpus={pipe}"]
                ask = partial(trial.commands.by_workers, workers, problem.folder, [], [], *given)
                yield trial.refuses(f"{workers} workers on a corpus from a pipe", ask, f"(?s)status 4: .*{pipe} is a pipe", "RuntimeError")
            for name in ("cuda:0", "cuda:1", "mps"):
                given = [*where, f"--output={problem.folder / 'refused'}", f"--device={name}"]
                ask = partial(trial.commands.by_workers, workers, problem.folder, [], [], *given)
                yield trial.refuses(f"{workers} workers on {name}", ask, f"status 4: .*'{name}'", "RuntimeError")
    yield from same("whether each attempt reads what an earlier one has set", [False] * 3, trial.commands.read_of_earlier(3))


def _handed_on(trial: Trial, problem: Small, run: Path) -> list[Comparison]:
    """Whichever way a model is opened, the workers that it is opened for share an evaluation, its texts are padded on the side that its
    settings say, and a device that is not there is refused."""
    merged, file = problem.folder / "merged", problem.folder / "base.apr"
    trial.commands.run("merge", f"--adapter={run}", f"--output={merged}")
    trial.commands.run("export", f"--model={problem.base}", f"--output={file}")
    ways = {"from_pretrained": problem.base, "from_apr": file, "from_adapter": run / "last", "from_merged": merged}
    asked = trial.commands.asked_groups(problem.settings, **ways, from_saved=merged)
    found = same("ways to open a model that forget the group", [], sorted(way for way, count in asked.items() if not count))
    every: dict[str, Any] = {**ways, "from_saved": merged, "from_random": {**problem.model.scalars, "vocab": VOCAB}}
    masks = trial.commands.masks(problem.settings, **every)
    found += same(
        "ways to open a model that pad on the other side", [], sorted(way for way, mask in masks.items() if mask[0] or not mask[-1])
    )
    for way, place in every.items():
        ask = partial(trial.commands.open_on, NO_DEVICE, way, place, problem.settings)
        found.append(trial.refuses(f"{way} on {NO_DEVICE}", ask, NO_DEVICE, "DeviceUnavailable"))
    return found


def _same_answers(trial: Trial, name: str, expected: Any, actual: Any) -> Iterator[Comparison]:
    """Numbers that are not whole within the tolerance, all else exactly; lists of numbers at once."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping) and expected.keys() == actual.keys():
        for key in expected:
            yield from _same_answers(trial, f"{name}, {key}", expected[key], actual[key])
    elif isinstance(expected, float | np.ndarray) and isinstance(actual, type(expected)) and np.asarray(expected).dtype.kind == "f":
        yield trial.near(name, np.asarray(expected), np.asarray(actual))
    else:
        yield from same(name, expected, actual)
