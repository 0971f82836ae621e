"""Parts of the library, called with what they have to refuse."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from blackswan.falsifiers.subjects.doors.files import LATE, NO_INDICES, NO_LABELS
from blackswan.falsifiers.subjects.doors.training import NO_SETTINGS
from blackswan.impl import adapter, corpus, dispatch, group, memory, pretrain, samples
from blackswan.impl.classifier import Classifier, base_shapes, initial_trainable
from blackswan.impl.config import DecoderConfig
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.tokens import ByteTokens
from blackswan.impl.trainer import Batch, Trainer

Calls = Iterator[tuple[str, Callable[[], object]]]


def misuses(pipeline: ClassifyPipeline) -> dict[str, Callable[[], object]]:
    """The calls by their names, which `falsifiers.system.misuse` knows too."""
    doors = (_of_trainers, _of_tensors, _of_batches, _of_late_samples, _of_counts, _of_architectures, _of_files)
    return dict(call for door in doors for call in door(pipeline))


def _of_trainers(pipeline: ClassifyPipeline) -> Calls:
    several = pipeline.trainer.multi_label
    make = partial(Trainer, pipeline.classifier, total_steps=None, micro_batch=2, learning_rate=0.1, multi_label=several)
    for norm in (0.0, -1.0, float("nan")):
        yield f"a norm of {norm}", partial(make, max_norm=norm)
    for name, value in NO_SETTINGS:
        yield f"a {name} of {value}", partial(make, **{name: value})
        yield f"a decoder's {name} of {value}", partial(_steps_of_a_decoder, pipeline.architecture, **{name: value})
    weights, loss = torch.ones(pipeline.classifier.adaptation.classes), pipeline.classifier.loss
    yield "class weights with several labels", partial(make, class_weights=weights, multi_label=True)
    yield "a loss of class weights with several labels", partial(loss, torch.zeros(1, len(weights)), torch.zeros(1, len(weights)), weights)
    yield "a class weight fewer", partial(make, class_weights=weights[1:])
    for value in (0.0, -1.0, float("nan"), float("inf")):
        yield f"a class weight of {value}", partial(make, class_weights=torch.cat([weights[1:], torch.tensor([value])]))
        yield f"a class weight of {value} after a step", partial(_spoiled, partial(make, class_weights=weights), _batch(pipeline), value)
    for steps, call in product((0, 1), ("train_batch", "accumulate", "apply", "apply_gradient_vector", "rate", "set_rate")):
        yield f"{call} after all of {steps} steps", partial(_after_the_end, partial(make, total_steps=steps), _batch(pipeline), call)

    def without_gradient(place: int, *, early: bool) -> None:
        trainer, parameters = make(), list(pipeline.classifier.trainable_parameters().values())
        parameters[place].requires_grad_(False)
        (make() if early else trainer).train_batch(_batch(pipeline))

    for (which, place), (when, early) in product((("first", 0), ("last", -1)), (("", False), (", before its trainer", True))):
        yield f"the {which} parameter without a gradient{when}", partial(without_gradient, place, early=early)


def _spoiled(make: Callable[[], Trainer], batch: Batch, value: float) -> None:
    """Weights that were accepted are written to."""
    trainer = make()
    trainer.train_batch(batch)
    assert trainer.class_weights is not None
    trainer.class_weights[0] = value
    trainer.train_batch(batch)


def _steps_of_a_decoder(architecture: DecoderConfig, **settings: Any) -> None:
    pretrain.StepFn(pretrain.random_decoder(architecture), **{"total_steps": 1, "micro_batch": 2, "learning_rate": 0.1, **settings})


def _after_the_end(make: Callable[[], Trainer], batch: Batch, call: str) -> None:
    trainer = make()
    for _ in trainer.learning_rates:
        trainer.train_batch(batch)
    calls: dict[str, Callable[[], object]] = {
        "apply_gradient_vector": lambda: trainer.apply_gradient_vector(trainer.optimiser.exp_avg),
        "rate": lambda: trainer.learning_rate,
        "set_rate": lambda: setattr(trainer, "learning_rate", 0.1),
        "apply": trainer.apply,
        "train_batch": lambda: trainer.train_batch(batch),
        "accumulate": lambda: trainer.accumulate(batch),
    }
    calls[call]()


def _of_tensors(pipeline: ClassifyPipeline) -> Calls:
    """Classifiers of tensors for other targets or of another rank."""
    config, some = pipeline.classifier.config, replace(pipeline.classifier.adaptation, targets="q_v")
    base = {name: torch.zeros(shape) for name, shape in base_shapes(config).items()}
    wider, more = replace(some, rank=some.rank + 1), replace(some, targets="all")
    for name, meant, given in (("more", some, more), ("fewer", more, some), ("wider", some, wider)):
        trainable = initial_trainable(config, given, 0)
        yield f"{name} factors than targets", partial(Classifier, config, meant, base, trainable, dtype=torch.float32)


def _of_batches(pipeline: ClassifyPipeline) -> Calls:
    batch = _batch(pipeline)
    classes = pipeline.classifier.adaptation.classes
    bad = {
        "a row of tokens without a batch": replace(batch, input_ids=batch.input_ids[0], mask=batch.mask[0]),
        "a mask of another shape": replace(batch, mask=batch.mask[:, :1]),
        "tokens in no column": replace(batch, input_ids=batch.input_ids[:, :0], mask=batch.mask[:, :0]),
        "labels of the other kind": replace(batch, labels=torch.zeros(2, classes) if batch.labels.ndim == 1 else torch.zeros(2).long()),
        "labels in the other dtype": replace(batch, labels=batch.labels.float() if batch.labels.ndim == 1 else batch.labels.long()),
        "a label for no sample": replace(batch, labels=torch.cat([batch.labels, batch.labels[:1]])),
        "a label in a row of its own": replace(batch, labels=batch.labels[None]),
    }
    for name, given in bad.items():
        for call in ("train_batch", "accumulate", "forward_only"):
            yield f"{call}: {name}", partial(getattr(pipeline.trainer, call), given)
    added = torch.where(batch.mask, 0.0, float("-inf"))
    added[:, -1] = float("-inf")
    yield "logits of a mask that is added", partial(pipeline.classifier, batch.input_ids, added)
    for call in ("train_batch", "accumulate"):
        yield f"{call}: no sample", partial(getattr(pipeline.trainer, call), Batch(batch.input_ids[:0], batch.mask[:0], batch.labels[:0]))


def _of_late_samples(pipeline: ClassifyPipeline) -> Calls:
    """What is wrong with the last of five samples, of which two are computed at a time."""
    two = _batch(pipeline)
    batch = Batch(*(torch.cat([value, value, value[:1]]) for value in (two.input_ids, two.mask, two.labels)))
    several, last = pipeline.trainer.multi_label, torch.arange(5, device=pipeline.device)[:, None] == 4
    bad = {
        "a label": replace(batch, labels=torch.where(last if several else last[:, 0], 99, batch.labels)),
        "a token": replace(batch, input_ids=torch.where(last, -1, batch.input_ids)),
        "no token": replace(batch, mask=batch.mask & ~last),
    }
    trainer = Trainer(pipeline.classifier, total_steps=None, micro_batch=2, learning_rate=0.1, multi_label=several)
    for (name, given), call in product(bad.items(), ("train_batch", "accumulate", "forward_only")):
        yield f"{call}: {name} of the fifth sample", partial(getattr(trainer, call), given)


def _of_counts(pipeline: ClassifyPipeline) -> Calls:
    for rank in (-1, 2):
        yield f"the share of rank {rank} of 2", partial(group.shard, [1, 2, 3], rank, 2)
    for size in (0, -1):
        yield f"batches of {size}", partial(samples.effective_batches, [1, 2], size)
        yield f"texts of {size} tokens", partial(ByteTokens, size, "right")
    yield "padding in the middle", partial(ByteTokens, 4, "middle")
    yield "a batch of no text", partial(ByteTokens(4).batch, [])
    yield "a batch of half a character", partial(ByteTokens(4).batch, ["rm", "\ud83d"])
    yield "predict half a character", partial(pipeline.predict, ["rm", "\ud83d"])
    for text in ("one text", ""):
        yield f"a batch of {text!r}", partial(ByteTokens(4).batch, text)
        yield f"predict {text!r}", partial(pipeline.predict, text)
        yield f"encode {text!r}", partial(pipeline.encode, text)
    few = samples.Samples.of([[1], [2]], [0, 1], 2)
    for kind, indices in NO_INDICES.items():
        yield f"samples by {kind}", partial(few.select, indices)
        yield f"a batch by {kind}", partial(few.batch, indices, pipeline.tokens)
    config, adaptation = pipeline.classifier.config, pipeline.classifier.adaptation
    for name in ("batch", "seq", "accumulation"):
        counts: dict[str, Any] = {"batch": 1, "seq": 1, "accumulation": 1, name: 0}
        yield f"an estimate of {name} 0", partial(memory.estimate, config, adaptation, dtype=torch.float32, device="cpu", **counts)
    for name, labels, lengths in (("a length fewer", [0, 1], [1]), ("a length more", [0], [1, 1]), ("no sample", [], [])):
        yield f"statistics of {name}", partial(corpus.statistics, np.array(labels, np.int64), 2, np.array(lengths, np.int64))
    several, classes = pipeline.trainer.multi_label, pipeline.classifier.adaptation.classes
    good, entries = ((0,) * classes, (1,) * (classes - 1)) if several else (0, ())
    for last in NO_LABELS:
        label = (*entries, last) if several else last
        rows, both = ([1], [2]), (good, label)
        yield f"samples of a label {last!r}", partial(samples.Samples.of, rows, both, classes, several)
        given = [corpus.Sample("a text", each) for each in both]
        yield f"texts of a label {last!r}", partial(samples.tokenize, given, pipeline.tokens, classes, several)
    late = [given[0]] * LATE + given[1:]
    yield "a bad label behind many texts", partial(samples.tokenize, late, pipeline.tokens, classes, several)


def _of_architectures(pipeline: ClassifyPipeline) -> Calls:
    nan, inf = float("nan"), float("inf")
    values: dict[str, Sequence[Any]] = {"theta": (0.0, inf, nan), "eps": (0.0, 1.0, nan), "vocab": (0,), "layers": (2.0,)}
    values |= {"max_positions": (2**63,), "intermediate": (True,), "kv_heads": (7,), "head_dim": (7,), "family": ("lama",)}
    for name, each in values.items():
        for value in each:
            yield f"an architecture of {name} {value}", partial(replace, pipeline.architecture, **{name: value})
    yield "an architecture of 3 heads for 2 keys", partial(replace, pipeline.architecture, heads=3, kv_heads=2)


def _of_files(pipeline: ClassifyPipeline) -> Calls:
    def in_no_folder() -> None:
        with tempfile.TemporaryDirectory() as parent:
            adapter.load_adapter(Path(parent) / "none", pipeline.classifier.config)

    yield "an adapter in no folder", in_no_folder
    yield "a backend of no name", lambda: _entered(dispatch.backend("cuda"))
    for beside, functions in (("", {"rmsnorm": len}), (" beside one of a name", {"softmax": len, "rmsnorm": len})):
        yield f"an operation of no name in another's place{beside}", partial(_replaced, functions)
    yield "a backend that cannot run", _without_triton


def _replaced(functions: dict[str, Callable[..., Any]]) -> None:
    _entered(dispatch.replaced(functions))


def _without_triton() -> None:
    with mock.patch("blackswan.impl.kernels.why_not", return_value="no kernel runs here"):
        _entered(dispatch.backend("triton"))


def _entered(block: AbstractContextManager[Any]) -> None:
    with block:
        pass


def _batch(pipeline: ClassifyPipeline) -> Batch:
    ids, classes = torch.ones(2, 3, dtype=torch.int64, device=pipeline.device), pipeline.classifier.adaptation.classes
    labels: Sequence[int] = (2, classes) if pipeline.trainer.multi_label else (2,)
    dtype = torch.float32 if pipeline.trainer.multi_label else torch.int64
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(labels, dtype=dtype, device=pipeline.device))
