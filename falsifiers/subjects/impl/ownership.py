"""Objects of `impl` made of tensors that somebody else keeps, and what they compute."""

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of, to_numpy
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.subjects.guards import Guards
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.devices import batch_of, trainer_of
from blackswan.falsifiers.subjects.protocol import Session
from blackswan.impl import classifier, decoder, dispatch, merge, pretrain
from blackswan.impl.adapter import Adapter, save_adapter
from blackswan.impl.apr_write import save_apr
from blackswan.impl.checkpoint import WEIGHTS, Checkpoint, save_checkpoint
from blackswan.impl.classifier import trainable_shapes
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.decoder import Decoder
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.pretrain import StepFn
from blackswan.impl.token_shards import TokenBatch
from blackswan.impl.tokens import ByteTokens
from blackswan.impl.trainer import Batch, Trainer
from blackswan.reference.table import Array

STEPS, RATE, SEED = 2, 1e-2, 5
Tensors = dict[str, Tensor]
Used = Callable[[], Mapping[str, Tensor]]
"""Works with an object and gives what came of it."""
Calls = list[tuple[str, dict[str, Any], dict[str, Any]]]
"""Path and operation of each call, what it was given by name, and its results."""
ASKED = (["b", "two", "", "b b"], ["one", "a", "a a", "c"])
"""Texts that two threads ask a pipeline about, in several batches each."""
LATE = ("an adapter that is merged and saved", "a decoder that is written")
"""Kinds of object that take their tensors when they work, and not when they are made."""
BASE, BATCH = "base ", "batch "
"""Beginnings of the names of tensors that an object may read for as long as it lives."""
DECODER = "decoder/"
"""The beginning of the names of a decoder's state."""


