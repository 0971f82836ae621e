"""The kill matrix: mutants die by the claims that name them, and a claim or a mutant that proves nothing is reported."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS

from blackswan import contracts, reference
from blackswan.contracts.model import Claim, Examples, Tolerance
from blackswan.falsifiers import mutants
from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.mutants import MUTANTS, Mutant, honest, power, power_report
from blackswan.falsifiers.mutants.power import Cell, Task
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks import CHECKS
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.kinds import KINDS
from blackswan.falsifiers.numeric.precision import CUDA_ONLY
from blackswan.falsifiers.runner.engine import Options, cases, falsify, replay
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference import TABLE


def cells(claim: Claim, dtype: str, *names: str | None) -> list[Cell]:
    """The cells of a claim against some mutants, in this process, without those of honest ones."""
    return [cell for cell in power.attack(claim, dtype, names) if not cell.honest]


def test_a_claim_that_is_false_for_right_code_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = CLAIMS["OP-SOFTMAX"]
    found = list(power.attack(claim, "float32", [None, "softmax_unnormalised"]))
    assert [cell.mutant for cell in found if cell.honest and cell.state == "HELD"] == ["softmax_written_out", "softmax_by_logarithm"]
    assert power_report.faults([claim], ["softmax_unnormalised"], found) == []
    monkeypatch.setitem(honest.HONEST, "softmax_by_logarithm", ("softmax", lambda x: x.bfloat16().softmax(-1).to(x.dtype)))
    faults = power_report.faults([claim], ["softmax_unnormalised"], list(power.attack(claim, "float32", [None, "softmax_unnormalised"])))
    assert len(faults) == 1
    assert faults[0].startswith("OP-SOFTMAX in float32: FALSIFIED on softmax_by_logarithm, which is right")


def test_the_cases_are_those_of_the_falsifier() -> None:
    """Power attacks what `falsify` attacks, in its order."""
    for name in ("OP-RMSNORM", "LOSS-CE", "CLS-FORWARD"):
        claim, seen = CLAIMS[name], list[str]()

        class Listening(ReferenceSubject):
            def run(self, operation: str, inputs: Mapping[str, Any], scalars: Mapping[str, Any], dtype: str) -> dict[str, Any]:
                seen.append(Case(operation, dtype, {}, scalars, 0, "", inputs).digest)  # noqa: B023  # run within the loop
                return super().run(operation, inputs, scalars, dtype)

        verdict = falsify(claim, "float32", Listening(), Options(shrink=False))
        drawn = [replace(case, cotangents={}).digest for case in cases(claim, "float32", Options(shrink=False))]
        assert verdict.state is State.HELD
        assert seen == drawn


@pytest.mark.parametrize(
    ("claim", "mutant"), [("OP-POOL", "pool_last_column"), ("OP-ATTENTION", "swiglu_gelu"), ("LORA-RANK", "lora_merge_full_rank")]
)
def test_a_cell_is_the_verdict_of_the_falsifier(claim: str, mutant: str) -> None:
    found = cells(CLAIMS[claim], "float32", mutant)[0]
    verdict = falsify(CLAIMS[claim], "float32", mutants.subject(mutant), Options(shrink=False))
    assert found.state == verdict.state.value


def test_what_is_remembered_changes_no_verdict() -> None:
    """Expected answers and floors of one subject serve the next; a fresh attack gives the same power."""
    claim = CLAIMS["OP-SWIGLU"]
    together = cells(claim, "bfloat16", None, "swiglu_gelu", "swiglu_sigmoid_only")
    alone = [cells(claim, "bfloat16", name)[0] for name in (None, "swiglu_gelu", "swiglu_sigmoid_only")]
    assert [(cell.state, cell.power, cell.cases) for cell in together] == [(cell.state, cell.power, cell.cases) for cell in alone]


def test_the_power_of_a_cell_is_the_largest_of_its_cases() -> None:
    """A mutant that must be caught is attacked beyond its first kill."""
    claim, name = CLAIMS["LOSS-CE-BOUNDS"], "cross_entropy_sum"
    (cell,) = cells(claim, "float32", name)
    each = [replay(claim, case, mutants.subject(name)).tally.worst for case in cases(claim, "float32", Options(shrink=False))]
    headrooms = [worst.headroom for worst in each if worst is not None]
    assert cell.power == max(headrooms)
    assert cell.power > headrooms[cell.cases - 1] > 1


def test_each_view_of_a_case_has_its_own_floor() -> None:
    claim = CLAIMS["OP-SWIGLU"]
    attack = power.RememberingAttack(claim, ReferenceSubject(), "float32")
    case = next(cases(claim, "float32", Options(shrink=False)))
    expected = attack.expect(case)
    first = attack.floor(case, lambda inputs, table: reference.evaluate(case.operation, inputs, case.scalars, table), expected)
    second = attack.floor(
        case,
        lambda inputs, table: {"y": 8 * reference.evaluate(case.operation, inputs, case.scalars, table)["y"]},
        {"y": 8 * expected["y"]},
    )
    assert second["y"].max == 8 * first["y"].max > 0


def _equivalent(_: Any) -> Any:
    """SwiGLU in another order of products: correct."""
    return replace(TABLE["swiglu"], forward=lambda gate, up: up * gate / (1 + np.exp(-gate)))


def test_an_equivalent_mutant_survives_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MUTANTS, "swiglu_equivalent", Mutant("swiglu_equivalent", "swiglu", ("own",), "correct", _equivalent))
    claim = replace(CLAIMS["OP-SWIGLU"], must_catch=("swiglu_gelu", "swiglu_equivalent"))
    assert "swiglu_equivalent" in power.candidate_mutants(CLAIMS["OP-SWIGLU"])
    found = cells(claim, "float32", None, "swiglu_gelu", "swiglu_equivalent")
    faults = power_report.faults([claim], ["swiglu_gelu", "swiglu_equivalent"], found)
    assert len(faults) == 2
    assert faults[0].startswith("mutant swiglu_equivalent: survives; no claim of OP-SWIGLU")
    assert faults[1].startswith("OP-SWIGLU in float32: does not catch swiglu_equivalent")
    assert "SURVIVED" in power_report.kill_table(["swiglu_equivalent"], found)[0]


def test_a_mutant_that_no_claim_reaches_is_reported() -> None:
    (fault,) = power_report.faults([], ["swiglu_gelu"], [])
    assert fault == "mutant swiglu_gelu: survives; no claim reaches it: a claim on its operation is missing"


def _nothing(attack: Attack, case: Case) -> list[Comparison]:
    """A check that compares an answer with itself."""
    attack.answer(case)
    return [Comparison("y", True, 0.0, "nothing")]


def test_a_claim_that_cannot_fail_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "rows_form_a_simplex", _nothing)
    claim = CLAIMS["OP-SOFTMAX-SIMPLEX"]
    found = cells(claim, "float32", None, *power.candidate_mutants(claim))
    assert f"{claim.id}: kills no mutant, so that nothing shows it can fail; name one in must_catch" in power_report.faults(
        [claim], [], found
    )


def test_a_rule_that_never_reports_is_reported() -> None:
    """No example of a violation, and a text that is the mutant's own."""
    claim = CLAIMS["C-HP-001-POSITIVE"]
    assert claim.rule is not None
    silent = replace(claim, rule=replace(claim.rule, when="true", require="true", recommend={}), examples=Examples())
    found = cells(silent, "float32", None, *power.candidate_mutants(silent))
    assert [cell.mutant for cell in found if cell.killed] == ["rule_always_reports"]
    assert power_report.faults([silent], [], found) == [
        "C-HP-001-POSITIVE in float32: does not catch rule_never_reports, which it must (the rule is this mutant itself)"
    ]


