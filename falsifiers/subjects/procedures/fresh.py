"""Classifiers that nothing was trained of, as a subject starts a run from them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blackswan.impl.classifier import Classifier
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]


def fresh_classifier(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    """`trainable/…`, `logits` of `texts`, and `plain`, those of the same decoder and head without an update.

    On the checkpoint in `folder`, or where there is none on random weights of `architecture`; with `settings`.
    """
    config = ClassifyConfig.from_mapping(scalars["settings"])
    if "folder" in scalars:
        pipeline = ClassifyPipeline.from_pretrained(Path(scalars["folder"]), config, device=device)
    else:
        pipeline = ClassifyPipeline.from_random(DecoderConfig(**scalars["architecture"]), config, device=device)
    classifier = pipeline.classifier
    tokens = [tensor.to(device) for tensor in pipeline.tokens.batch(scalars["texts"])]
    with torch.no_grad():
        logits = {"logits": classifier(*tokens), "plain": _without_update(classifier, device)(*tokens)}
    found = {f"trainable/{name}": value.detach() for name, value in classifier.trainable_parameters().items()} | logits
    return {name: value.cpu().numpy() for name, value in found.items()}


def _without_update(classifier: Classifier, device: torch.device) -> Classifier:
    trainable = classifier.trainable_parameters()
    base = {name: value for name, value in classifier.state_dict().items() if name not in trainable}
    head = {name: value.detach() for name, value in trainable.items() if name.startswith("score.")}
    return Classifier(classifier.config, replace(classifier.adaptation, targets=""), base, head, dtype=torch.float32, device=device)
