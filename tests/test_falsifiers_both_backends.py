"""What is claimed of either backend is asked of both where a GPU would run them; here one of them runs in Triton's interpreter."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from falsifiers_claims import CLAIMS
from torch import Tensor

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.subjects.doors.devices import Estimate, Usage, Workload
from blackswan.falsifiers.subjects.impl.trainer import Trainer
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.system import devices, footprint, warm_up
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import small
from blackswan.impl.fused.step import FusedTrainer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="pytest falsifiers --device cuda asks them there"),
    pytest.mark.usefixtures("few_tokens"),
]
BACKENDS = ("torch", "fused")


def trial_by(name: str, monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...] = BACKENDS) -> Trial:
    monkeypatch.setattr(Trainer, "backends", backends)
    monkeypatch.setattr(devices, "small", lambda *given, **named: replace(small(*given, **named), layers=2, batch=2, seq=4))
    return Trial(Attack(CLAIMS[name], Implementation("cpu"), "float32"), seed=1)


def names(found: list[Comparison]) -> list[str]:
    return [comparison.tensor for comparison in found]


def missed(found: Iterable[Comparison]) -> set[str]:
    return {comparison.tensor for comparison in found if not comparison.held}


def test_a_bad_value_stops_a_step_by_either_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(devices.non_finite_stops_the_step(trial_by("DEV-NAN-STOPS", monkeypatch)))
    assert not missed(found)
    fused = [comparison.tensor for comparison in found if "fused" in comparison.tensor]
    assert len(fused) == 7, "a step without a bad value, and two of each with two bad parameters and with a bad logit"


@pytest.mark.parametrize("guard", ["logits", "moves"])
def test_a_step_of_the_hand_written_layers_without_its_guard_is_found(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    move, whole = FusedTrainer._move, FusedTrainer._whole_step

    def of_loss_and_gradient(self: FusedTrainer, packed: Any) -> Any:
        """As if no logit were looked at."""
        numbers, logits = whole(self, packed)
        numbers[0] = torch.isfinite(numbers[1]) & torch.isfinite(numbers[3])
        return numbers, logits

    def whatever(self: FusedTrainer, gradient: Tensor, _: Tensor) -> None:
        move(self, gradient, torch.tensor(True))

    if guard == "logits":
        monkeypatch.setattr(FusedTrainer, "_whole_step", of_loss_and_gradient)
    else:
        monkeypatch.setattr(FusedTrainer, "_move", whatever)
    assert missed(devices.non_finite_stops_the_step(trial_by("DEV-NAN-STOPS", monkeypatch, ("fused",))))


class Told:
    """The door to memory where everything takes ten bytes, but for an estimate of one backend."""

    def __init__(self, wrong: str | None) -> None:
        self.wrong = wrong

    def estimate(self, work: Workload) -> Estimate:
        return Estimate({"activations": 10}, 12 if work.backend == self.wrong else 10, 10)

    def measure(self, work: Workload, steps: int) -> Usage:
        del work, steps
        return Usage(10, 10, 0)

    def saved(self, work: Workload) -> int:
        del work
        return 10


@pytest.mark.parametrize("wrong", [*BACKENDS, None])
def test_an_estimate_of_either_backend_that_is_off_is_found(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_by("DEV-ESTIMATE-MEASURED", monkeypatch)
    monkeypatch.setitem(vars(trial), "memory", Told(wrong))
    assert missed(footprint.estimate_equals_measure(trial)) == ({f"{wrong}: total"} if wrong else set())


def trial_in_processes(name: str, monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...], seed: int) -> Trial:
    """Processes of their own, which know nothing of a small GRAIN, and so small cases: a sample for each worker, in two steps."""
    monkeypatch.setattr(Trainer, "backends", backends)
    return Trial(Attack(CLAIMS[name], Implementation("cpu"), "float32"), seed)


def test_workers_train_alike_by_either_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial_in_processes("DP-TRAJECTORY", monkeypatch, BACKENDS, seed=29).run()
    assert not missed(found)
    by_torch, fused = ([name.removeprefix(backend) for name in names(found) if name.startswith(backend)] for backend in BACKENDS)
    assert by_torch == fused, "the same of each"


def test_a_bad_value_stops_workers_by_the_hand_written_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial_in_processes("DP-FAULT-STOPS", monkeypatch, ("fused",), seed=20).run()
    assert not missed(found)
    stopped = [name for name in names(found) if name.endswith("step of the stop")]
    assert [name.partition(",")[0] for name in stopped] == ["fused: rank 0", "fused: rank 1"] * 3, "by a gradient, a label, and what waits"


def test_the_hand_written_layers_make_steps_before_weights_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim watches operations by name, which those layers do not call for a step; so their steps are watched here."""
    steps: list[int] = []
    train = FusedTrainer.train_batch
    monkeypatch.setattr(FusedTrainer, "train_batch", lambda self, batch: steps.append(len(batch.labels)) or train(self, batch))
    monkeypatch.setattr(warm_up, "small", lambda *given, **named: replace(small(*given, **named), batch=2))
    found = list(warm_up.kernels_come_before_weights(trial_by("DEV-WARM-UP", monkeypatch, ("fused",))))
    assert not missed(found)
    for settings in ("{'multi_label': True}", "{'class_weights': 'balanced'}"):
        assert f"classifier (fused, {settings}): computed only after the weights came" in names(found)
    assert steps[:3] == [2, 3, 4], "two steps of the rehearsal, and the first on the weights"
