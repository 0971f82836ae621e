"""Steps of Adam: where rounding alone gives a moment its sign, the parameter is compared with nothing, and everything around it is."""

from collections.abc import Mapping

import numpy as np
import pytest
from falsifiers_claims import claim

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks import models
from blackswan.falsifiers.numeric.comparison import Comparison, Errors
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.numeric.sign_ambiguity import NOISES, mask_ambiguous, moved, reach, sign_ambiguity
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference.table import Array

RATE, NOISE = 1e-3, 1e-4
ONE_STEP = {"steps": 1, "learning_rate": RATE}
STEPS = ("train_steps", "multi_label_steps", "pretrain_steps")
MOMENTS = np.array([[1.0, -1.0, 0.2 * NOISE], [-1.0, 1.0, 2 * NOISES * NOISE]])
EXPECTED = {"trainable/w": 1 - RATE * np.sign(MOMENTS), "exp_avg/w": MOMENTS}
START = np.array([0.5, -0.25])
OPEN_EVERYWHERE = {**EXPECTED, "exp_avg/w": MOMENTS * 1e-9}


def attack_on(operation: str) -> Attack:
    return Attack(claim(operation, domain_changes={"sizes": {}, "scalars": {}}), ReferenceSubject(), "float32")


def noise(parameters: float = 1e-6) -> dict[str, Errors]:
    return {"trainable/w": Errors.flat(parameters), "exp_avg/w": Errors.flat(NOISE)}


def judged(expected: Mapping[str, Array], changes: Mapping[tuple[int, int], float]) -> Comparison:
    answer = {name: value.astype(np.float32) for name, value in expected.items()}
    for at, value in changes.items():
        answer["trainable/w"][at] = value
    dtypes = {name: np.dtype(np.float32) for name in expected}
    found = attack_on("train_steps").judge(expected, answer, noise, dtypes, reach(signatures()["train_steps"], ONE_STEP))
    return next(comparison for comparison in found if comparison.tensor == "trainable/w")


@pytest.mark.parametrize("operation", STEPS)
def test_every_operation_that_steps_says_what_moves_its_parameters(operation: str) -> None:
    names = ["losses", "trainable/a.weight", "exp_avg/a.weight", "exp_avg_sq/a.weight", "trainable/b.weight"]
    assert moved(signatures()[operation], names) == {"trainable/a.weight": "exp_avg/a.weight"}


def test_a_moment_within_its_noise_leaves_its_parameter_open() -> None:
    found = sign_ambiguity(signatures()["train_steps"], EXPECTED, noise())
    assert list(found) == ["trainable/w"]
    np.testing.assert_array_equal(found["trainable/w"], [[False, False, True], [False, False, False]])
    zero = {"trainable/w": np.ones(3), "exp_avg/w": np.array([0.0, -0.0, 0.2 * NOISE])}
    np.testing.assert_array_equal(sign_ambiguity(signatures()["train_steps"], zero, noise())["trainable/w"], [False, False, True])
    silent = {name: Errors.flat(0.0) for name in EXPECTED}
    assert not sign_ambiguity(signatures()["train_steps"], EXPECTED, silent)["trainable/w"].any()


def test_the_reach_of_some_steps() -> None:
    train, linear = signatures()["train_steps"], signatures()["linear"]
    assert 2 * RATE < reach(train, ONE_STEP) < 2.1 * RATE
    assert reach(train, ONE_STEP | {"steps": 3}) == pytest.approx(reach(train, ONE_STEP) * (1 + 2 * 10**0.5), rel=1e-6)
    assert reach(linear, {}) == 0.0


@pytest.mark.parametrize("gradients", [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1e-9, -1e-9, 5.0], [-3.0, 1e-4, 2.0]])
def test_adam_keeps_within_its_reach(gradients: list[float]) -> None:
    first = second = moved_by = 0.0
    for step, gradient in enumerate(gradients, start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        moved_by += RATE * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)) ** 0.5 + 1e-8)
        assert abs(moved_by) <= reach(signatures()["train_steps"], {"steps": step, "learning_rate": RATE}) / 2


def test_without_reach_nothing_is_settled() -> None:
    actual = np.array([1.0, np.nan])
    np.testing.assert_array_equal(mask_ambiguous(np.array([1.5, 1.5]), actual, np.array([True, True]), 0.0), [1.5, 1.5])
    np.testing.assert_array_equal(mask_ambiguous(np.array([1.5, 1.5]), actual, np.array([True, True]), 0.6), [1.0, 1.5])


