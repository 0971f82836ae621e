"""The hand-written training step against automatic differentiation on the same parameters; without a GPU by Triton's interpreter."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from blackswan.impl.classifier import Adaptation, Classifier, initial_trainable
from blackswan.impl.config import DecoderConfig, RopeScaling
from blackswan.impl.decoder import Layer, random_tensors
from blackswan.impl.fused import model as model_module
from blackswan.impl.fused.fitting import WIDEST_HEAD
from blackswan.impl.fused.layer import groups
from blackswan.impl.fused.packing import pack, sizes_of
from blackswan.impl.fused.side import SideStream, captured_stream, side_stream
from blackswan.impl.fused.step import FusedTrainer, why_not
from blackswan.impl.fused.weights import JoinedWeight
from blackswan.impl.kernels import attention
from blackswan.impl.projection import Projection
from blackswan.impl.trainer import Batch, Trainer

pytestmark = pytest.mark.usefixtures("few_tokens")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def classifier(
    family: str = "qwen2",
    targets: str = "q_v",
    pooling: str = "last",
    nf4: bool = False,
    layers: int = 1,
    kv_heads: int = 1,
    scaling: RopeScaling | None = None,
) -> Classifier:
    """What a layer computes is compared where there are several layers and key heads; one of each is enough for what a step does."""
    config = DecoderConfig(
        family=family, vocab=32, hidden=64, intermediate=128, layers=layers, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=16,
        eps=1e-6, theta=1e4, tied=True, max_positions=64, rope_scaling=scaling,
    )  # fmt: skip
    adaptation = Adaptation(3, 4, 8.0, targets, pooling, nf4)
    generator = torch.Generator().manual_seed(3)  # a place without a sample, whose logits are the bias, would count as correct

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()}

    base, trainable = moved(random_tensors(config, 1)), moved(initial_trainable(config, adaptation, 2))
    return Classifier(config, adaptation, base, trainable, dtype=torch.float32, device=DEVICE)


def batch(several: bool = False) -> Batch:
    """Three samples of unequal length, with padding before, between and after their tokens."""
    ids = torch.randint(0, 32, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], dtype=torch.bool)
    labels = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]) if several else torch.tensor([1, 0, 2])
    return Batch(ids.to(DEVICE), mask.to(DEVICE), labels.to(DEVICE))


def both(several: bool = False, micro: int = 5, **model: Any) -> tuple[Trainer, FusedTrainer]:
    weights = None if several else torch.tensor([0.5, 1.0, 1.5], device=DEVICE)
    settings: dict[str, Any] = {
        "total_steps": 4,
        "micro_batch": micro,
        "learning_rate": 1e-2,
        "weight_decay": 0.5,
        "multi_label": several,
        "warmup_fraction": 0.0,
    }
    settings["class_weights"] = weights
    return Trainer(classifier(**model), **settings), FusedTrainer(classifier(**model), longest=9, **settings)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


def require_alike(expected: Trainer, found: Trainer, moments: float) -> None:
    """The states, parameters to 1e-3 and moments to the given distance."""
    one, other = expected.state(), found.state()
    assert list(one) == list(other)
    for group, most in (("exp_avg", moments), ("exp_avg_sq", moments), ("trainable", 1e-3)):
        names = [name for name in one if name.startswith(f"{group}/")]
        assert apart(*(torch.cat([state[name].flatten() for name in names]) for state in (one, other))) < most
    assert torch.equal(one["step"], other["step"])
    assert torch.equal(one["learning_rates"], other["learning_rates"])


@pytest.mark.parametrize(
    "model",
    [
        {"family": "qwen2", "targets": "q_v", "pooling": "last", "nf4": True},
        {"family": "qwen3", "targets": "all", "pooling": "mean", "nf4": True},
        {"family": "llama", "targets": "all", "pooling": "first", "nf4": False},
        {"family": "llama", "targets": "all", "pooling": "last", "scaling": RopeScaling(8.0, 1.0, 4.0, 16)},
    ],
    ids=lambda model: "-".join(map(str, model.values())),
)
def test_loss_and_gradient_are_those_of_automatic_differentiation(model: dict[str, Any]) -> None:
    torch_trainer, fused = both(**model, layers=2, kv_heads=2)
    expected, found = torch_trainer.accumulate(batch()), fused.accumulate(batch())
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert (found.correct, found.total) == (expected.correct, expected.total)
    assert apart(torch_trainer.gradient_vector(), fused.gradient_vector()) < 1e-5
    assert fused.forward_only(batch()).loss == pytest.approx(expected.loss, rel=1e-5), "the classifier itself, on the joined weights"


def test_a_step_moves_parameters_and_moments_alike_in_uneven_micro_batches() -> None:
    torch_trainer, fused = both(micro=2, pooling="mean")
    for _ in range(2):
        expected, found = torch_trainer.train_batch(batch()), fused.train_batch(batch())
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert (found.correct, found.total) == (expected.correct, expected.total)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    require_alike(torch_trainer, fused, moments=1e-4)
    assert fused.optimiser.steps == 2


@pytest.mark.parametrize(("several", "layers", "max_norm"), [(False, 2, 1.0), (True, 1, 100.0)])
def test_a_step_of_one_micro_batch_is_that_of_the_trainer(several: bool, layers: int, max_norm: float) -> None:
    torch_trainer, fused = both(several=several, pooling="mean", nf4=True, layers=layers)
    torch_trainer.max_norm = fused.max_norm = max_norm
    given = batch(several=several)
    for _ in range(2):
        expected, found = torch_trainer.train_batch(given), fused.train_batch(given)
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)
        assert (found.correct, found.total) == (expected.correct, expected.total)
    require_alike(torch_trainer, fused, moments=1e-3)
    assert fused.optimiser.steps == 2


def test_a_step_of_one_micro_batch_clips_and_goes_on_from_a_state_like_one_of_several() -> None:
    parts, whole = both(micro=2)[0], both()[1]
    whole.max_norm = parts.max_norm = 1e-3
    parts.train_batch(batch())
    whole.train_batch(next(batch().split(2)))
    whole.load_state(parts.state())
    assert (whole.train_batch(batch()).gradient_norm or 0.0) > 1e-2, "a norm below the limit says nothing of clipping"
    parts.train_batch(batch())
    require_alike(parts, whole, moments=1e-4)


def test_the_classifier_goes_on_working_on_the_joined_weights_and_a_state_can_be_put_back() -> None:
    torch_trainer, fused = both(nf4=True)
    torch_trainer.train_batch(batch())
    fused.load_state(torch_trainer.state())  # before the first step joins anything
    state = fused.state()
    fused.train_batch(batch())
    moved = fused.optimiser.flat()
    fused.load_state(state)
    assert torch.equal(fused.optimiser.flat(), torch_trainer.optimiser.flat())
    assert not torch.equal(moved, fused.optimiser.flat())
    one, other = (trainer.forward_only(batch(), probabilities=True).probabilities for trainer in (torch_trainer, fused))
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)
    fused.train_batch(batch())
    assert torch.allclose(fused.optimiser.flat(), moved)
    torch_trainer.train_batch(batch())
    require_alike(torch_trainer, fused, moments=1e-3)


def test_packing_keeps_every_real_token_once_with_its_position() -> None:
    given = batch()
    sizes = sizes_of(given)
    packed = pack(given, 5, sizes.total)
    bounds = packed.bounds.tolist()
    assert len(packed.input_ids) % 16 == 0
    assert bounds[-2:] == [sizes.total, len(packed.input_ids)]
    for row in range(3):
        inside = slice(bounds[row], bounds[row + 1])
        assert torch.equal(packed.input_ids[inside], given.input_ids[row][given.mask[row]])
        assert packed.positions[inside].tolist() == list(range(bounds[row + 1] - bounds[row]))
    assert packed.real.tolist() == [1.0] * 3 + [0.0] * 2


@pytest.mark.parametrize("trainer", [0, 1], ids=["torch", "fused"])
@pytest.mark.parametrize(
    ("several", "change", "message"),
    [
        (False, {"input_ids": torch.full((3, 6), 32)}, "input_ids"),
        (False, {"input_ids": torch.zeros(3, 0, dtype=torch.int64), "mask": torch.zeros(3, 0, dtype=torch.bool)}, "mask"),
        (False, {"mask": torch.zeros(3, 6, dtype=torch.bool)}, "mask"),
        (False, {"mask": torch.ones(3, 5, dtype=torch.bool)}, "mask"),
        (False, {"labels": torch.full((3,), 3)}, "labels"),
        (False, {"labels": torch.zeros(3, 1, dtype=torch.int64)}, r"labels are torch.int64 \[3, 1\]; expected .* int64 \[3\]"),
        (True, {"labels": torch.zeros(3, 1)}, r"labels are torch.float32 \[3, 1\]; expected .* float32 \[3, 3\]"),
        (True, {"labels": torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, -0.5], [0.0, 0.0, 0.0]])}, r"\[1, 2\] is -0.5; expected 0 to 1"),
        (True, {"labels": torch.full((3, 3), torch.nan)}, r"\[0, 0\] is nan; expected 0 to 1"),
    ],
)
def test_bad_values_are_refused_and_change_nothing(several: bool, change: dict[str, Tensor], message: str, trainer: int) -> None:
    chosen = both(several=several)[trainer]
    before = chosen.optimiser.flat()
    given = {**vars(batch(several)), **{name: value.to(DEVICE) for name, value in change.items()}}
    with pytest.raises(ValueError, match=message):
        chosen.train_batch(Batch(**given))
    assert torch.equal(before, chosen.optimiser.flat())


@pytest.mark.parametrize("backend", [Trainer, FusedTrainer])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": 0.0}, "max_norm is 0.0: expected a positive number, or None"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
        ({"class_weights": torch.ones(2)}, r"class_weights has shape \[2\], expected one weight for each of the 3 classes"),
        ({"class_weights": torch.tensor([1.0, 0.0, 1.0])}, r"class_weights\[1\] is 0.0"),
        ({"class_weights": torch.tensor([1.0, 1.0, torch.nan])}, r"class_weights\[2\] is nan"),
    ],
)
def test_settings_that_no_step_can_have_are_refused_at_once(backend: type[Trainer], settings: dict[str, Any], message: str) -> None:
    longest = {"longest": 9} if backend is FusedTrainer else {}
    with pytest.raises(ValueError, match=message):
        backend(classifier(), total_steps=None, micro_batch=2, learning_rate=1e-2, **settings, **longest)


class Late(SideStream):
    """Does the work as late as its waits allow, so that what overwrites its input before shows."""

    def run(self, work: Callable[[], Any], *read: object) -> Callable[[], Any]:
        del read
        return cache(work)


@pytest.mark.parametrize(("nf4", "pooling"), [(True, "last"), (False, "mean")])
def test_work_beside_the_products_may_be_done_late(nf4: bool, pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "SideStream", Late)
    torch_trainer, fused = both(targets="all", layers=2, nf4=nf4, pooling=pooling)
    torch_trainer.accumulate(batch())
    fused.accumulate(batch())
    assert apart(torch_trainer.gradient_vector(), fused.gradient_vector()) < 1e-5


def test_float64_is_not_for_the_layers() -> None:
    assert "float64" in str(why_not(torch.float64, torch.device("cpu")))


def test_doubly_quantised_weights_are_not_joined() -> None:
    weight = Projection("p", torch.randn(32, 64), None, nf4=True)
    weight.quantized.double_quantize()
    with pytest.raises(ValueError, match=r"p: its absmax are quantised as well .* choose backend torch"):
        JoinedWeight([weight], 0, torch.float32)


def test_projections_that_cannot_be_joined_say_what_to_do() -> None:
    _, fused = both(family="qwen2")
    groups(cast(Layer, fused.classifier.model.layers[0]))[0][0].bias = None
    with pytest.raises(ValueError, match=r"have a bias and others none; .* choose backend torch"):
        fused.train_batch(batch())


def test_the_widest_head_is_that_of_the_kernel() -> None:
    assert WIDEST_HEAD == attention.WIDEST


def test_trainers_of_a_device_share_its_streams_each_of_which_has_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def stream(device: torch.device, priority: int = 0) -> object:
        made.append(f"{device} {priority}")
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    one, other = torch.device("cuda", 6), torch.device("cuda", 7)
    for device in (one, one, other):
        assert captured_stream(device) is not side_stream(device)
        SideStream(device)
    assert sorted(made) == ["cuda:6 -1", "cuda:6 0", "cuda:7 -1", "cuda:7 0"]
    captured_stream.cache_clear()
    side_stream.cache_clear()