def test_a_missing_must_catch_is_reported() -> None:
    claim = replace(CLAIMS["OP-ROPE-NORM"], must_catch=("rope_dropped",))
    found = cells(claim, "float32", None, "rope_interleaved_pairs", "rope_dropped")
    assert [cell.must_catch for cell in found] == [False, False, True]
    (fault,) = power_report.faults([claim], [], found[:1] + found[2:])[1:]
    assert fault.startswith("OP-ROPE-NORM in float32: does not catch rope_dropped, which it must")


def test_a_claim_that_fails_on_the_correct_subject_is_reported() -> None:
    claim = replace(CLAIMS["OP-SWIGLU"], tolerance=Tolerance("literal", value=1e-12, unit="absolute", source="too tight"))
    (cell,) = cells(claim, "float32", None)
    assert any("FALSIFIED on the correct subject" in fault for fault in power_report.faults([claim], [], [cell]))


def test_a_narrow_kill_is_reported() -> None:
    cell = Cell("A", "float32", "m", True, State.FALSIFIED.value, 3, 0.1, 2.9)
    assert power_report.faults([], [], [cell]) == [
        "A in float32: catches m too narrowly (largest error / tolerance: 2.9; at least 3 asked for)"
    ]
    assert power_report.faults([], [], [replace(cell, power=3.0)]) == []
    assert power_report.power([cell, replace(cell, mutant="n", power=7.0)]) == {("A", "float32"): (2.9, "m")}