class Ownership(Door):
    """Objects made of tensors that are handed over."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of object that tensors can be handed to."""
        return tuple(_OPENED)

    def hand(self, kind: str, work: Workload, weights: Mapping[str, Array]) -> "Hand":
        """Tensors that are handed to objects of that kind: float32 weights, a batch, and what else they take."""
        return Hand(kind, work, weights, self._device)

    def of_memory(
        self, operation: str, inputs: Mapping[str, Array], scalars: Mapping[str, Any], dtype: str, backend: str, gradients: bool
    ) -> str:
        """Asks an operation, by a backend, with its gradients or without; gives what `guards` say if it misuses memory, else nothing."""
        signature = signatures()[operation]
        held = getattr(torch, dtype) if signature.precision == "storage" else torch.float32
        reals = {name: torch.float32 if signature.inputs[name].dtype == "float32" else held for name in inputs}
        given = {
            name: torch.tensor(value, device=self._device, dtype=reals[name] if np.asarray(value).dtype.kind == "f" else None)
            for name, value in inputs.items()
        }

        def compute(tensors: Tensors) -> Tensors:
            wrt = [name for name in signature.gradients if gradients and name in tensors]
            leaves = {name: tensors[name].detach().requires_grad_() for name in wrt}
            with dispatch.backend(backend), torch.set_grad_enabled(gradients):
                result = dispatch.call(operation, operation, **{**tensors, **leaves}, **scalars)
            outputs = dict(zip(signature.outputs, result if isinstance(result, tuple) else (result,), strict=True))
            roots = [value for value in outputs.values() if value.requires_grad]
            found = torch.autograd.grad(roots, [*leaves.values()], [torch.ones_like(root) for root in roots]) if roots else ()
            return outputs | {f"gradient of {name}": value for name, value in zip(leaves, found, strict=bool(roots))}

        halves = {name: 0.5 * value if value.is_floating_point() else value for name, value in given.items()}
        guards = Guards()
        try:
            for asked in (given, halves):  # within their bounds, while what guards ask first may be refused
                guards(compute, asked)
        except SubjectError as error:
            return str(error)
        others = {name: value.flatten().roll(1).view_as(value) for name, value in halves.items()}
        of_others = _clones(compute(_clones(others)))
        first = compute(given)
        right = _clones(first)
        for value in first.values():
            value.detach().zero_()
        again = _clones(compute(given))
        for name, value in given.items():
            value.copy_(others[name])
        found = compute(given)
        kept = [name for name, value in right.items() if not _near(value, again[name])]
        old = [name for name, value in of_others.items() if not _near(value, found[name])]
        said = [f"{', '.join(kept)}: what was written to an answer is in the next one"] if kept else []
        said += [f"{', '.join(old)}: what arrays were before other numbers were written to them is in the answer"] if old else []
        return "; ".join(said)

    def listed(self, work: Workload) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of a decoder's parameters, a classifier's base and its trained tensors, asked for again once the first lists
        were emptied, and before."""
        config, adaptation = config_of(work.scalars), adaptation_of(work.scalars)
        asked = (
            partial(decoder.parameter_shapes, config),
            partial(classifier.base_shapes, config),
            partial(classifier.trainable_shapes, config, adaptation),
        )
        first = [dict(ask()) for ask in asked]
        for ask in asked:
            found = ask()
            if isinstance(found, dict):
                found.clear()
        return first + [dict(ask()) for ask in asked]

    def refilled(self, work: Workload, weights: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """What a classifier and a decoder make of a batch that is padded on the left, with gradients and without: of one by itself, and in
        the memory of a batch before it that was padded on the right."""
        held, config = {name: torch.tensor(value, device=self._device) for name, value in weights.items()}, config_of(work.scalars)
        names = trainable_shapes(config, adaptation_of(work.scalars))
        base, own = ({name: value for name, value in held.items() if (name in names) == kind} for kind in (False, True))
        models = {
            "classifier": trainer_of(work, base, own, self._device).classifier,
            "decoder": pretrain.random_decoder(config, device=self._device),
        }
        ids = torch.arange(2 * work.seq, device=self._device).view(2, -1) % work.vocab
        mask = (torch.arange(work.seq, device=self._device) < work.seq - 1).repeat(2, 1)
        alone, again = dict[str, Array](), dict[str, Array]()
        for name, gradients in product(models, (True, False)):
            one, other, label = (ids.clone(), mask.clone()), (ids.flip(0), mask.flip(1)), f"{name}, gradients {gradients}"
            with torch.set_grad_enabled(gradients):
                alone[label] = to_numpy(models[name](*other))
                models[name](*one)
                for value, later in zip(one, other, strict=True):
                    value.copy_(later)
                again[label] = to_numpy(models[name](*one))
        return alone, again

    def read_again(self, work: Workload) -> list[dict[str, Array]]:
        """The random weights of a decoder and of an update, of one seed: read in order, once more from the last one on, and made anew and
        read so at first."""
        config = config_of(work.scalars)

        def drawn() -> dict[str, Mapping[str, Tensor]]:
            trained = classifier.initial_trainable(config, adaptation_of(work.scalars), 3)
            return {"decoder": decoder.random_tensors(config, 3), "update": trained}

        first, other = drawn(), drawn()
        places = [(kind, name) for kind, tensors in first.items() for name in tensors]
        looks = ((first, places), (first, places[::-1]), (other, places[::-1]))
        return [{f"{kind}: {name}": to_numpy(tensors[kind][name]) for kind, name in order} for tensors, order in looks]

    def recorded(self, work: Workload, weights: Mapping[str, Array]) -> tuple[Calls, Calls]:
        """The calls of steps of a classifier, then of a decoder, clipped: what each was given and gave, copied at the call; and what a
        recording of the steps says of it when they are over."""
        held = {name: torch.tensor(value, device=self._device) for name, value in weights.items()}
        trained, batch = trainable_shapes(config_of(work.scalars), adaptation_of(work.scalars)), batch_of(work, self._device)
        base, own = ({name: value for name, value in held.items() if (name in trained) == kind} for kind in (False, True))
        trainer, decoder = trainer_of(work, base, own, self._device), pretrain.random_decoder(config_of(work.scalars), device=self._device)
        step = StepFn(decoder, total_steps=STEPS, micro_batch=work.batch - 1, learning_rate=RATE, max_norm=RATE)
        then: Calls = []

        def around(path: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
            given = _values(arguments)
            result = function(**arguments)
            then.append((f"{path} {operation}", given, _values(dict(enumerate(result if isinstance(result, tuple) else (result,))))))
            return result

        with dispatch.wrapping(around), dispatch.recording() as calls:
            for _ in range(STEPS):
                trainer.train_batch(batch)
                step.train(TokenBatch(batch.input_ids, batch.mask))
                for each in (batch.input_ids, batch.labels):  # the next batch is in the same memory
                    each.copy_(each.flip(0))
        now = [
            (f"{call.path} {call.operation}", _values({**call.inputs, **call.scalars}), _values(dict(enumerate(call.outputs.values()))))
            for call in calls
        ]
        return then, now


class Hand(Session):
    """Tensors that somebody keeps, and the objects that were made of them."""

    def __init__(self, kind: str, work: Workload, weights: Mapping[str, Array], place: torch.device) -> None:
        self._kind, self._work, self._place = kind, work, place
        trained, batch = trainable_shapes(config_of(work.scalars), adaptation_of(work.scalars)), batch_of(work, place)
        self._held = {("" if name in trained else BASE) + name: torch.tensor(value, device=place) for name, value in weights.items()}
        self._held |= {f"{BATCH}{name}": getattr(batch, name) for name in ("input_ids", "mask", "labels")}
        self._held["class weights"] = torch.arange(1, work.classes + 1, device=place) / work.classes
        if kind in _GIVEN:
            self._held |= {name: value.clone() for name, value in _GIVEN[kind](work, self._held, place).items()}
        for name, value in self._held.items():
            value.requires_grad_(name.startswith(BASE))  # a model may be made of one that is trained elsewhere
        self._used: list[Used] = []

    def content(self) -> dict[str, Array]:
        """The tensors that were handed over, as they are, and which of them require a gradient."""
        trained = {f"{name} requires a gradient": np.asarray(value.requires_grad) for name, value in self._held.items()}
        return {**_copied(self._held), **trained}

    def open(self) -> int:
        """Makes one more object of the tensors; its number."""
        self._used.append(_OPENED[self._kind](self._work, self._held, self._place))
        return len(self._used) - 1

    def work(self, number: int) -> dict[str, Array]:
        """Works with that object, and gives what came of it."""
        return _copied(self._used[number]())

    def overwrite(self) -> None:
        """Writes over all tensors that an object must have copied when it was made."""
        for name, value in self._held.items():
            if not name.startswith((BASE, BATCH)) and self._kind not in LATE:
                value.zero_()


def _clones(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.detach().float(), rtol=1e-2)


def _values(named: Mapping[Any, Any]) -> dict[str, Any]:
    """Copies of tensors, by name; anything else in words."""
    return {str(name): to_numpy(value.detach()).copy() if isinstance(value, Tensor) else repr(value) for name, value in named.items()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: to_numpy(value.detach()).copy() for name, value in tensors.items()}


def _plain(held: Tensors, prefix: str = "") -> Tensors:
    """Weights of the base, or those that are trained."""
    own = {
        name.removeprefix(prefix): value for name, value in held.items() if name.startswith(prefix) and name.endswith((".weight", ".bias"))
    }
    return own if prefix else {name: value for name, value in own.items() if not name.startswith((BASE, BATCH)) and "/" not in name}


def _give_out(held: Tensors, named: Mapping[Any, Tensor]) -> None:
    """Keeps what was given out: it must stay as it is."""
    held |= {f"given out/{len(held)}/{name}": value for name, value in named.items()}


def _batch(held: Tensors) -> Batch:
    return Batch(*(held[f"{BATCH}{name}"] for name in ("input_ids", "mask", "labels")))


def _trainer(work: Workload, held: Tensors, place: torch.device) -> Trainer:
    """Among what it is made of is a head of a language model, as in the weights of one whose head is tied too."""
    base = _plain(held, BASE)
    return trainer_of(work, {"lm_head.weight": base["model.embed_tokens.weight"], **base}, _plain(held), place)


def _stepped(trainer: Trainer, held: Tensors) -> dict[str, Tensor]:
    for _ in range(STEPS):
        trainer.train_batch(_batch(held))
    return trainer.state()


def _classifier(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A classifier of matrices that lie by columns in memory."""
    trainer = _trainer(work, {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in held.items()}, place)
    return lambda: _stepped(trainer, held)


