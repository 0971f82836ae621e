"""Arguments that parts of the library have to refuse, where a program calls them by itself."""

from functools import partial

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.subjects.doors.files import LATE, NO_INDICES, NO_LABELS
from blackswan.falsifiers.subjects.doors.training import NO_SETTINGS
from blackswan.falsifiers.system.run_problem import small_run
from blackswan.falsifiers.system.trial import Trial

BATCHES = {
    "a row of tokens without a batch": "input_ids",
    "a mask of another shape": "mask",
    "tokens in no column": "input_ids",
    "labels of the other kind": "labels",
    "labels in the other dtype": "labels",
    "a label for no sample": "labels",
    "a label in a row of its own": "labels",
}
"""What is wrong with a batch, and a word of the refusal."""
FIFTH = {"a label": r"(labels|targets)\[4\b", "a token": r"input_ids\[4, 0\]", "no token": r"mask\[4\]"}
"""What is wrong with the fifth sample of a batch, and how a refusal names its place."""
CALLS = ("train_batch", "accumulate", "apply", "apply_gradient_vector", "rate", "set_rate")
WEIGHTS = ("of 0.0", "of -1.0", "of nan", "of inf")
ARCHITECTURES: tuple[tuple[str, float | str], ...] = (
    *(("theta", value) for value in (0.0, float("inf"), float("nan"))),
    *(("eps", value) for value in (0.0, 1.0, float("nan"))),
    *(("vocab", 0), ("layers", 2.0), ("max_positions", 2**63), ("intermediate", True)),
    *(("kv_heads", 7), ("head_dim", 7), ("family", "lama")),
)
"""A size or a scalar of a decoder that none can have, beside sizes that fit together."""
MISUSES = {
    **{f"a norm of {norm}": ("max_norm", "ValueError") for norm in (0.0, -1.0, float("nan"))},
    **{f"a {whose}{name} of {value}": (name, "ValueError") for whose in ("", "decoder's ") for name, value in NO_SETTINGS},
    "class weights with several labels": ("class weights", "ValueError"),
    "a loss of class weights with several labels": ("class weights", "ValueError"),
    **{f"a class weight {what}": ("class.weights", "ValueError") for what in ("fewer", *WEIGHTS)},
    **{f"a class weight {what} after a step": ("class.weights", "ValueError") for what in WEIGHTS},
    "logits of a mask that is added": ("mask|positions", "ValueError"),
    **{f"{call} after all of {steps} steps": (f"after {steps} steps", "IndexError") for steps in (0, 1) for call in CALLS},
    **{f"{name} factors than targets": ("adapter and head", "ValueError") for name in ("more", "fewer", "wider")},
    **{
        f"the {which} parameter without a gradient{when}": ("has no gradient", "RuntimeError")
        for which in ("first", "last")
        for when in ("", ", before its trainer")
    },
    **{f"{call}: {name}": (word, "ValueError") for call in ("train_batch", "accumulate", "forward_only") for name, word in BATCHES.items()},
    **{
        f"{call}: {name} of the fifth sample": (place, "ValueError")
        for call in ("train_batch", "accumulate", "forward_only")
        for name, place in FIFTH.items()
    },
    **{f"{call}: no sample": ("empty", "ValueError") for call in ("train_batch", "accumulate")},
    **{f"the share of rank {rank} of 2": (f"rank {rank}", "ValueError") for rank in (-1, 2)},
    **{f"batches of {size}": ("batch", "ValueError") for size in (0, -1)},
    **{f"texts of {size} tokens": ("max_seq_len", "ValueError") for size in (0, -1)},
    **{f"{call} {text!r}": ("one text", "TypeError") for call in ("a batch of", "predict", "encode") for text in ("one text", "")},
    "padding in the middle": ("padding_side", "ValueError"),
    "a batch of no text": ("empty", "ValueError"),
    **{f"{call} half a character": ("utf-?8|surrogate", "ValueError") for call in ("a batch of", "predict")},
    **{f"{what} by {kind}": ("indices", "ValueError") for what in ("samples", "a batch") for kind in NO_INDICES},
    **{f"an estimate of {name} 0": (name, "ValueError") for name in ("batch", "seq", "accumulation")},
    **{f"statistics of {name}": ("length", "ValueError") for name in ("a length fewer", "a length more", "no sample")},
    **{f"{given} of a label {label!r}": ("sample 2: the label is", "ValueError") for given in ("samples", "texts") for label in NO_LABELS},
    "a bad label behind many texts": (f"sample {LATE + 1}: the label is", "ValueError"),
    **{f"an architecture of {name} {value}": (name, "ValueError") for name, value in ARCHITECTURES},
    "an architecture of 3 heads for 2 keys": ("kv_heads", "ValueError"),
    "an adapter in no folder": ("no such folder", "FileNotFoundError"),
    "a backend of no name": ("cuda", "ValueError"),
    **{f"an operation of no name in another's place{beside}": ("rmsnorm", "KeyError") for beside in ("", " beside one of a name")},
    "a backend that cannot run": ("no kernel runs here", "RuntimeError"),
}
"""Each misuse with a word of its refusal and the error's type."""


def arguments_are_refused(trial: Trial) -> list[Comparison]:
    """Of a trainer with one label a sample and of one with several."""
    found = []
    for several in (False, True):
        problem = small_run(trial, multi_label=several)
        for name, (message, error) in MISUSES.items():
            told = f"{name}, {'several labels' if several else 'one label'} a sample"
            found.append(trial.refuses(told, partial(trial.trainer.misuse, problem, name), message, error))
    return found