@pytest.mark.parametrize(("value", "loose"), [(1e-15, False), (1e-13, True)])
def test_a_literal_tolerance_looser_than_ten_floors_is_reported(value: float, loose: bool) -> None:
    claim = CLAIMS["OPT-SCHEDULE"]
    assert claim.tolerance is not None
    (cell,) = cells(replace(claim, tolerance=replace(claim.tolerance, value=value)), "float32", None)
    assert any("literal tolerance" in fault for fault in power_report.faults([claim], [], [cell])) is loose


def test_a_mutant_hidden_by_rounding_is_due_in_float32_only() -> None:
    claim, name = CLAIMS["OP-RMSNORM"], "rms_norm_weight_rounded"
    assert MUTANTS[name].hidden_in == ("bfloat16",)
    assert cells(claim, "float32", name)[0].must_catch
    assert not cells(claim, "bfloat16", name)[0].must_catch


def test_every_mutant_is_named_by_a_claim() -> None:
    named = {name for claim in CLAIMS.values() for name in power.must_catch(claim)}
    assert set(contracts.load_mutants()) - named == set()


def test_every_claim_is_aimed_at() -> None:
    assert [claim.id for claim in CLAIMS.values() if not power.must_catch(claim)] == []


@cache
def _asked(claim: Claim) -> frozenset[str]:
    """The operations that the claim's falsifier asks a subject for, on its first case."""
    asked = set()

    class Listening(ReferenceSubject):
        def run(self, operation: str, *arguments: Any) -> dict[str, Any]:
            asked.add(operation)
            return super().run(operation, *arguments)

        def differentiate(self, operation: str, *arguments: Any) -> dict[str, Any]:
            asked.add(operation)
            return super().differentiate(operation, *arguments)

    dtype = claim.domain.dtype[0]
    case = next(cases(claim, dtype, Options(examples=1)))
    KINDS[claim.kind](Attack(claim, Listening(), dtype), case)
    return frozenset(asked)


def _generated(claim: Claim) -> bool:
    return claim.operation is not None and claim.domain.input == "generated"


@pytest.mark.parametrize("name", sorted({claim.check: claim.id for claim in CLAIMS.values() if claim.check and _generated(claim)}.values()))
def test_what_a_check_calls_is_known(name: str) -> None:
    claim = CLAIMS[name]
    assert _asked(claim) | {claim.operation} == power.CALLED_BY_CHECK.get(claim.check or "", frozenset()) | {claim.operation}


