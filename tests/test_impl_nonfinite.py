"""Where a value that is not finite came from, and proof that a model is in its place."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blackswan.impl import dispatch, residency
from blackswan.impl.classifier import Adaptation, Classifier, initial_trainable
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.dispatch import replaced
from blackswan.impl.nonfinite import origin
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.optimiser import AdamW
from blackswan.impl.residency import NotResident, require_residency
from blackswan.impl.trainer import Batch, Trainer

CONFIG = DecoderConfig("qwen3", 40, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, True, 128)
CPU, META = torch.device("cpu"), torch.device("meta")


def classifier(nf4: bool = False, dtype: torch.dtype = torch.float32) -> Classifier:
    adaptation = Adaptation(3, 2, 4.0, nf4=nf4)
    trainable = {name: value + 0.01 for name, value in initial_trainable(CONFIG, adaptation, 0).items()}
    return Classifier(CONFIG, adaptation, random_tensors(CONFIG, 0), trainable, dtype=dtype)


def batch(labels: Tensor | None = None) -> Batch:
    ids = torch.arange(10).view(2, 5)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([0, 2]) if labels is None else labels)


def spoiled(operation: str, nth: int, value: float) -> dict[str, Callable[..., Any]]:
    """The operation with a bad value in the output of its nth call."""
    calls = iter(range(1000))

    def wrong(**arguments: Any) -> Tensor:
        y: Tensor = OPERATIONS[operation](**arguments)
        return torch.where(torch.arange(y.numel()).view(y.shape) == 3, value, y) if next(calls) == nth else y

    return {operation: wrong}


def test_the_first_bad_call_is_named_with_what_it_gave() -> None:
    with replaced(spoiled("swiglu", 1, math.nan)):
        assert origin(classifier(), batch()) == "model.layers.1.mlp.swiglu (swiglu): 1 NaN of 480, from finite inputs"
    with replaced(spoiled("qk_norm", 3, -math.inf)):
        assert origin(classifier(), batch()) == "model.layers.1.self_attn.k_norm (qk_norm): 1 infinite of 160, from finite inputs"


def test_a_bad_input_is_told_from_a_bad_call() -> None:
    assert origin(classifier(), batch(), torch.tensor([1.0, math.nan, 1.0])) == (
        "loss (weighted_cross_entropy): its input class_weights has 1 NaN of 3"
    )


def test_it_works_where_gradients_are_off_and_inside_a_recording() -> None:
    with torch.no_grad(), dispatch.recording() as calls, replaced(spoiled("pool", 0, math.nan)):
        assert (origin(classifier(), batch()) or "").startswith("pool (pool): 1 NaN of 64")
    assert calls[-1].path == "model.norm"


def test_what_surrounds_a_call_sees_its_whole_path() -> None:
    seen: list[str] = []

    def around(path: str, operation: str, function: Callable[..., Any], arguments: Any) -> Any:
        seen.append(f"{path}:{operation}")
        return function(**arguments)

    with dispatch.scope("steps.0"), dispatch.wrapping(around):
        dispatch.call("sum", "residual_add", x=torch.ones(1), branch=torch.ones(1))
    dispatch.call("sum", "residual_add", x=torch.ones(1), branch=torch.ones(1))
    assert seen == ["steps.0.sum:residual_add"]


def trained() -> tuple[Classifier, AdamW]:
    trainer = Trainer(classifier(nf4=True), total_steps=None, micro_batch=2, learning_rate=1e-3)
    trainer.train_batch(batch())
    return trainer.classifier, trainer.optimiser


def test_an_optimiser_of_other_parameters_is_found() -> None:
    model, _ = trained()
    astray = AdamW({"score.bias": torch.nn.Parameter(torch.zeros(3, device=META))}, 0.0)
    astray.exp_avg, astray.exp_avg_sq = torch.zeros(3), torch.zeros(3)
    astray._rows, astray._elements = torch.zeros(3), torch.zeros(3)
    with pytest.raises(NotResident, match=r"^optimiser.parameters\['score.bias'\] is on meta"):
        require_residency(model, astray, CPU)


def test_a_process_without_memory_on_the_card_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_tensors", lambda *_: iter(()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for allocated in (4096, 0):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, held=allocated: held if device.index == 1 else 0)
        if allocated:
            require_residency(torch.nn.Module(), None, torch.device("cuda"))
        else:
            with pytest.raises(NotResident, match="holds no memory there"):
                require_residency(torch.nn.Module(), None, torch.device("cuda"))
