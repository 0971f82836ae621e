"""Questions and answers about devices: which one is chosen, how much of its memory is taken, and planted values that are not finite."""

from dataclasses import dataclass

from blackswan.falsifiers.numeric.whole_model import WholeModel
from blackswan.reference.table import Array

TABLE = "table"
"""A buffer of a module that none of its files has, as one of rotary angles may be."""


@dataclass(frozen=True, kw_only=True)
class Workload(WholeModel):
    """A classifier on tied random weights, and a batch [batch, seq] of its training; no label is the last class.

    `micro` samples are computed at a time (0: all), `accumulation` such batches make a step; `backend` is torch, by automatic
    differentiation, fused, by hand-written layers, or where memory may grow also triton, by automatic differentiation of Triton's kernels.
    """

    theta: float = 1e4
    targets: str = "q_v"
    dtype: str = "float32"
    micro: int = 0
    accumulation: int = 1
    backend: str = "torch"


@dataclass(frozen=True)
class Chosen:
    """The kind of a device by its torch name, its index, how many warnings there were, and whether products on CUDA may be added up in
    the narrow dtype of their operands."""

    kind: str
    index: int
    warnings: int
    narrow_sums: bool = False


@dataclass(frozen=True)
class OnCards:
    """Trainers worked on a card that was not the current one: `done` are the kinds of their deeds, `elsewhere` those for another card.

    `pools` are those in which the memory of the graphs lies that a trainer keeps, `sizes` the distinct amounts of it, in bytes, that graphs
    hold on to; `gone` is what was read after it was freed. `modes` say which threads' calls may end a capture: those of all where it is
    `global`, else those of the one that captures at most; `races` tell what did not wait for another stream that it depends on.
    """

    done: frozenset[str]
    elsewhere: tuple[str, ...]
    pools: int
    sizes: int
    gone: tuple[str, ...]
    modes: frozenset[str]
    races: tuple[str, ...]


@dataclass(frozen=True)
class Plant:
    """A value that is not finite, and its place.

    `where` is `parameter`: the last number of the parameter or buffer `name`, and the first one with `both`. Or it is `output` or
    `gradient`: a forward pass calls the operation `name` `calls` times, and the value is the first number of the output of the `nth` call,
    or of its first input's gradient.
    """

    where: str
    name: str
    value: float
    nth: int = 0
    calls: int = 1
    both: bool = False


@dataclass(frozen=True)
class Card:
    """Bytes of a GPU: in all, free, and allocated by this process of what is not free."""

    total: int
    free: int
    own: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes of each part of a training step, of all at the peak, and of what stays after a step."""

    parts: dict[str, int]
    total: int
    resident: int


@dataclass(frozen=True)
class Usage:
    """Bytes at the peak of loading and training and after it, without libraries' workspaces, and frozen tensors that require a gradient
    or have one."""

    peak: int
    resident: int
    thawed: int


@dataclass(frozen=True)
class Growth:
    """The steps made, and by how much each measure is larger after them than before: `bytes` live and `tensors`; on a CPU the most bytes
    live at one time (`peak`); on CUDA bytes (`reserved`) and `segments` that the allocator holds, and what it asked of the `driver`."""

    made: int
    beyond: dict[str, int]


@dataclass(frozen=True)
class Quantised:
    """Bytes of the host's allocator at the peak of loading, bytes that stay, and the absmax of each projection in NF4."""

    peak: int
    resident: int
    absmax: dict[str, Array]


@dataclass(frozen=True)
class FreshClassifier:
    """Trainable tensors by name, the logits of some texts, those of the same decoder and head without an update, and those of what was
    saved or merged and opened again; whose random numbers, of those that a process shares, are others after all that; and the losses of a
    step on the texts and of an evaluation after it. In NF4 `plain` has the update too, for no weights without it are there any more."""

    trainable: dict[str, Array]
    logits: Array
    plain: Array
    opened: Array
    drawn: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Answered:
    """The answers of one model about some texts: the logits [texts, classes], also as training computes them, with a graph; by way of
    asking the probabilities [texts, classes] and the classes, [texts] or with several labels a 0 or 1 for each, [texts, classes]; and the
    loss of each text evaluated by itself, [texts]."""

    logits: Array
    logits_in_training: Array
    probabilities: dict[str, Array]
    classes: dict[str, Array]
    losses: Array