def test_tasks_leave_nothing_out() -> None:
    claims = list(CLAIMS.values())
    first = power.first_tasks(claims, False)
    possible = {(claim.id, dtype) for claim in claims for dtype in claim.domain.dtype if dtype not in CUDA_ONLY}
    assert {(task.claim.id, task.dtype) for task in first} == possible
    assert all(task.subjects[0] is None and set(power.must_catch(task.claim)) <= set(task.subjects) for task in first)
    further = power.further_tasks(claims, [])
    assert {name for task in further for name in task.subjects} == set(mutants.every())


def test_processes_give_the_cells_of_one() -> None:
    tasks = [Task(CLAIMS[name], "float32", (None, *CLAIMS[name].must_catch)) for name in ("OP-ROPE-NORM", "OP-SOFTMAX-SHIFT")]
    order: Callable[[Cell], tuple[str, str]] = lambda cell: (cell.claim, cell.mutant or "")  # noqa: E731  # a key, used twice
    one, two = (sorted((cell for group in power.run(tasks, count) for cell in group), key=order) for count in (1, 2))
    assert [replace(cell, seconds=0.0) for cell in one] == [replace(cell, seconds=0.0) for cell in two]


def test_the_command_writes_cells_and_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.jsonl"
    assert main(["power", "--claim", "OP-ROPE-NORM", "--processes", "1", "--output", str(path)]) == 0
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"rope_interleaved_pairs", None} <= {cell["mutant"] for cell in written}
    assert "rope_interleaved_pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "closing"),
    [
        ("--claim OP-ROPE-NORM", 0, "3 of 21 mutants die here: OP-ROPE-NORM catches what it must and can fail"),
        ("--mutant rope_interleaved_pairs --claim OP-ROPE", 0, "1 of 1 mutants dies here, by OP-ROPE"),
        ("--mutant rope_dropped --claim OP-ROPE-NORM", 1, "1 faults"),
    ],
)
def test_a_selected_run_ends_with_what_it_showed(arguments: str, status: int, closing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", *arguments.split(), "--processes", "1"]) == status
    found = capsys.readouterr().out
    assert found.splitlines()[-1].partition(" s: ")[2] == closing
    assert ("mutant rope_dropped: survives; no claim of OP-ROPE-NORM" in found) == bool(status)


def test_a_whole_run_ends_with_every_mutant_and_every_claim() -> None:
    killed = Cell("A", "float32", "m", True, State.FALSIFIED.value, 3, 0.1, 9.0)
    assert power_report.closing(["m"], [killed], False, False) == "every mutant dies, every claim can fail"
    two = [killed, replace(killed, claim="B", mutant="n"), replace(killed, mutant="o", state=State.HELD.value)]
    words = "2 of 3 mutants die here: A, B catch what they must and can fail"
    assert power_report.closing(["m", "n", "o"], two, True, False) == words


def test_a_mutant_that_no_chosen_claim_reaches_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cells.jsonl"
    chosen = ["--claim", "OP-ROPE-NORM", "--mutant", "rope_inverse", "--mutant", "rms_norm_eps_hard_coded"]
    assert main(["power", *chosen, "--output", str(output)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("falsifiers power: --mutant rms_norm_eps_hard_coded: not reached by OP-ROPE-NORM; claims that reach it")
    assert "OP-RMSNORM" in found.err
    assert found.err.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--claim", "OP-ROP"], "did you mean 'OP-ROPE'?"), (["--mutant", "rope_invers"], "did you mean 'rope_inverse'?")],
)
def test_an_unknown_name_is_a_usage_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_two_threads_leave_replaced_is_put_back() -> None:
    """As where each of them replaces a method for a moment, and the first one ends first."""
    before = torch.Tensor.cumsum
    with power._put_back():
        first, second = (mock.patch.object(torch.Tensor, "cumsum", replaced) for replaced in (torch.Tensor.cumprod, torch.Tensor.cummax))
        for step in (first.start, second.start, first.stop, second.stop):
            step()
        assert torch.Tensor.cumsum is not before
    assert torch.Tensor.cumsum is before
    assert "cumsum" not in vars(torch.Tensor)