def test_the_other_sign_is_held_where_it_is_open_and_nowhere_else() -> None:
    assert judged(EXPECTED, {}).held
    assert judged(EXPECTED, {(0, 2): 1 + RATE}).held
    for at in ((0, 0), (1, 2)):
        assert not judged(EXPECTED, {at: 1 + RATE * np.sign(MOMENTS[at])}).held, at
        assert not judged(EXPECTED, {(0, 2): 1 + RATE, at: EXPECTED["trainable/w"][at] + RATE / 100}).held, at


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6, 1 + 2 * RATE])
def test_what_no_step_reaches_is_wrong_where_it_is_open_too(value: float) -> None:
    assert not judged(EXPECTED, {(0, 2): value}).held
    assert not judged(OPEN_EVERYWHERE, {(0, 0): value}).held


def test_a_tensor_that_is_open_everywhere_is_rejected() -> None:
    assert judged(OPEN_EVERYWHERE, {}).rejected
    assert judged(OPEN_EVERYWHERE, {(0, 0): 1 + RATE}).rejected


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


def moves(
    moved: Array,
    few: dict[str, Errors],
    many: dict[str, Errors],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str = "float32",
    extra: Mapping[str, Array] | None = None,
) -> Comparison:
    """What CLS-TRAINABLE-MOVES says of a tensor that the reference moves by the rate, by floors of few replays and of many."""
    attack = attack_on("train_steps")
    names, moment = ("trainable/w", "exp_avg/w"), np.full(2, 0.1)
    monkeypatch.setattr(models, "trainable_names", lambda _: ["w"])
    monkeypatch.setattr(attack, "expect", lambda _: dict(zip(names, (START + RATE, moment), strict=True)))
    answer = dict(zip(names, ((START[: moved.shape[-1]] + moved).astype(dtype), moment), strict=True)) | dict(extra or {})
    monkeypatch.setattr(attack, "answer", lambda _: answer)
    monkeypatch.setattr(attack, "floor", lambda *_: many if attack.thorough else few)
    case = Case("train_steps", "float32", {}, ONE_STEP, 0, "normal", {"parameters/w": START})
    (found,) = models.every_trainable_tensor_moves(attack, case)
    assert not attack.thorough
    return found


@pytest.mark.parametrize(
    ("moved", "few", "many", "held", "rejected"),
    [
        (1.0, 0.01, 1.0, True, False),
        (0.4, 0.01, 0.01, False, False),
        (0.4, 0.01, 0.24, False, False),
        (0.4, 0.01, 0.26, True, True),  # noise that many replays show
        (0.4, 1.0, 0.01, True, True),
        (2.1, 0.01, 1.0, False, False),  # beyond reach
        (3.0, 1.0, 1.0, False, False),
        (0.0, 0.01, 1.0, False, False),
    ],
)
def test_how_far_a_tensor_moves_is_not_asked_where_noise_may_halve_it(
    moved: float, few: float, many: float, held: bool, rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in learning rates; the moment is none of the noise."""
    found = moves(np.full(2, moved * RATE), noise(few * RATE), noise(many * RATE), monkeypatch)
    assert (found.held, found.rejected) == (held, rejected)


def test_a_moment_that_many_replays_drown_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = noise(0.01 * RATE), noise(0.01 * RATE) | {"exp_avg/w": Errors.flat(0.02)}
    assert not moves(np.full(2, 0.4 * RATE), few, many, monkeypatch).held
    assert moves(np.full(2, 0.4 * RATE), many, many, monkeypatch).rejected
    assert not moves(np.full(2, 3 * RATE), many, many, monkeypatch).held


def test_an_element_that_noise_moves_leaves_the_others_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    small = noise(0.01 * RATE)
    monkeypatch.setattr(models, "sign_ambiguity", lambda *_: {"trainable/w": np.array([True, False])})
    for first in (-1.0, 0.0, 2.0):
        assert moves(np.array([first, 1.0]) * RATE, small, small, monkeypatch).headroom == pytest.approx(0.5, rel=1e-3)
        assert not moves(np.array([first, 0.0]) * RATE, small, small, monkeypatch).held
    assert not moves(np.array([3.0, 1.0]) * RATE, small, small, monkeypatch).held
    monkeypatch.setattr(models, "sign_ambiguity", lambda *_: {"trainable/w": np.array([True, True])})
    assert moves(np.array([-1.0, 0.0]) * RATE, small, small, monkeypatch).rejected
    assert not moves(np.array([3.0, 1.0]) * RATE, small, small, monkeypatch).held


def test_a_tensor_of_another_shape_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not moves(np.full(1, RATE), noise(0.0), noise(0.0), monkeypatch).held
    assert not moves(np.full((1, 2), RATE), noise(0.0), noise(0.0), monkeypatch).held


def test_nothing_else_may_be_trained_nor_in_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    none = noise(0.0)
    assert moves(np.full(2, RATE), none, none, monkeypatch).held
    assert moves(np.full(2, RATE), none, none, monkeypatch, extra={"frozen/base": START}).held
    assert not moves(np.full(2, RATE), none, none, monkeypatch, extra={"trainable/base": START}).held
    assert not moves(np.full(2, RATE), none, none, monkeypatch, dtype="float64").held
