"""Steps of Adam: where rounding alone gives a moment its sign, the parameter is compared with nothing, and everything around it is."""

from collections.abc import Mapping

import numpy as np
import pytest
from falsifiers_claims import claim

from falsifiers.attack import Attack
from falsifiers.case import Case
from falsifiers.comparison import Comparison, Errors
from falsifiers.precision import signatures
from falsifiers.subjects.reference import ReferenceSubject
from falsifiers.undetermined import NOISES, moved, undetermined
from reference.table import Array

RATE, NOISE = 1e-3, 1e-4
STEPS = ("train_steps", "multi_label_steps", "pretrain_steps")
MOMENTS = np.array([[1.0, -1.0, 0.2 * NOISE], [-1.0, 1.0, 2 * NOISES * NOISE]])
EXPECTED = {"trainable/w": 1 - RATE * np.sign(MOMENTS), "exp_avg/w": MOMENTS}


def attack_on(operation: str) -> Attack:
    return Attack(claim(operation, domain_changes={"sizes": {}, "scalars": {}}), ReferenceSubject(), "float32")


def noise(parameters: float = 1e-6) -> dict[str, Errors]:
    return {"trainable/w": Errors.flat(parameters), "exp_avg/w": Errors.flat(NOISE)}


def judged(expected: Mapping[str, Array], changes: Mapping[tuple[int, int], float]) -> Comparison:
    answer = {name: value.astype(np.float32) for name, value in expected.items()}
    for at, value in changes.items():
        answer["trainable/w"][at] = value
    found = attack_on("train_steps").judge(expected, answer, noise, {name: np.dtype(np.float32) for name in expected})
    return next(comparison for comparison in found if comparison.tensor == "trainable/w")


@pytest.mark.parametrize("operation", STEPS)
def test_every_operation_that_steps_says_what_moves_its_parameters(operation: str) -> None:
    names = ["losses", "trainable/a.weight", "exp_avg/a.weight", "exp_avg_sq/a.weight", "trainable/b.weight"]
    assert moved(signatures()[operation], names) == {"trainable/a.weight": "exp_avg/a.weight"}


def test_a_moment_within_its_noise_leaves_its_parameter_open() -> None:
    found = undetermined(signatures()["train_steps"], EXPECTED, noise())
    assert list(found) == ["trainable/w"]
    np.testing.assert_array_equal(found["trainable/w"], [[False, False, True], [False, False, False]])


def test_a_moment_that_is_zero_without_noise_leaves_nothing_open() -> None:
    expected = {"trainable/w": np.ones(3), "exp_avg/w": np.zeros(3)}
    found = undetermined(signatures()["train_steps"], expected, {name: Errors.flat(0.0) for name in expected})
    assert not found["trainable/w"].any()


def test_the_other_sign_is_held_where_it_is_open_and_nowhere_else() -> None:
    assert judged(EXPECTED, {}).held
    assert judged(EXPECTED, {(0, 2): 1 + RATE}).held
    for at in ((0, 0), (1, 2)):
        assert not judged(EXPECTED, {at: 1 + RATE * np.sign(MOMENTS[at])}).held, at
        assert not judged(EXPECTED, {(0, 2): 1 + RATE, at: EXPECTED["trainable/w"][at] + RATE / 100}).held, at


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_number_is_wrong_where_it_is_open_too(value: float) -> None:
    assert not judged(EXPECTED, {(0, 2): value}).held


def test_a_tensor_that_is_open_everywhere_is_rejected() -> None:
    found = judged({**EXPECTED, "exp_avg/w": MOMENTS * 1e-9}, {})
    assert found.rejected


def test_a_replay_with_the_other_sign_makes_no_noise_for_the_elements_around_it() -> None:
    attack = attack_on("train_steps")
    shaken = {"trainable/w": EXPECTED["trainable/w"] + 1e-6, "exp_avg/w": MOMENTS + NOISE}
    shaken["trainable/w"][0, 2] = 1 + RATE
    case = Case("train_steps", "float32", {}, {}, 0, "normal", {})
    found = attack.floor(case, lambda *_: shaken, EXPECTED)
    assert found["exp_avg/w"].max == pytest.approx(NOISE)
    assert found["trainable/w"].max == pytest.approx(1e-6)
    alone = attack.floor(case, lambda *_: {"trainable/w": shaken["trainable/w"]}, {"trainable/w": EXPECTED["trainable/w"]})
    assert alone["trainable/w"].max == pytest.approx(2 * RATE)
