"""Changes drawn at random and patches: a wrong one is found by the claim that executes it, an equal one survives, and all else stays."""

import json
import sys
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attackers import chance, changes, near, places, seen, shared
from benchmarks.attackers.round import FOUND, MISSED, Bug
from blackswan import contracts
from blackswan.falsifiers.runner.campaign import Selection, targets
from blackswan.impl.operations import optimisation


def test_a_claim_is_asked_of_the_lines_that_it_executes(tmp_path: Path) -> None:
    module = "blackswan.impl.operations.optimisation"
    own = {change.what: change for change in changes.every() if change.name.startswith(f"{module}:")}
    wrong, equal = own["another operator: max_norm / norm"], own["another comparison: max_norm > 0"]
    elsewhere = next(change for change in own.values() if ":learning_rate_schedule#" in change.name)
    (target,) = targets(contracts.load(), Selection(claims=["OPT-CLIP"], dtypes=["float32"]), "cpu")
    before = optimisation.clip_by_global_norm.__code__
    made = chance.trace(target, tmp_path)
    assert chance.trace(target, tmp_path) == made  # as it is kept
    found = chance.attack([wrong, equal, elsewhere], [(1.0, target, frozenset(made["lines"]))])
    assert [(one["outcome"], one["asked"]) for one in found] == [(chance.KILLED, 1), (chance.SURVIVED, 1), (chance.UNSEEN, 0)]
    assert found[0]["by"] == "OPT-CLIP float32"
    assert optimisation.clip_by_global_norm.__code__ is before


def test_a_changed_function_keeps_what_it_gave() -> None:
    own = {change.what: change for change in changes.every() if ":clip_by_global_norm#" in change.name}

    def norms() -> list[float]:
        return [float(optimisation.clip_by_global_norm(torch.full((1, 2), value), 1.0)[1]) for value in (3.0, 5.0, 3.0)]

    right = norms()
    assert right[0] != right[1]
    for what, expected in (("kept by its arguments", right), ("kept for every gradients", 3 * right[:1])):
        with changes.applied(own[f"{what}: def clip_by_global_norm"].name):
            assert norms() == expected
    assert norms() == right


def test_a_changed_function_shares_memory_with_its_caller() -> None:
    own = {change.what: change for change in changes.every() if ":clip_by_global_norm#" in change.name}

    def clipped(value: float) -> list[torch.Tensor]:
        given = torch.full((1, 2), value, requires_grad=True)
        return [given, optimisation.clip_by_global_norm(given, 1.0)[0]]

    def first(*tensors: torch.Tensor) -> list[float]:
        return [float(tensor.detach().flatten()[0]) for tensor in tensors]

    (given, one), (_, other) = clipped(0.5), clipped(0.25)
    assert first(given, one, other) == [0.5, 0.5, 0.25]
    with changes.applied(own["gives the same memory again: def clip_by_global_norm"].name):
        (_, one), (_, other) = clipped(0.5), clipped(0.25)
        assert first(one, other) == [0.25, 0.25]
        assert one.grad_fn is not None
        assert one is not other
    with changes.applied(own["writes over gradients: def clip_by_global_norm"].name):
        assert first(*clipped(0.5)) == [1.5, 0.5]


def test_memory_is_shared_of_collections_too() -> None:
    shared.forget()
    one, other = ({"a": [torch.tensor(float(value))]} for value in (1, 2))
    kept = [shared.given_again(lambda value: value, (value,), "f") for value in (one, other)]
    assert kept[0] is kept[1]
    assert kept[0]["a"][0] == 2
    assert one["a"][0] == 1
    shared.written_over(lambda _: None, (one,), one)
    assert one == {}
    shared.written_over(lambda value: value["a"], (other,), other["a"])
    assert len(other["a"]) == 1, "what is given is no memory that is free"
    shared.forget()