def _quantised(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A classifier in NF4, doubly quantised."""
    trainer = _trainer(replace(work, nf4=True, double_quantize=True), held, place)
    return lambda: _stepped(trainer, held)


def _assigned(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A classifier in NF4 of other tensors, in whose places those of a state dict are put."""
    work = replace(work, nf4=True, double_quantize=True)
    trainer = _trainer(work, {name: 1 - value.detach() if value.is_floating_point() else value for name, value in held.items()}, place)
    trainer.classifier.load_state_dict(_trainer(work, held, place).classifier.state_dict(), assign=True)
    anew = Trainer(trainer.classifier, total_steps=None, micro_batch=work.batch, learning_rate=1e-3)
    return lambda: _stepped(anew, held)


def _class_weights(work: Workload, held: Tensors, place: torch.device) -> Used:
    made = _trainer(work, held, place).classifier
    trainer = Trainer(made, total_steps=STEPS, micro_batch=work.batch, learning_rate=RATE, class_weights=held["class weights"])
    return lambda: _stepped(trainer, held)


class _Meeting(ByteTokens):
    """Tokens for which two threads wait for each other, with every batch, where there is a barrier; not for long, as one may answer
    after the other."""

    barrier: Barrier | None = None

    def batch(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        found = super().batch(texts)
        if self.barrier is not None:
            with suppress(BrokenBarrierError):
                self.barrier.wait(2.0)
        return found


def _made(work: Workload, held: Tensors, place: torch.device, tokens: ByteTokens) -> ClassifyPipeline:
    adaptation = adaptation_of(work.scalars)
    settings: dict[str, Any] = {"num_classes": work.classes, "lora_rank": work.rank, "lora_alpha": work.alpha, "lora_targets": work.targets}
    settings |= {"pooling": adaptation.pooling, "quantize_nf4": work.nf4, "dtype": work.dtype, "learning_rate": RATE}
    config = ClassifyConfig.from_mapping(settings | {"max_seq_len": work.seq, "batch_size": 2})
    return ClassifyPipeline(config_of(work.scalars), config, _plain(held, BASE), _plain(held), tokens, device=place)


def _pipeline(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A pipeline, which two threads ask at once."""
    made = _made(work, held, place, tokens := _Meeting(work.seq))
    _give_out(held, dict(enumerate(tokens.batch(["one", "a"]))))
    _give_out(held, {"probabilities": made.probabilities(["one", "a"])})

    def used() -> Mapping[str, Tensor]:
        tokens.barrier = Barrier(2)
        with ThreadPoolExecutor(2) as threads:
            answers = [*threads.map(made.probabilities, ASKED)]
        tokens.barrier = None
        return {**_stepped(made.trainer, held), **{f"answers {place}": each for place, each in enumerate(answers)}}

    return used


def _copied_pipeline(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A copy of a pipeline that has answered, in torch's inference mode, before it was copied, and that was trained afterwards."""
    made = _made(work, held, place, ByteTokens(work.seq))
    with torch.inference_mode():
        made.probabilities(ASKED[0])
    own = copy.deepcopy(made)
    _stepped(made.trainer, held)

    def used() -> Mapping[str, Tensor]:
        answers = {f"answers {place}": own.probabilities(texts) for place, texts in enumerate(ASKED)}
        return {**_stepped(own.trainer, held), **answers}

    return used


def _state(work: Workload, held: Tensors, place: torch.device) -> Tensors:
    """The state of a trainer after steps."""
    return _stepped(_trainer(work, held, place), held)


def _loaded(work: Workload, held: Tensors, place: torch.device) -> Used:
    trainer = _trainer(work, held, place)
    trainer.load_state({name: held[name] for name in trainer.state()})
    return lambda: _stepped(trainer, held)


def _reported(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A trainer's state after a step is given out, and the trainer goes on."""
    trainer = _trainer(work, held, place)
    trainer.train_batch(_batch(held))
    _give_out(held, trainer.state())
    return lambda: _stepped(trainer, held)


def _gradient(work: Workload, held: Tensors, place: torch.device) -> Tensors:
    trainer = _trainer(work, held, place)
    trainer.accumulate(_batch(held))
    return {f"{BATCH}gradient": trainer.gradient_vector()}


def _applied(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A gradient and answers are given out, the step is made and others are asked for; then one with a gradient that is handed over."""
    trainer = _trainer(work, held, place)
    trainer.accumulate(_batch(held))
    _give_out(held, {"": trainer.gradient_vector()})
    answered = trainer.forward_only(_batch(held), probabilities=True)
    _give_out(held, {name: getattr(answered, name) for name in ("probabilities", "predicted")})

    def used() -> Mapping[str, Tensor]:
        trainer.apply()
        trainer.forward_only(_batch(held), probabilities=True)
        trainer.accumulate(_batch(held))
        trainer.gradient_vector()
        trainer.discard()
        trainer.apply_gradient_vector(held[f"{BATCH}gradient"])
        return trainer.state()

    return used


def _pretrainer(work: Workload, place: torch.device, decoder: Decoder | None = None) -> StepFn:
    decoder = decoder or pretrain.random_decoder(config_of(work.scalars), device=place)
    return StepFn(decoder, total_steps=2 * STEPS, micro_batch=work.batch, learning_rate=RATE)


def _pretrained(step: StepFn, held: Tensors) -> dict[str, Tensor]:
    for _ in range(STEPS):
        step.train(TokenBatch(held[f"{BATCH}input_ids"], held[f"{BATCH}mask"]))
    return step.optimiser.state()


def _decoder(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A decoder that is pre-trained."""
    decoder = Decoder(config_of(work.scalars), _plain(held, BASE), dtype=torch.float32, device=place)
    step = _pretrainer(work, place, decoder)
    return lambda: {**_pretrained(step, held), **dict(decoder.named_parameters())}


def _seeded(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A decoder of random weights, of one seed for all, and a user who writes to its parameters."""
    del held
    decoder = pretrain.random_decoder(config_of(work.scalars), seed=SEED, device=place)

    def used() -> Mapping[str, Tensor]:
        for parameter in decoder.parameters():
            parameter.data.mul_(RATE)
        return dict(decoder.named_parameters())

    return used


def _decoder_state(work: Workload, held: Tensors, place: torch.device) -> Tensors:
    """The state of a decoder's optimiser after steps."""
    return {f"{DECODER}{name}": value for name, value in _pretrained(_pretrainer(work, place), held).items()}


def _decoder_loaded(work: Workload, held: Tensors, place: torch.device) -> Used:
    step = _pretrainer(work, place)
    step.optimiser.load_state({name.removeprefix(DECODER): value for name, value in held.items() if name.startswith(DECODER)}, STEPS)
    return lambda: _pretrained(step, held)


def _merged(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A merged decoder is given out, and another one made when the adapter was saved."""
    del place
    trained, config, adaptation = _plain(held), config_of(work.scalars), adaptation_of(work.scalars)

    def merged(times: int) -> Mapping[str, Tensor]:
        return merge.merge_adapter(
            Checkpoint(config, _plain(held, BASE)), Adapter(adaptation, {key: times * trained[key] for key in trained})
        )

    def used() -> Mapping[str, Tensor]:
        with tempfile.TemporaryDirectory() as parent:
            save_adapter(Path(parent) / "adapter", config, adaptation, trained, base=None, extra={})
        return merged(times=1)

    _give_out(held, merged(times=2))

    return used


def _written(work: Workload, held: Tensors, place: torch.device) -> Used:
    """A decoder in a folder, and in .apr files of every kind."""
    del place

    def used() -> Mapping[str, Tensor]:
        decoder = Checkpoint(config_of(work.scalars), _plain(held, BASE))
        with tempfile.TemporaryDirectory() as parent:
            save_checkpoint(Path(parent) / "folder", decoder.config, decoder.tensors)
            paths = {"folder": Path(parent) / "folder" / WEIGHTS}
            for dtype in (None, "q8", "q4", "bfloat16"):
                paths[str(dtype)] = Path(parent) / f"{dtype}.apr"
                save_apr(paths[str(dtype)], decoder, {}, dtype)
            return {name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for name, path in paths.items()}

    return used


_GIVEN: dict[str, Callable[[Workload, Tensors, torch.device], Tensors]] = {
    "a state that is loaded": _state,
    "a decoder's state that is loaded": _decoder_state,
    "a gradient": _gradient,
}
"""By kind of object, the further tensors that are handed to it; they are made of the weights."""
_OPENED: dict[str, Callable[[Workload, Tensors, torch.device], Used]] = {
    "a classifier": _classifier,
    "a classifier in NF4": _quantised,
    "a classifier in NF4 of a state dict": _assigned,
    "a pipeline": _pipeline,
    "a copy of a pipeline": _copied_pipeline,
    "class weights": _class_weights,
    "a state that is loaded": _loaded,
    "a decoder that is pre-trained": _decoder,
    "a decoder of a seed": _seeded,
    "a decoder's state that is loaded": _decoder_loaded,
    "a state that is given out": _reported,
    "a gradient": _applied,
    "an adapter that is merged and saved": _merged,
    "a decoder that is written": _written,
}
"""How an object of each kind is made of the tensors."""
