"""Classifiers that nothing was trained of, as `impl` starts a run from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blackswan.falsifiers.subjects.doors import FreshClassifier
from blackswan.impl.classifier import Classifier
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.pipeline import ClassifyPipeline


class Classifiers:
    """See `doors.Classifiers`."""

    def __init__(self, device: torch.device, path: str | None) -> None:
        del path
        self._device = device

    def fresh(self, model: Path | Mapping[str, Any], settings: Mapping[str, Any], texts: Sequence[str]) -> FreshClassifier:
        """A pipeline's classifier."""
        config = ClassifyConfig.from_mapping(settings)
        if isinstance(model, Path):
            pipeline = ClassifyPipeline.from_pretrained(model, config, device=self._device)
        else:
            pipeline = ClassifyPipeline.from_random(DecoderConfig(**model), config, device=self._device)
        tokens = [tensor.to(self._device) for tensor in pipeline.tokens.batch(texts)]
        with torch.no_grad():
            logits, plain = (made(*tokens).cpu().numpy() for made in (pipeline.classifier, self._without_update(pipeline.classifier)))
        trainable = {name: value.detach().cpu().numpy() for name, value in pipeline.classifier.trainable_parameters().items()}
        return FreshClassifier(trainable, logits, plain)

    def _without_update(self, made: Classifier) -> Classifier:
        trainable = made.trainable_parameters()
        base = {name: value for name, value in made.state_dict().items() if name not in trainable}
        head = {name: value.detach() for name, value in trainable.items() if name.startswith("score.")}
        return Classifier(made.config, replace(made.adaptation, targets=""), base, head, dtype=torch.float32, device=self._device)