def test_it_is_seen_what_a_claim_gives_to_a_function() -> None:
    (target,) = targets(contracts.load(), Selection(claims=["OP-POOL"], dtypes=["float32"]), "cpu")
    outcome, found = seen.given(target)
    assert outcome == chance.SURVIVED
    assert found["impl.operations.layers:pool", "x"].keys() == {"float32", "with strides"}
    assert found["impl.operations.layers:pool", "mode"] == {"text": 3}  # of mean, last and first: fewer than eight characters
    assert sys.getprofile() is None


def test_every_change_can_be_planted() -> None:
    for change in list(changes.every())[::60]:
        with changes.applied(change.name):
            pass


def test_a_patch_is_asked_of_the_claims_that_execute_what_it_changes(tmp_path: Path) -> None:
    (target,) = targets(contracts.load(), Selection(claims=["OPT-CLIP"], dtypes=["float32"]), "cpu")
    lines = (changes.IMPL / "operations" / "optimisation.py").read_text(encoding="utf-8").splitlines(keepends=True)
    number = next(place for place, line in enumerate(lines) if "torch.clamp(max_norm" in line)
    outcomes = []  # a claim that takes more than a minute is asked last
    for seconds, name, wrong in ((61.0, "wrong", "norm / max_norm"), (1.0, "equal", "(max_norm / norm)")):
        changed = [*lines[:number], lines[number].replace("max_norm / norm", wrong), *lines[number + 1 :]]
        diff = "".join(unified_diff(lines, changed, *(f"{side}/impl/operations/optimisation.py" for side in "ab")))
        where = "impl/operations/optimisation.py:clip_by_global_norm"
        head = f"Title: {name}\nWhere: {where}\nWrong: {name}\nDevice: cpu\n\ndiff --git a/impl b/impl\n"
        patch = tmp_path / f"{name}.patch"
        patch.write_text(head + diff, encoding="utf-8")
        place = f"operations/optimisation.py:{number + 1}"
        assert place in near.changed(patch)
        outcomes.append(near.attack(Bug.read(patch), [(seconds, target, frozenset([place]))]))
    assert [(one["outcome"], one.get("claims"), one["asked"]) for one in outcomes] == [(FOUND, ["OPT-CLIP float32"], 1), (MISSED, None, 1)]
    assert (outcomes[0]["culprit"], outcomes[0]["said"]) == ("clip_by_global_norm at clip_by_global_norm", "function")


def test_a_claim_that_is_false_without_the_patch_finds_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def holding(bug: Bug, options: Sequence[str], _: Sequence[str]) -> dict[str, Any]:
        asked.extend(option.removeprefix("--claim=") for option in options)
        return bug.outcome(MISSED, reason="")

    monkeypatch.setattr(near, "has_gpu", lambda: True)
    monkeypatch.setattr(near, "_asked", lambda bug, *_: bug.outcome(MISSED))  # on the CPU
    monkeypatch.setattr(near.whole, "attack", holding)
    patch = near.whole.CHECKOUT / "benchmarks" / "attackers" / "round-48" / "01-rope-wavelength-bands.patch"
    said = near.attack(Bug.read(patch), [], ["KERNEL-ROPE bfloat16", f"{near.LARGE} bfloat16"])
    assert (said["outcome"], said["on"]) == (MISSED, "cuda")
    assert "KERNEL-SWIGLU" in asked
    assert not {"KERNEL-ROPE", near.LARGE} & set(asked)


