"""What a run records of its verdicts, whatever becomes of it and of their counterexamples."""

import errno
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from falsifiers_claims import Fake, Fickle, Wrong, claim, off, y_off

from blackswan.contracts.model import Claim, Contract
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.case import Case, load
from blackswan.falsifiers.runner.campaign import Campaign, Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.reference.table import Array
from blackswan.reports import markdown
from blackswan.reports.records import read
from blackswan.reports.summary import summarise

QUICK = Options(examples=6)


def campaign(tmp_path: Path, subject: Any, *claims: Claim) -> Campaign:
    contract = Contract("test", "1.0.0", "Test", {}, claims, tmp_path / "test-v1.yaml")
    return Campaign(subject, [contract], QUICK, Selection(), RealInput(CHECKPOINT, CORPUS_HELDOUT), tmp_path / "out" / "verdicts.jsonl")


def test_an_interrupt_leaves_the_verdicts_so_far(tmp_path: Path) -> None:
    class Impatient(Fake):
        def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> dict[str, Array]:
            if inputs["x"].shape[-1] == 9:
                raise KeyboardInterrupt
            return outputs

    first, second = claim(name="FIRST"), claim(name="SECOND", domain_changes={"sizes": {"rows": (1,), "hidden": (9,)}})
    first = replace(first, domain=replace(first.domain, sizes={"rows": (1,), "hidden": (5,)}))
    run = campaign(tmp_path, Impatient(), first, second)
    run.open()
    one, other = run.targets()
    assert run.attack(one).state is State.HELD
    with pytest.raises(KeyboardInterrupt):
        run.attack(other)
    lines = [json.loads(line) for line in run.verdict_file.read_text().splitlines()]
    assert [line["record"] for line in lines] == ["run", "verdict"], "readable before the file is closed"
    run.close(2, interrupted=True)
    end = json.loads(run.verdict_file.read_text().splitlines()[-1])
    assert (end["interrupted"], end["exit_status"], end["totals"]["HELD"]) == (True, 2, 1)


def test_every_state_makes_a_record_that_the_schema_accepts(tmp_path: Path) -> None:
    class Moody(Fake):
        def __init__(self) -> None:
            super().__init__()
            self.fickle = Fickle()

        def unsupported(self, operation: str, dtype: str) -> str | None:
            return f"no {operation} in bfloat16" if dtype == "bfloat16" else None

        def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> dict[str, Array]:
            hidden = inputs["x"].shape[-1]
            if hidden == 6:
                return {"y": off(outputs["y"], np.nan)}
            return self.fickle.answer(inputs, outputs) if hidden == 7 else outputs

    def sized(name: str, hidden: int, **changes: Any) -> Claim:
        return claim(name=name, domain_changes={"sizes": {"rows": (1,), "hidden": (hidden,)}, **changes})

    run = campaign(
        tmp_path,
        Moody(),
        sized("HOLDS", 5),
        sized("WRONG", 6),
        sized("FLAKES", 7),
        sized("ABSENT", 5, dtype=("bfloat16",)),
        sized("NOTHING", 5, require=("hidden > 9",)),
    )
    run.open()
    states = {str(run.attack(target).claim.id): run.verdicts[-1].state for target in run.targets()}
    run.close(1, interrupted=False)
    assert states == {
        "HOLDS": State.HELD,
        "WRONG": State.FALSIFIED,
        "FLAKES": State.FLAKY,
        "ABSENT": State.NOT_RUN,
        "NOTHING": State.VACUOUS,
    }
    kept = read(run.verdict_file)
    assert {record["claim"]: record["state"] for record in kept.verdicts} == {name: state.value for name, state in states.items()}
    wrong = run.verdicts[1]
    assert wrong.replay is not None
    stored = sorted(path.name.split("-float32")[0] for path in (tmp_path / "out" / "counterexamples").iterdir())
    assert stored == ["FLAKES", "WRONG"]


def test_counterexamples_that_differ_in_their_seeds_alone_are_all_kept(tmp_path: Path) -> None:
    run = campaign(tmp_path, Fake(), claim())
    run.open()
    for seed in (3, 4):
        case = Case("rms_norm", "float32", {}, {}, seed, "normal", {})
        run.conclude(Verdict(claim(), "float32", "cpu", State.FLAKY, "answers differ", case=case))
    run.close(1, interrupted=False)
    assert len(list((tmp_path / "out" / "counterexamples").iterdir())) == 2


def test_a_falsified_verdict_stands_where_its_counterexample_cannot_be_saved(tmp_path: Path) -> None:
    run = campaign(tmp_path, Wrong(y_off), claim())
    run.open()
    (run.verdict_file.parent / "counterexamples").write_text("a plain file", encoding="utf-8")
    for target in run.targets():
        run.attack(target)
    run.close(1, interrupted=False)
    kept = read(run.verdict_file).verdicts
    assert len(kept) == len(list(run.targets()))
    for record in kept:
        assert record["state"] == "FALSIFIED"
        assert record["counterexample"] is not None
        assert record["counterexample"]["replay"] is None
        assert "could not be saved as" in str(record["reason"])
        assert "exists" in str(record["reason"])


def test_the_line_that_replays_a_case_is_a_command_of_a_shell_whatever_the_folder(tmp_path: Path) -> None:
    run = campaign(tmp_path / "a folder & its 'name'", Wrong(y_off), claim())
    run.open()
    found = [run.attack(target) for target in run.targets()]
    run.close(1, interrupted=False)
    pages = markdown.render(summarise(read(run.verdict_file)))
    for one in found:
        assert one.replay is not None
        *program, file = shlex.split(one.replay)
        assert program == ["pytest", "falsifiers", "--replay"]
        assert load(Path(file))[0] == one.claim.id
        assert f"- **Replay**: `{one.replay}`\n" in pages


def test_nothing_is_left_of_a_counterexample_that_a_full_disk_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, **_: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    case = Case("rms_norm", "float32", {}, {}, 3, "normal", {})
    with pytest.raises(OSError, match="No space left"):
        case.save(tmp_path / "case.npz", "OP-RMSNORM")
    assert list(tmp_path.iterdir()) == []
