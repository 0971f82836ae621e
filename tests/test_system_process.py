"""A claim's check has to leave its process as it was: a verdict says what is otherwise, and it is put back, after an error too."""

import os
from contextlib import ExitStack
from importlib import import_module
from multiprocessing import Pipe
from unittest import mock

import pytest
import torch
from falsifiers_claims import CLAIMS

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.subjects.impl import files
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.process import SWITCHES, Process
from blackswan.falsifiers.system import trial
from blackswan.impl import validation


@pytest.fixture
def asked() -> trial.Trial:
    return trial.Trial(Attack(CLAIMS["DEV-TORCH-NAMES"], Implementation("cpu"), "float32"), seed=0)


@pytest.mark.parametrize("on", [True, False])
def test_to_turn_narrow_sums_on_is_a_change(on: bool) -> None:
    products = torch.backends.cuda.matmul
    usual, products.allow_bf16_reduced_precision_reduction = products.allow_bf16_reduced_precision_reduction, not on
    try:
        process = Process()
        products.allow_bf16_reduced_precision_reduction = on
        assert bool(process.changes()) is on
        assert not products.allow_bf16_reduced_precision_reduction
    finally:
        products.allow_bf16_reduced_precision_reduction = usual


def test_what_a_program_switches_by_a_name_of_its_own_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(hasattr(import_module(module), name) for module, names in SWITCHES.items() for name in names)
    monkeypatch.setitem(SWITCHES, "blackswan.impl.validation", ("_enabled", "renamed"))
    process = Process()
    with validation.unchecked():
        assert [each.partition(":")[0] for each in process.changes()] == ["blackswan.impl.validation._enabled"]
    assert process.changes() == []


def careless(ends_with: Exception | None) -> object:
    def check(_: trial.Trial) -> list[object]:
        validation._enabled, os.environ["LEFT_BY_A_CHECK"] = False, "1"
        if ends_with:
            raise ends_with
        return []

    return lambda _: check


def test_what_is_left_is_said(asked: trial.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "check_of", careless(None))
    (found,) = asked.run()
    assert not found.held
    assert "validation._enabled" in str(found)
    assert "LEFT_BY_A_CHECK" in str(found)
    assert validation._enabled
    assert "LEFT_BY_A_CHECK" not in os.environ


def test_what_is_left_by_an_error_is_put_back(asked: trial.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "check_of", careless(SubjectError("no answer")))
    with pytest.raises(SubjectError, match="no answer"):
        asked.run()
    assert validation._enabled
    assert "LEFT_BY_A_CHECK" not in os.environ


def test_a_door_that_no_longer_fits_is_no_bug_of_the_subject() -> None:
    """A door that replaces a name which the subject does not have any more ends the attack, and falsifies nothing."""
    for patch in (mock.patch.object(trial, "GRAIN", 4), mock.patch(f"{trial.__name__}.gone.GRAIN", 4)):
        with pytest.raises(AttributeError) as raised, ExitStack() as patched:  # as doors do that replace several names
            patched.enter_context(patch)
        with pytest.raises(RuntimeError, match=r"test_system_process\.py:\d+ replaces it by name"):
            trial._require_fit(raised.value)
    trial._require_fit(AttributeError("of the subject's own"))
    with pytest.raises(AttributeError) as raised:  # which a door lets come out of a subject's function
        mock.Mock(side_effect=AttributeError)()
    trial._require_fit(raised.value)


def test_a_child_without_memory_for_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on as a second copy of this process otherwise, within its limit of memory."""
    here, there = Pipe(duplex=False)
    monkeypatch.setattr(files, "Pipe", lambda **_: (here, mock.Mock(wraps=there, send=mock.Mock(side_effect=MemoryError))))
    with pytest.raises(RuntimeError, match="without an answer"):
        files._within(2**28, lambda: None)


def test_a_child_that_is_interrupted_has_not_answered() -> None:
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        files._within(2**28, mock.Mock(side_effect=KeyboardInterrupt))