def test_a_claim_that_is_false_on_the_honest_change_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targeted = targets(contracts.load(), Selection(claims=["OPT-CLIP", "OPT-SCHEDULE", "OPT-ADAMW"], dtypes=["float32"]), "cpu")
    traced = [(1.0, target, frozenset(["optimiser.py:1"])) for target in targeted]
    (tmp_path / "honest").mkdir()
    for path in (tmp_path / "one.patch", tmp_path / "honest" / "one.patch"):
        path.write_text(
            "Title: a\nWhere: impl/a.py:a\nWrong: a\nDevice: cpu\n\ndiff --git a/impl b/impl\n"
            "--- a/impl/optimiser.py\n+++ b/impl/optimiser.py\n@@ -1 +1 @@\n-a\n+b\n",
            encoding="utf-8",
        )
    on_honest: list[Path | None] = []

    def false_claims(options: Sequence[str], _: str, patch: Path | None) -> list[str]:
        on_honest.append(patch)
        return ["OPT-CLIP float32"] if options == ["--claim=OPT-CLIP"] else []

    def false_in_turn(bug: Bug, claims: Sequence[str], *_: Any) -> dict[str, Any]:
        left = [name for name in ("OPT-CLIP float32", "OPT-ADAMW float32") if name in claims]
        return bug.outcome(FOUND, claims=left[:1]) if left else bug.outcome(MISSED)

    monkeypatch.setattr(near, "has_gpu", lambda: False)
    monkeypatch.setattr(near, "_asked", false_in_turn)
    monkeypatch.setattr(near.whole, "false_claims", false_claims)
    said = near.attack(Bug.read(tmp_path / "one.patch"), traced)
    assert (said["outcome"], said["claims"], said["excused"]) == (FOUND, ["OPT-ADAMW float32"], ["OPT-CLIP"])
    assert on_honest == 2 * [tmp_path / "honest" / "one.patch"]
    (tmp_path / "honest" / "one.patch").unlink()
    said = near.attack(Bug.read(tmp_path / "one.patch"), traced)
    assert (said["claims"], said.get("excused")) == (["OPT-CLIP float32"], None)


def test_claims_that_execute_another_line_of_the_file_come_next() -> None:
    one, other = targets(contracts.load(), Selection(claims=["OPT-CLIP", "OPT-SCHEDULE"], dtypes=["float32"]), "cpu")
    traced = [(1.0, one, frozenset(["kernels/rope.py:3"])), (2.0, other, frozenset(["kernels/swiglu.py:3"]))]
    assert near._nearest(frozenset(["kernels/rope.py:3", "kernels/swiglu.py:4"]), traced) == ([(1.0, one)], [(2.0, other)])
    assert near._nearest(frozenset(["kernels/swiglu.py:9"]), traced) == ([], [(2.0, other)])


def test_where_changes_were_found_is_known_of_rounds_before_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, at in ((1, "step 2, loss"), (2, "step 3, loss")):
        (tmp_path / f"round-{number}").mkdir()
        found = {"claims": ["TRN-SCORES float32"], "culprit": "impl.fit:fit at elsewhere", "where": "impl/fit.py:_Run._after", "place": at}
        missed = {"claims": [], "where": "impl/fit.py:fit"}
        of_an_operation = {**found, "claims": ["OP-POOL float32"]}
        patches = {"01-a.patch": found, "02-b.patch": missed, "03-c.patch": of_an_operation}
        (tmp_path / f"round-{number}/results_near.json").write_text(json.dumps({"patches": patches}))
    file = tmp_path / places.PLANTED.resolve().relative_to(places.CHECKOUT)
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(places, "FOLDER", tmp_path)
    monkeypatch.setattr(places, "PLANTED", file)
    monkeypatch.setattr(places, "CHECKOUT", tmp_path)
    assert places.main() == 0
    first = {"round-1/01-a": ["impl.fit:_Run._after", "step 2, loss"]}
    assert json.loads(file.read_text()) == {"TRN-SCORES": {**first, "round-2/01-a": ["impl.fit:_Run._after", "step 3, loss"]}}
    places.forget(tmp_path, tmp_path / "of nobody/01-a.patch")
    assert len(json.loads(file.read_text())["TRN-SCORES"]) == 2
    places.forget(tmp_path, tmp_path / "round-2/02-b.patch")
    assert json.loads(file.read_text()) == {"TRN-SCORES": first}
