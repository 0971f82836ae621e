"""Classifiers of `impl` that no run has trained: as a run starts from them, and their answers about texts."""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.conversion import config_of
from blackswan.falsifiers.subjects.doors.devices import Answered, FreshClassifier
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.shared import default_dtype, random_states
from blackswan.impl import __main__ as command
from blackswan.impl import settings
from blackswan.impl.classifier import Classifier
from blackswan.impl.commands import predict as predict_command
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import Sample
from blackswan.impl.fit import total_steps
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.saved import open_adapter
from blackswan.reference.table import Array


class Classifiers(Door):
    """Classifiers that no run has trained."""

    def fresh(
        self,
        model: Path | Mapping[str, Any],
        hyperparameters: Mapping[str, Any],
        texts: Sequence[str],
        *,
        merge: bool = False,
        default: str = "float32",
    ) -> FreshClassifier:
        """A pipeline's classifier on a checkpoint, or on random weights of an architecture, with a run's settings; saved, or merged.

        `default` is torch's default dtype meanwhile. Where it is not float32, constants that `impl` has kept are computed anew under it,
        and torch's default device is none that has numbers.
        """
        config = ClassifyConfig.from_mapping(hyperparameters)
        torch.rand(())  # so that a generator that is seeded as before has changed, too
        before = random_states()
        usual = default == "float32"
        with default_dtype(default), torch.device("cpu" if usual else "meta"), nullcontext() if usual else _nothing_kept():
            if isinstance(model, Path):
                pipeline = ClassifyPipeline.from_pretrained(model, config, device=self._device)
            else:
                pipeline = ClassifyPipeline.from_random(config_of(model), config, device=self._device)
            found = self._started(pipeline, texts, merge=merge)
        return replace(found, drawn=tuple(owner for owner, state in random_states().items() if state != before[owner]))

    def steps_of_a_run(self, settings: Mapping[str, Any], samples: int) -> int:
        """Optimiser steps of a run on so many samples."""
        return total_steps(ClassifyConfig.from_mapping(settings), samples)

    def from_apr(self, path: Path, hyperparameters: Mapping[str, Any], texts: Sequence[str]) -> FreshClassifier:
        """The same of an .apr file, opened as one."""
        config = ClassifyConfig.from_mapping(hyperparameters)
        return self._started(ClassifyPipeline.from_apr(path, config, device=self._device), texts, merge=False)

    def _started(self, pipeline: ClassifyPipeline, texts: Sequence[str], *, merge: bool) -> FreshClassifier:
        tokens = [tensor.to(self._device) for tensor in pipeline.tokens.batch(texts)]
        with torch.no_grad():
            logits, plain = (made(*tokens).cpu().numpy() for made in (pipeline.classifier, self._without_update(pipeline.classifier)))
        trainable = {name: value.detach().cpu().numpy().copy() for name, value in pipeline.classifier.trainable_parameters().items()}
        with tempfile.TemporaryDirectory() as folder:
            (pipeline.merge if merge else pipeline.save)(Path(folder) / "saved")
            opened = ClassifyPipeline.from_saved(Path(folder) / "saved", device=self._device)
        with torch.no_grad():
            again = opened.classifier(*tokens).cpu().numpy()
        label = (0,) * pipeline.config.num_classes if pipeline.config.multi_label else 0
        samples = [Sample(text, label) for text in texts]
        losses = pipeline.train_batch(samples).loss, pipeline.evaluate(samples).loss
        return FreshClassifier(trainable, logits, plain, again, losses=losses)

    def answers(
        self, model: Path, hyperparameters: Mapping[str, Any], trainable: Mapping[str, Array], texts: Sequence[str], labels: Sequence[Label]
    ) -> dict[str, Answered]:
        """The answers of a checkpoint with those trainable tensors, as an `adapter` and `merged`, with each text's label for evaluation.
        The adapter has answered the same with its first tensors before, and its logits in training are those of before the merge."""
        samples = [Sample(text, tuple(label) if isinstance(label, list) else label) for text, label in zip(texts, labels, strict=True)]
        pipeline = self._pipeline(model, hyperparameters, trainable, lambda fresh: _answered(fresh, samples))
        with tempfile.TemporaryDirectory() as parent:
            before = _in_training(pipeline, texts)
            pipeline.merge(Path(parent) / "merged")
            merged = ClassifyPipeline.from_merged(Path(parent) / "merged", device=self._device)
            return {"adapter": replace(_answered(pipeline, samples), logits_in_training=before), "merged": _answered(merged, samples)}

    def merged(
        self,
        model: Path,
        hyperparameters: Mapping[str, Any],
        trainable: Mapping[str, Array],
        folder: Path,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Saves the adapter of a run with those trainable tensors as `adapter`, and merges it as the run does, `merged`, and as the command
        does that opens the saved one, `opened`. `meanwhile` is called between the run and what it saves. The model is opened by a name that
        holds in its own folder only, and was merged with its first tensors before."""
        with chdir(model.parent), tempfile.TemporaryDirectory() as first:
            pipeline = self._pipeline(Path(model.name), hyperparameters, trainable, lambda fresh: fresh.merge(Path(first) / "merged"))
        if meanwhile is not None:
            meanwhile()
        pipeline.save(folder / "adapter")
        pipeline.merge(folder / "merged")
        saved = ("--adapter", str(folder / "adapter"), "--output", str(folder / "opened"), "--device", str(self._device))
        with redirect_stdout(io.StringIO()):
            status = command.main(["merge", *saved])
        if status:
            raise RuntimeError(f"the command ended with status {status}")

    def saved_on_random(self, architecture: Mapping[str, Any], hyperparameters: Mapping[str, Any], folder: Path) -> None:
        """Saves a fresh adapter on random weights."""
        config = ClassifyConfig.from_mapping(hyperparameters)
        ClassifyPipeline.from_random(config_of(architecture), config, device=self._device).save(folder)

    def opened(self, adapter: Path, model: Path) -> None:
        """Opens a saved adapter on a checkpoint."""
        ClassifyPipeline.from_adapter(adapter, model, device=self._device)

    def read_again(self, adapter: Path, model: Path) -> None:
        """Opens a saved adapter on a checkpoint, whose tensors are read for a second time where they were refused."""
        base = open_adapter(adapter, model).base
        with suppress(ValueError):
            dict(base)
        dict(base)

    def saved_again(self, adapter: Path, folder: Path, model: Path | None = None) -> None:
        """Opens what was saved on the base that it names, or on that model, and saves it there."""
        ClassifyPipeline.from_saved(adapter, model, device=self._device).save(folder)

    def _pipeline(
        self,
        model: Path,
        hyperparameters: Mapping[str, Any],
        trainable: Mapping[str, Array],
        before: Callable[[ClassifyPipeline], object] | None = None,
    ) -> ClassifyPipeline:
        pipeline = ClassifyPipeline.from_pretrained(model, ClassifyConfig.from_mapping(hyperparameters), device=self._device)
        if before is not None:
            before(pipeline)
        with torch.no_grad():
            for name, parameter in pipeline.classifier.trainable_parameters().items():
                parameter.copy_(torch.tensor(trainable[name]))
        return pipeline

    def defaults(self, model_params: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that a command takes for a model of so many parameters, where the user gives no more than those."""
        sources = {name: settings.Setting(value, f"--{name}") for name, value in given.items()}
        return asdict(settings.resolve(model_params, sources))

    def given(self, file: Path | None, *options: str) -> dict[str, Any]:
        """The settings that a file gives, or without one those of options."""
        found = settings.read_file(file) if file else settings.given_options(_options().parse_args(options))
        return {name: each.value for name, each in found.items()}

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a run, as Python makes them of those that are given."""
        return asdict(ClassifyConfig.from_mapping(given))

    def weights_of_a_list(self, given: Any) -> Any:
        """The class weights of settings that were made of that list, once it is emptied."""
        made = ClassifyConfig(num_classes=len(given), class_weights=given)
        given.clear()
        return made.class_weights

    def summary(self, *arguments: str) -> str:
        """The output of the command."""
        with redirect_stdout(io.StringIO()) as printed:
            status = command.main(["summary", *arguments])
        if status:
            raise RuntimeError(f"the command ended with status {status}")
        return printed.getvalue()

    def _without_update(self, made: Classifier) -> Classifier:
        if made.adaptation.nf4:
            return made  # a weight that is quantised is not kept beside it
        trainable = made.trainable_parameters()
        base = {name: value for name, value in made.state_dict().items() if name not in trainable}
        head = {name: value.detach() for name, value in trainable.items() if name.startswith("score.")}
        return Classifier(made.config, replace(made.adaptation, targets=""), base, head, dtype=torch.float32, device=self._device)


def _answered(pipeline: ClassifyPipeline, samples: list[Sample]) -> Answered:
    """By `predict`, by the command, by `forward_only` and by `evaluate`, which shows a single text's class in its confusion.

    Each text is evaluated with another one's label before it is with its own, in the same list, which is filled anew.
    """
    texts = [sample.text for sample in samples]
    tokens = [tensor.to(pipeline.device) for tensor in pipeline.tokens.batch(texts)]
    in_training = _in_training(pipeline, texts)
    with torch.no_grad():
        logits = pipeline.classifier(*tokens)
    name = "labels" if pipeline.config.multi_label else "label"
    lines = [json.loads(line) for line in predict_command.predictions(pipeline, texts)]
    passed = pipeline.forward_only(samples, probabilities=True)
    assert passed.probabilities is not None
    assert passed.predicted is not None
    evaluations = []
    for sample, other in zip(samples, [*samples[1:], *samples[:1]], strict=True):
        pipeline.evaluate(given := [replace(sample, label=other.label)])
        given[0] = sample  # in the same list
        evaluations.append(pipeline.evaluate(given))
    confusions = np.asarray([evaluation.confusion for evaluation in evaluations])
    shown = confusions.argmax(axis=2) % 2 if pipeline.config.multi_label else confusions.sum(axis=1).argmax(axis=1)
    predicted = pipeline.predict(texts)
    if unlike := [each for each in predicted if not isinstance(each, type(samples[0].label))]:
        raise RuntimeError(f"predict answered {unlike[0]!r}, which is no label of a sample, like {samples[0].label!r}")
    probabilities = {"predict": pipeline.probabilities(texts).numpy(), "forward_only": passed.probabilities.cpu().numpy()}
    classes = {"predict": np.asarray(predicted), "forward_only": passed.predicted.cpu().numpy(), "evaluate": shown}
    probabilities["command"], classes["command"] = (np.asarray([line[key] for line in lines]) for key in ("probabilities", name))
    losses = np.asarray([evaluation.loss for evaluation in evaluations])
    return Answered(logits.float().cpu().numpy(), in_training, probabilities, classes, losses)


def _in_training(pipeline: ClassifyPipeline, texts: Sequence[str]) -> Array:
    """Logits of a pass that keeps what a backward pass needs."""
    logits = pipeline.classifier(*(tensor.to(pipeline.device) for tensor in pipeline.tokens.batch(texts)))
    found: Array = logits.detach().float().cpu().numpy()
    return found


@cache
def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    settings.add_options(parser)
    return parser


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Empties the caches of `impl`'s functions before the block and after it, so that constants are computed anew.

    The streams and handles of the hand-written layers stay: a GPU has memory for every stream that it has seen.
    """
    kept = [each for name, module in [*sys.modules.items()] if name.startswith("blackswan.impl.") for each in vars(module).values()]
    cached = [each for each in kept if hasattr(each, "cache_clear")]
    forget = [each.cache_clear for each in cached if not each.__module__.startswith("blackswan.impl.fused.")]
    for ask in forget:
        ask()
    try:
        yield
    finally:
        for ask in forget:
            ask()
