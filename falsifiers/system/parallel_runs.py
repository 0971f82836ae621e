"""A data-parallel run that loses a worker and is resumed, against one that does not."""

import tempfile
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.reference.table import Array, Arrays

WORKERS, EPOCHS, BATCH, SAVE_EVERY = 2, 2, 3, 2
MOMENTS = ("batch", "before the sum", "after the sum", "state")
ARCHITECTURE = {
    **{"family": "qwen2", "vocab": 260, "hidden": 16, "intermediate": 24, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8},
    **{"eps": 1e-6, "theta": 1e4, "tied": True, "max_positions": 64},
}


def killed_run_resumes(attack: Attack, case: Case) -> list[Comparison]:
    """A worker is killed in a step and at a moment that the seed chooses; the run is resumed and ends.

    Against a run that was not interrupted: every tensor on every worker, and the samples of every step that counts. In that run every
    epoch takes each sample once; at most the steps since the last state are made again.
    """
    request, kill = _request(case)
    with tempfile.TemporaryDirectory() as folder:
        whole = attack.answer(case, scalars={**request, "output": f"{folder}/whole"})
        killed = attack.answer(case, scalars={**request, "output": f"{folder}/killed", "kill": kill})
        resumed = attack.answer(case, scalars={**request, "output": f"{folder}/killed", "resume": True})
    found = [*_failures("whole run", whole), *_failures("resumed run", resumed)]
    if (ended := str(killed["errors"][kill["rank"]])) != "Died: exit status -9":
        found.append(broken("killed worker", "not killed", f"SIGKILL in step {kill['step']}", ended or "ran to the end"))
    if found:
        return found
    count = len(request["train"]["rows"])
    return [*_epochs_are_complete(whole, count), *_same_samples(whole, killed, resumed, kill["step"]), *_same_end(whole, resumed)]


def _failures(name: str, answer: Arrays) -> list[Comparison]:
    return [broken(f"{name}, rank {rank}", "failed", "the end", str(text)) for rank, text in enumerate(answer["errors"]) if text]


def _consumed(answer: Arrays) -> Array:
    """Step and sample number of all ranks, [samples, 2], sorted."""
    rows = np.concatenate([answer[f"rank{rank}/consumed"] for rank in range(WORKERS)])
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _epochs_are_complete(whole: Arrays, count: int) -> list[Comparison]:
    consumed, steps = _consumed(whole), -(-count // BATCH)
    epochs = [np.sort(consumed[consumed[:, 0] // steps == epoch, 1]) for epoch in range(EPOCHS)]
    return [compare_exactly(f"samples of epoch {epoch}", np.arange(count), taken) for epoch, taken in enumerate(epochs)]


def _same_samples(whole: Arrays, killed: Arrays, resumed: Arrays, step: int) -> list[Comparison]:
    """What counts of the killed run is what lies before the first step of the resumed one."""
    first, second = _consumed(killed), _consumed(resumed)
    start = int(second[:, 0].min(initial=np.iinfo(np.int64).max))
    found = [compare_exactly("samples of the steps that count", _consumed(whole), np.concatenate([first[first[:, 0] < start], second]))]
    if not step - SAVE_EVERY <= start <= step:
        found.append(broken("first step after the kill", "not the step of the last state", f"{step - SAVE_EVERY} to {step}", str(start)))
    return found


def _same_end(whole: Arrays, resumed: Arrays) -> list[Comparison]:
    names = [name for name in whole if "/" in name and not name.endswith("/consumed")]
    missing = [broken(name, "missing after the resumed run") for name in names if name not in resumed]
    return missing or [compare_exactly(name, whole[name], resumed[name]) for name in names]


def _request(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of seven to nine samples in effective batches of three, of which each worker takes one or two, or none; and a kill in it."""
    rng = generator_for(case.seed, "run")
    count = int(rng.integers(7, 10))

    def samples(number: int) -> dict[str, Any]:
        rows = tuple(tuple(rng.integers(0, 256, int(rng.integers(1, 7))).tolist()) for _ in range(number))
        return {"rows": rows, "targets": tuple(rng.integers(0, 3, number).tolist()), "num_classes": 3}

    settings = {"num_classes": 3, "lora_rank": 2, "lora_alpha": 4.0, "learning_rate": 1e-2, "epochs": EPOCHS, "max_seq_len": 16}
    request = {
        "workers": WORKERS,
        "architecture": ARCHITECTURE,
        "settings": {**settings, "batch_size": 1, "accumulation_steps": BATCH, "seed": int(rng.integers(1000))},
        "train": samples(count),
        "validation": samples(3),
        "save_every": SAVE_EVERY,
        "resume": False,
    }
    moment = str(rng.choice(MOMENTS))
    steps = EPOCHS * -(-count // BATCH)
    step, rank = int(rng.integers(1, steps)), int(rng.integers(WORKERS))
    if moment == "state":  # rank 0 writes it, after every second step
        return request, {"rank": 0, "step": SAVE_EVERY * int(rng.integers(1, steps // SAVE_EVERY + 1)), "moment": moment}
    if moment == "batch" and step % (steps // EPOCHS) == steps // EPOCHS - 1 and count % BATCH == 1:
        rank = 1  # a last batch of one sample is the share of rank 1
    return request, {"rank": rank, "step": step, "moment": moment}
