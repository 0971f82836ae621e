"""Recording and replacing operations, what a training step holds, what operations refuse, and where a bad value came from."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blackswan.impl import dispatch, residency, validation
from blackswan.impl.classifier import Adaptation, Classifier, initial_trainable
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.dispatch import replaced
from blackswan.impl.nonfinite import origin
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.optimiser import AdamW
from blackswan.impl.residency import NotResident, require_residency
from blackswan.impl.trainer import HELD, Batch, Trainer

CONFIG = DecoderConfig("qwen3", 50, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, True, 128)
BATCH = Batch(
    torch.tensor([[3, 7, 7, 1], [9, 0, 0, 0], [4, 4, 2, 0], [8, 1, 5, 6], [2, 2, 0, 0]]),
    torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
    torch.tensor([0, 2, 1, 1, 2]),
)


def classifier(dtype: torch.dtype = torch.float64, nf4: bool = False, targets: str = "q_v") -> Classifier:
    adaptation = Adaptation(classes=3, rank=2, alpha=4.0, targets=targets, nf4=nf4)
    trainable = initial_trainable(CONFIG, adaptation, 1)
    generator = torch.Generator().manual_seed(2)
    trainable = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in trainable.items()}
    return Classifier(CONFIG, adaptation, random_tensors(CONFIG, 0), trainable, dtype=dtype)


def trainer(model: Classifier, micro: int = 2, **settings: float) -> Trainer:
    return Trainer(model, total_steps=4, micro_batch=micro, learning_rate=1e-2, warmup_fraction=0.0, schedule="constant", **settings)


def samples(count: int) -> Batch:
    """So many samples, those of `BATCH` over and over."""
    rows = torch.arange(count) % len(BATCH.labels)
    return Batch(BATCH.input_ids[rows], BATCH.mask[rows], BATCH.labels[rows])


def state(model: Classifier) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_recording_changes_no_result_and_survives_the_update() -> None:
    plain, recorded = classifier(), classifier()
    expected = trainer(plain).train_batch(BATCH)
    before = state(recorded)
    with dispatch.recording() as calls:
        assert trainer(recorded).train_batch(BATCH).loss == expected.loss
    for name, value in state(recorded).items():  # autograd adds the shares of a value in another order
        torch.testing.assert_close(value, state(plain)[name], rtol=1e-9, atol=1e-12)
    seen = next(call for call in calls if call.path == "steps.0.micro.0.score").inputs["weight"]
    assert torch.equal(seen, before["score.weight"])
    assert not torch.equal(recorded.score.weight, before["score.weight"])


def test_a_replacement_reaches_the_model_and_ends_with_the_block() -> None:
    model = classifier()
    honest = model(BATCH.input_ids, BATCH.mask)
    with dispatch.replaced({"rms_norm": lambda x, weight, **_: x * weight}):
        assert not torch.allclose(model(BATCH.input_ids, BATCH.mask), honest)
    assert torch.equal(model(BATCH.input_ids, BATCH.mask), honest)
    with pytest.raises(KeyError, match="no operation is named 'rmsnorm'"), dispatch.replaced({"rmsnorm": lambda: None}):
        pass


@pytest.mark.parametrize("before", [1, HELD])
def test_a_refused_batch_keeps_what_is_accumulated(before: int) -> None:
    used = trainer(classifier(), micro=1)
    used.accumulate(samples(before))
    vector = used.gradient_vector()
    bad = samples(3)
    bad.labels[2] = 99
    with pytest.raises(ValueError, match="is 99, but the classes"):
        used.accumulate(bad)
    assert used.accumulated == before
    assert torch.equal(used.gradient_vector(), vector)


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    with dispatch.replaced({"pool": lambda x, **_: x.detach()[:, 0]}), pytest.raises(RuntimeError, match=r"lora_A\.weight has no gradient"):
        trainer(classifier()).train_batch(BATCH)


def test_the_schedule_ends() -> None:
    steps = trainer(classifier())
    for _ in range(4):
        steps.train_batch(BATCH)
    with pytest.raises(IndexError, match="ends after 4 steps"):
        steps.train_batch(BATCH)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("weighted_cross_entropy", {"logits": ONES, "labels": torch.tensor([0])}, "one label for each of the 2"),
        (
            "weighted_cross_entropy",
            {"logits": ONES, "labels": torch.tensor([0, 1]), "class_weights": ONES[0] - 1},
            r"class_weights\[0\] is 0",
        ),
        ("bce_with_logits", {"logits": ONES * math.inf, "targets": ONES}, r"logits\[0, 0\] is inf"),
        ("bce_with_logits", {"logits": ONES, "targets": ONES * math.nan}, r"targets\[0, 0\] is nan; expected 0 to 1"),
        ("pool", {"x": ONES[None], "mask": torch.ones(1, 2, dtype=torch.bool), "mode": "max"}, "'max': expected one of 'mean'"),
        ("embedding", {"input_ids": torch.tensor([[0, 2]]), "weight": ONES}, r"input_ids\[0, 1\] is 2"),
        ("nf4_quantize", {"weight": ONES, "block_size": 48}, "NF4 block size 48: expected one of 32, 64"),
        ("average_gradients", {"gradients": ONES, "counts": torch.tensor([1, 0])}, r"counts\[1\] is 0"),
        ("learning_rate_schedule", {"total_steps": 2, "peak": 1.0, "warmup_fraction": 0.0, "kind": "step"}, "'step': expected one of"),
    ],
)
def test_bad_values_are_named(operation: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPERATIONS[operation](**arguments)


def test_checks_can_be_left_to_a_caller_that_made_them() -> None:
    logits, labels = torch.tensor([[1.0, math.nan]]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"logits\[0, 1\] is nan"):
        OPERATIONS["weighted_cross_entropy"](logits, labels)
    with validation.unchecked():
        assert math.isnan(OPERATIONS["weighted_cross_entropy"](logits, labels))


# Where a value that is not finite came from, and whether a model is in its place


def spoiled(operation: str, nth: int, value: float) -> dict[str, Callable[..., Any]]:
    """The operation with a bad value in the output of its nth call."""
    calls = iter(range(1000))

    def wrong(**arguments: Any) -> Tensor:
        y: Tensor = OPERATIONS[operation](**arguments)
        return torch.where(torch.arange(y.numel()).view(y.shape) == 3, value, y) if next(calls) == nth else y

    return {operation: wrong}


def test_a_bad_input_is_told_from_a_bad_call() -> None:
    assert origin(classifier(), BATCH, torch.tensor([1.0, math.nan, 1.0])) == (
        "loss (weighted_cross_entropy): its input class_weights has 1 NaN of 3"
    )


def test_a_bad_scale_of_nf4_is_named() -> None:
    model, name = classifier(nf4=True), "model.layers.1.mlp.up_proj.quantized.absmax"
    model.get_buffer(name)[2] = math.nan
    assert (origin(model, BATCH) or "").startswith(f"buffer {name}: 1 NaN")


def test_it_works_where_gradients_are_off_and_inside_a_recording() -> None:
    with torch.no_grad(), dispatch.recording() as calls, replaced(spoiled("pool", 0, math.nan)):
        assert (origin(classifier(), BATCH) or "").startswith("pool (pool): 1 NaN of 160")
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


def test_an_optimiser_of_other_parameters_is_found() -> None:
    astray = AdamW({"score.bias": torch.nn.Parameter(torch.zeros(3, device="meta"))}, 0.0)
    astray.exp_avg, astray.exp_avg_sq = torch.zeros(3), torch.zeros(3)
    astray._rows, astray._elements = torch.zeros(3), torch.zeros(3)
    with pytest.raises(NotResident, match=r"^optimiser.parameters\['score.bias'\] is on meta"):
        require_residency(classifier(), astray, torch.device("cpu"))


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


def test_the_binary_cross_entropy_keeps_small_terms_in_float64() -> None:
    """Beside a logit of 25 the term log(1 + e^−25) is 1.4e-11, which float64 holds and the runs' dtypes do not."""
    logits = torch.tensor([[25.0]], dtype=torch.float64, requires_grad=True)
    loss = OPERATIONS["bce_with_logits"](logits, torch.zeros(1, 1, dtype=torch.float64))
    loss.backward()
    assert loss.item() - 25.0 == pytest.approx(math.log1p(math.exp(-25.0)), rel=1e-3)
    assert 1.0 - logits.grad.item() == pytest.approx(1 / (1 + math.exp(25.0)), rel=1e-3)
