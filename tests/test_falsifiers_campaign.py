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
from falsifiers_claims import CLAIMS, LOADED, Fake, Fickle, Wrong, claim, off, y_off
from terminal_processes import ROOT

from blackswan.contracts.model import Claim, Contract
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.diagnosis import blame
from blackswan.falsifiers.numeric.case import Case, load
from blackswan.falsifiers.runner import campaign as campaign_module
from blackswan.falsifiers.runner.campaign import Campaign, Selection, targets
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.runner.verdict_file import VerdictFile
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.unloadable import Unloadable
from blackswan.reference.table import Array
from blackswan.reports import markdown
from blackswan.reports.records import read
from blackswan.reports.summary import summarise

QUICK = Options(examples=6)


def campaign(tmp_path: Path, subject: Any, *claims: Claim) -> Campaign:
    contract = Contract("test", "1.0.0", "Test", {}, claims, tmp_path / "test-v1.yaml")
    return Campaign(subject, [contract], QUICK, Selection(), RealInput(CHECKPOINT, CORPUS_HELDOUT), tmp_path / "out" / "verdicts.jsonl")


class Run:
    """A campaign with its verdict file, in one process."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign, self.file, self.path = campaign, VerdictFile(campaign), campaign.verdict_file
        self.file.open()

    def attack(self) -> list[Verdict]:
        """Attacks everything and closes the file."""
        found = []
        for target in self.campaign.targets():
            found.append(self.campaign.attack(target))
            self.file.add(self.campaign.record(found[-1]))
        self.file.close(1, interrupted=False)
        return found


def test_an_interrupt_leaves_the_verdicts_so_far(tmp_path: Path) -> None:
    class Impatient(Fake):
        def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> dict[str, Array]:
            if inputs["x"].shape[-1] == 9:
                raise KeyboardInterrupt
            return outputs

    first, second = claim(name="FIRST"), claim(name="SECOND", domain_changes={"sizes": {"rows": (1,), "hidden": (9,)}})
    first = replace(first, domain=replace(first.domain, sizes={"rows": (1,), "hidden": (5,)}))
    run = Run(campaign(tmp_path, Impatient(), first, second))
    with pytest.raises(KeyboardInterrupt):
        run.attack()
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    assert [line["record"] for line in lines] == ["run", "verdict"], "readable before the file is closed"
    run.file.close(2, interrupted=True)
    end = json.loads(run.path.read_text().splitlines()[-1])
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

    made = campaign(
        tmp_path,
        Moody(),
        sized("HOLDS", 5),
        sized("WRONG", 6),
        sized("FLAKES", 7),
        sized("ABSENT", 5, dtype=("bfloat16",)),
        sized("NOTHING", 5, require=("hidden > 9",)),
    )
    diagnosed = list[int]()
    made.before_diagnosis = lambda: diagnosed.append(1)
    verdicts = Run(made).attack()
    states = {verdict.claim.id: verdict.state for verdict in verdicts}
    assert len(diagnosed) == 1, "the clock of --limit is stopped where a claim is false, and nowhere else"
    assert states == {
        "HOLDS": State.HELD,
        "WRONG": State.FALSIFIED,
        "FLAKES": State.FLAKY,
        "ABSENT": State.NOT_RUN,
        "NOTHING": State.VACUOUS,
    }
    kept = read(made.verdict_file)
    assert {record["claim"]: record["state"] for record in kept.verdicts} == {name: state.value for name, state in states.items()}
    assert {record["claim"] for record in kept.verdicts if made.fails(record)} == {"WRONG", "FLAKES", "NOTHING"}
    made.required = ("cuda",)
    assert {record["claim"] for record in kept.verdicts if made.fails(record)} == {"WRONG", "FLAKES", "NOTHING", "ABSENT"}
    assert next(verdict for verdict in verdicts if verdict.claim.id == "WRONG").replay is not None
    stored = sorted(path.name.split("-float32")[0] for path in (tmp_path / "out" / "counterexamples").iterdir())
    assert stored == ["FLAKES", "WRONG"]


def test_counterexamples_that_differ_in_their_seeds_alone_are_all_kept(tmp_path: Path) -> None:
    run = campaign(tmp_path, Fake(), claim())
    for seed in (3, 4):
        case = Case("rms_norm", "float32", {}, {}, seed, "normal", {})
        run.conclude(Verdict(claim(), "float32", "cpu", State.FLAKY, "answers differ", case=case))
    assert len(list((tmp_path / "out" / "counterexamples").iterdir())) == 2


def test_a_falsified_verdict_stands_where_its_counterexample_cannot_be_saved(tmp_path: Path) -> None:
    run = Run(campaign(tmp_path, Wrong(y_off), claim()))
    (run.path.parent / "counterexamples").write_text("a plain file", encoding="utf-8")
    assert run.attack()
    kept = read(run.path).verdicts
    assert len(kept) == len(list(run.campaign.targets()))
    for record in kept:
        assert record["state"] == "FALSIFIED"
        assert record["counterexample"]["replay"] is None
        assert "could not be saved as" in str(record["reason"])
        assert "exists" in str(record["reason"])


def test_a_falsified_verdict_stands_where_its_diagnosis_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("impl has no such function any more")

    monkeypatch.setattr(blame, "diagnose", broken)
    monkeypatch.setattr(campaign_module, "would_hold_with", broken)
    monkeypatch.setattr(np, "savez_compressed", broken)
    run = Run(campaign(tmp_path, Wrong(y_off), claim()))
    assert {verdict.state for verdict in run.attack()} == {State.FALSIFIED}
    for record in read(run.path).verdicts:
        assert "the diagnosis itself broke: ImportError: impl has no such function" in str(record["culprit"])
        assert "declaration cannot be told: ImportError: impl has no such function" in str(record["reason"])
        assert "could not be saved" in str(record["reason"])


def test_an_implementation_that_cannot_be_loaded_falsifies_what_it_is_asked(tmp_path: Path) -> None:
    lost = Unloadable("cpu", ImportError("cannot import name 'gone'"))
    run = campaign(tmp_path, lost, claim(), replace(CLAIMS["TRN-OWNERSHIP"], contract="test"))
    for verdict in map(run.attack, run.targets()):
        assert verdict.state is State.FALSIFIED
        assert "impl cannot be loaded: cannot import name 'gone'" in str(run.record(verdict)["counterexample"])


def test_the_line_that_replays_a_case_is_a_command_of_a_shell_whatever_the_folder(tmp_path: Path) -> None:
    run = Run(campaign(tmp_path / "a folder & its 'name'", Wrong(y_off), claim()))
    found = run.attack()
    pages = markdown.render(summarise(read(run.path)))
    for one in found:
        assert one.replay is not None
        *program, file = shlex.split(one.replay)
        assert program == ["pytest", "falsifiers" if Path.cwd() == ROOT else str(ROOT / "falsifiers"), "--replay"]
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


def test_a_run_on_cuda_asks_no_claim_about_the_cpu_alone() -> None:
    here = {kind: {target.claim.id for target in targets(LOADED, Selection(), kind)} for kind in ("cpu", "cuda")}
    assert "DEV-ESTIMATE-SETTINGS" in here["cpu"] - here["cuda"]
    assert here["cuda"] < here["cpu"]


def test_what_warms_a_device_up_is_no_sample_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackswan.impl.warm_up.COLD", ())
    one = next(each for contract in LOADED for each in contract.claims if each.id == "DATA-SPLIT-APART")
    assert falsify(one, "float32", Implementation("cpu"), Options()).state is State.HELD


def test_claims_run_from_elementary_to_whole() -> None:
    found = targets(LOADED, Selection(), "cpu")
    order = [target.claim for target in found]
    first = {one.operation or one.check: index for index, one in reversed([*enumerate(order)])}
    before = [
        ("rms_norm", "lora_linear"),
        ("rms_norm", "weighted_cross_entropy"),
        ("rms_norm", "adamw_step"),
        ("weighted_cross_entropy", "decoder_forward"),
        ("adamw_step", "decoder_forward"),
        ("decoder_forward", "classifier_forward"),
        ("classifier_forward", "classifier_loss"),
        ("classifier_loss", "train_steps"),
        ("train_steps", "runs.steps_follow_the_reference"),
        ("train_steps", "adapters.saved_adapter_gives_the_logits"),
    ]
    for simple, whole in before:
        assert first[simple] < first[whole], (simple, whole)
    assert len({target.key for target in found}) == len(order)


def test_a_quick_run_leaves_out_whole_runs_unless_they_are_named(tmp_path: Path) -> None:
    found = next(one for contract in LOADED for one in contract.claims if one.id == "DATA-CLASS-WEIGHTS")
    quick = replace(campaign(tmp_path, Fake(), found), options=Options("quick"))
    left_out = quick.attack(next(quick.targets()))
    assert left_out.state is State.NOT_RUN
    assert "--effort quick leaves out" in (left_out.reason or "")
    named = replace(quick, selection=Selection((found.id,)))
    assert "--effort quick" not in (named.attack(next(named.targets())).reason or "")
