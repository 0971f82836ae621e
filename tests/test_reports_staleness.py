"""Verdicts speak of a checkout while its four folders are what they were; which of its claims no such verdict holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from reports_factory import SOURCE, end_record, run_record, verdict, write, write_records

from blackswan.contracts import load, load_vocabulary, loader
from blackswan.contracts.model import Location
from blackswan.contracts.tables import ACCELERATORS
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric import precision
from blackswan.falsifiers.runner.environment import display_path
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.impl.device import TESTED
from blackswan.reports import evidence as evidence_module
from blackswan.reports import staleness
from blackswan.reports.__main__ import main
from blackswan.reports.digests import FOLDERS, claim_digest, tree_digests
from blackswan.reports.evidence import collect, coverage, listing, seen
from blackswan.reports.records import read
from blackswan.reports.staleness import current_tree, stale_verdicts

VOCABULARY = load_vocabulary()
CONTRACT = {
    "contract": "sample",
    "version": "1.0.0",
    "title": "A sample",
    "claims": [
        {
            "id": identifier,
            "severity": "P0",
            "kind": "parity",
            "operation": "softmax",
            "statement": "Softmax equals the reference.",
            "domain": {"sizes": {"rows": {"min": 1, "max": 4}, "classes": {"min": 2, "max": 8}}, "dtype": ["float32"]},
            "tolerance": {"basis": "rounding", "factors": {"rms": 1.5, "row": 4, "max": 3}},
            "must_catch": ["softmax_without_max_shift"],
        }
        for identifier in ("SOFTMAX", "SOFTMAX-TOO")
    ],
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout, whose contracts are read by this one's vocabulary."""
    monkeypatch.setattr(loader, "load_vocabulary", lambda: VOCABULARY)
    for folder in FOLDERS:
        (tmp_path / "tree" / folder).mkdir(parents=True)
        (tmp_path / "tree" / folder / "norm.py").write_text(SOURCE)
    (tmp_path / "tree" / "contracts" / "sample-v1.yaml").write_text(yaml.safe_dump(CONTRACT))
    return tmp_path / "tree"


@pytest.fixture
def evidence(tmp_path: Path, tree: Path) -> Path:
    """A verdict file made on that checkout."""
    claims = [claim for contract in load([tree / "contracts"]) for claim in contract.claims]
    verdicts = [verdict(c.id, contract=c.contract, operation=c.operation, digests={"claim": claim_digest(c)}) for c in claims]
    (tmp_path / "evidence").mkdir()
    header = run_record(digests=tree_digests(tree), device="cuda:0", device_name="NVIDIA H200", model=None)
    return write(tmp_path / "evidence" / "gpu.jsonl", *verdicts, header=header)


def reasons(evidence: Path, tree: Path) -> list[str]:
    return sorted(f"{key[1]}: {reason}" for key, reason in stale_verdicts(read(evidence), current_tree(tree)).items())


def test_untouched_tree_makes_nothing_stale(evidence: Path, tree: Path) -> None:
    assert reasons(evidence, tree) == []
    assert "current" in listing(collect(evidence.parent, current_tree(tree)))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_change_of_a_folder_makes_every_verdict_stale(evidence: Path, tree: Path, folder: str) -> None:
    (tree / folder / "other.py").write_text(SOURCE)
    assert reasons(evidence, tree) == [f"SOFTMAX-TOO: {folder} changed", f"SOFTMAX: {folder} changed"]
    assert f"STALE, 2 of 2 verdicts: 2 × {folder} changed" in listing(collect(evidence.parent, current_tree(tree)))


def test_all_folders_that_changed_are_named(evidence: Path, tree: Path) -> None:
    for folder in ("impl", "reference"):
        (tree / folder / "norm.py").unlink()
    assert reasons(evidence, tree)[1] == "SOFTMAX: reference, impl changed"


def test_removed_claim_makes_its_verdict_stale(evidence: Path, tree: Path) -> None:
    contract = tree / "contracts" / "sample-v1.yaml"
    contract.write_text(yaml.safe_dump({**CONTRACT, "claims": CONTRACT["claims"][:1]}))
    assert reasons(evidence, tree) == ["SOFTMAX-TOO: the claim no longer exists", "SOFTMAX: contracts changed"]


def test_evidence_lists_device_date_result_and_staleness(evidence: Path, tree: Path) -> None:
    (tree / "impl" / "norm.py").write_text("x = 1\n")
    line = listing(collect(evidence.parent, current_tree(tree))).splitlines()[1]
    for expected in ("gpu.jsonl", "cuda:0 (NVIDIA H200)", "2025-03-01", "HELD: 2 held", "STALE, 2 of 2 verdicts: 2 × impl changed"):
        assert expected in line


def covered(evidence: Path, tree: Path) -> list[str]:
    current = current_tree(tree)
    return [str(entry) for entry in coverage(collect(evidence.parent, current), current)]


def on_cuda(evidence: Path, tree: Path) -> list[dict[str, Any]]:
    """The claims made in two dtypes, and a verdict of now for each."""
    dtypes = ("float32", "bfloat16")
    contract = {**CONTRACT, "claims": [{**claim, "domain": {**claim["domain"], "dtype": [*dtypes]}} for claim in CONTRACT["claims"]]}
    (tree / "contracts" / "sample-v1.yaml").write_text(yaml.safe_dump(contract))
    return [
        {**unsealed(made), "device": device, "dtype": dtype}
        for made in read(evidence).verdicts
        for dtype, device in zip(dtypes, ("cuda:0", None), strict=True)  # what is the same on every device names none
    ]


def unsealed(record: Any) -> dict[str, Any]:
    """A record to be written anew, without its digest."""
    return {name: value for name, value in record.items() if name != "digest"}


def devices(evidence: Path, tree: Path) -> dict[str, str]:
    return dict(str(entry).split(": ", 1) for entry in seen(collect(evidence.parent, current_tree(tree))))


def test_every_kind_of_device_is_seen_by_a_record_or_never(evidence: Path, tree: Path) -> None:
    found = devices(evidence, tree)
    assert list(found) == ["cpu", *ACCELERATORS]
    assert "no run is kept" in found["cpu"]
    assert all(found[kind].startswith("never seen") for kind in ("cuda", "xpu", "mps", "hip")), "its verdicts are of the CPU"
    verdicts = on_cuda(evidence, tree)
    write(evidence, *verdicts, header=header_of(evidence, tree))
    assert devices(evidence, tree)["cuda"] == "seen on NVIDIA H200, 2025-03-01, 4 held of 4 (gpu.jsonl, current)"
    (tree / "impl" / "norm.py").write_text(SOURCE + "# later\n")
    assert devices(evidence, tree)["cuda"].endswith("(gpu.jsonl, STALE)"), "hardware that was seen stays seen"


@pytest.mark.parametrize(
    ("header", "kind"), [({"device": "cuda:0", "versions": {"hip": "6.4"}}, "hip"), ({"device": "xpu:0", "versions": {}}, "xpu")]
)
def test_hardware_is_named_by_its_own_kind(evidence: Path, tree: Path, header: dict[str, Any], kind: str) -> None:
    verdicts = [{**made, "device": header["device"]} for made in on_cuda(evidence, tree)]
    write(evidence, *verdicts, header={**header_of(evidence, tree), **header, "device_name": "Card"})
    found = devices(evidence, tree)
    assert found[kind].startswith("seen on Card")
    assert found["cuda"].startswith("never seen")
    assert covered(evidence, tree)[0].startswith(f"{kind}: ")


def test_a_kind_on_which_nothing_ran_is_not_seen(evidence: Path, tree: Path) -> None:
    verdicts = [{**made, "state": "NOT_RUN", "reason": "no reason"} for made in on_cuda(evidence, tree)]
    write(evidence, *verdicts, header=header_of(evidence, tree))
    assert devices(evidence, tree)["cuda"].startswith("never seen")


def test_a_run_of_another_subject_shows_no_device(evidence: Path, tree: Path) -> None:
    write(evidence, *on_cuda(evidence, tree), header={**header_of(evidence, tree), "subject": "mine"})
    assert devices(evidence, tree)["cuda"].startswith("never seen")


def test_the_kinds_that_the_implementation_calls_tested_are_those_of_kept_runs() -> None:
    kept = seen(collect(staleness.ROOT / "reports" / "evidence", current_tree(staleness.ROOT)))
    assert {entry.device for entry in kept if entry.runs} | {"cpu"} == set(TESTED)


def header_of(evidence: Path, tree: Path) -> dict[str, Any]:
    """The run record of that file, as of the checkout as it is now."""
    return {**unsealed(read(evidence).header), "digests": tree_digests(tree)}


def test_what_no_current_verdict_speaks_of_is_named(evidence: Path, tree: Path) -> None:
    verdicts = on_cuda(evidence, tree)
    header = header_of(evidence, tree)
    write(evidence, *verdicts, header=header)
    assert covered(evidence, tree) == ["cuda: 4 of 4 claims and dtypes are held by a current verdict"]
    not_run = {**verdicts[0], "state": "NOT_RUN", "reason": "no bitsandbytes", "headroom": None, "worst_case": None}
    write(evidence, not_run, *verdicts[1:3], header=header)
    two = "cuda: 2 of 4 claims and dtypes are held by a current verdict; not: "
    assert covered(evidence, tree) == [two + "SOFTMAX in float32, SOFTMAX-TOO in bfloat16"]
    write(evidence.parent / "later.jsonl", verdicts[0], verdicts[3], header=header)
    assert covered(evidence, tree) == ["cuda: 4 of 4 claims and dtypes are held by a current verdict"], "the runs together"
    contract = tree / "contracts" / "sample-v1.yaml"
    contract.write_text(contract.read_text().replace("rms: 1.5", "rms: 2.5", 1))
    assert covered(evidence, tree)[0].startswith("cuda: 0 of 4 claims"), "the contracts changed"


@pytest.mark.parametrize("lost", ["its contract", "the claim", "a dtype"])
def test_what_evidence_once_held_and_no_contract_claims_any_more_is_missed(
    evidence: Path, tree: Path, lost: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the evidence of then lies that of a new run, which held all that is left."""
    verdicts, contract = on_cuda(evidence, tree), tree / "contracts" / "sample-v1.yaml"
    content = yaml.safe_load(contract.read_text())
    first, second = content["claims"]
    name, left, missed = {
        "its contract": ("other", [first, second], "SOFTMAX in bfloat16 (gone from sample)"),
        "the claim": ("sample", [second], "SOFTMAX in bfloat16 (gone from sample)"),
        "a dtype": ("sample", [{**first, "domain": {**first["domain"], "dtype": ["float32"]}}, second], "SOFTMAX in bfloat16"),
    }[lost]
    contract.unlink()
    (contract.parent / f"{name}-v1.yaml").write_text(yaml.safe_dump({**content, "contract": name, "claims": left}))
    dtypes = {claim["id"]: claim["domain"]["dtype"] for claim in left}
    now = [{**each, "contract": name} for each in verdicts if each["dtype"] in dtypes.get(each["claim"], ())]
    write(evidence.parent / "older.jsonl", *verdicts, header=unsealed(read(evidence).header))
    write(evidence, *now, header=header_of(evidence, tree))
    assert covered(evidence, tree)[0].partition("; not: ")[2].split(", ")[0] == missed
    monkeypatch.setattr(staleness, "ROOT", tree)
    assert main(["evidence", "--require-current", "--folder", str(evidence.parent)]) == 1
    (evidence.parent / "older.jsonl").unlink()
    assert main(["evidence", "--require-current", "--folder", str(evidence.parent)]) == 0, capsys.readouterr().out


def test_a_claim_about_another_device_needs_no_verdict_there(evidence: Path, tree: Path) -> None:
    claim = CONTRACT["claims"][0]
    claims = [{**claim, "id": f"ON-{name.upper()}", "domain": {**claim["domain"], "device": [name]}} for name in ("cpu", "cuda")]
    (tree / "contracts" / "sample-v1.yaml").write_text(yaml.safe_dump({**CONTRACT, "claims": claims}))
    write(evidence, header=header_of(evidence, tree))
    assert covered(evidence, tree) == ["cuda: 0 of 1 claims and dtypes are held by a current verdict; not: ON-CUDA in float32"]


@pytest.mark.parametrize("state", ["FALSIFIED", "VACUOUS", "FLAKY"])
def test_a_verdict_that_does_not_hold_is_no_cover(evidence: Path, tree: Path, state: str) -> None:
    first, *others = on_cuda(evidence, tree)
    write(evidence, {**first, "state": state, "reason": "so it is", "headroom": None}, *others, header=header_of(evidence, tree))
    assert covered(evidence, tree) == ["cuda: 3 of 4 claims and dtypes are held by a current verdict; not: SOFTMAX in float32"]


@pytest.mark.parametrize("header", [{}, {"effort": "quick"}, {"replay": "case.npz"}])
def test_what_another_run_falsified_is_not_held(evidence: Path, tree: Path, header: dict[str, Any]) -> None:
    first, *others = on_cuda(evidence, tree)
    own = header_of(evidence, tree)
    write(evidence, first, *others, header=own)
    false = {**first, "state": "FALSIFIED", "reason": "so it is", "headroom": None}
    write(evidence.parent / "another.jsonl", false, header={**own, **header})
    assert covered(evidence, tree) == ["cuda: 3 of 4 claims and dtypes are held by a current verdict; not: SOFTMAX in float32"]
    write(evidence.parent / "another.jsonl", false, header={**own, **header, "subject": "reference:softmax_without_max_shift"})
    assert covered(evidence, tree) == ["cuda: 4 of 4 claims and dtypes are held by a current verdict"]


@pytest.mark.parametrize(
    ("header", "end"),
    [
        ({"subject": "reference:softmax_without_max_shift"}, {}),
        ({"replay": "reports/generated/counterexamples/SOFTMAX.npz"}, {}),
        ({"effort": "quick"}, {}),
        ({}, {"exit_status": 3}),
        ({"model": {"path": "falsifiers/own", "digest": "0" * 64}}, {}),
        ({"corpus": {"path": "falsifiers/data/other.jsonl", "digest": "0" * 64}}, {}),
    ],
)
def test_a_run_of_something_else_is_no_cover(evidence: Path, tree: Path, header: dict[str, Any], end: dict[str, Any]) -> None:
    verdicts = on_cuda(evidence, tree)
    shipped = {**header_of(evidence, tree), "model": {"path": "falsifiers/data/checkpoint", "digest": "m" * 64}}
    write(evidence, *verdicts, header=shipped)
    assert covered(evidence, tree) == ["cuda: 4 of 4 claims and dtypes are held by a current verdict"]
    write_records(evidence, {**shipped, **header}, *verdicts, end_record(*verdicts, **end))
    assert covered(evidence, tree)[0].startswith("cuda: 0 of 4 claims")


def test_what_no_cpu_computes_in_is_not_missed_there(evidence: Path, tree: Path) -> None:
    claim = {**CONTRACT["claims"][0], "domain": {**CONTRACT["claims"][0]["domain"], "dtype": ["float32", "tf32"]}}
    (tree / "contracts" / "sample-v1.yaml").write_text(yaml.safe_dump({**CONTRACT, "claims": [claim]}))
    write(evidence, header=header_of(evidence, tree))
    assert covered(evidence, tree)[0].startswith("cuda: 0 of 2 claims")
    write(evidence, header={**unsealed(read(evidence).header), "device": "cpu"})
    assert covered(evidence, tree)[0].startswith("cpu: 0 of 1 claims")
    assert set(precision.CUDA_ONLY) == evidence_module.CUDA_ONLY == {"tf32"}
    assert Implementation("cpu").name == evidence_module.SUBJECT


def test_of_what_lacks_a_verdict_some_are_named() -> None:
    lacking = tuple(f"C-{number:02d} in float32" for number in range(14))
    shown = str(evidence_module.Coverage("cuda", 20, lacking))
    assert shown.startswith("cuda: 6 of 20 claims")
    assert shown.endswith("C-11 in float32 and 2 more")
    assert str(evidence_module.Coverage("cuda", 20, lacking[:12])).endswith("C-11 in float32")


def test_a_loader_that_makes_something_else_of_a_claim_makes_its_verdicts_stale() -> None:
    claim = next(claim for contract in load() for claim in contract.claims if claim.id == "OP-RMSNORM")
    tolerance = claim.tolerance
    doubled = {name: replace(factors, max=2 * factors.max) for name, factors in tolerance.factors.items()}
    others = [
        replace(claim, tolerance=replace(tolerance, factors=doubled)),
        replace(claim, domain=replace(claim.domain, flavours=("normal",))),
        replace(claim, domain=replace(claim.domain, sizes={**claim.domain.sizes, "rows": (1,)})),
        replace(claim, cases=1),
    ]
    assert len({claim_digest(each) for each in (claim, replace(claim, location=Location("elsewhere", 1)), *others)}) == 1 + len(others)


def test_evidence_that_must_be_current_fails_where_it_is_not(
    evidence: Path, tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "ROOT", tree)
    write(evidence, *on_cuda(evidence, tree), header=header_of(evidence, tree))
    required = ["evidence", "--require-current", "--folder"]
    assert main([*required, str(evidence.parent)]) == 0
    (tree / "impl" / "norm.py").write_text("x = 1\n")
    assert main([*required, str(evidence.parent)]) == 1
    assert "cuda: 0 of 4 claims" in capsys.readouterr().out
    assert main(["evidence", "--folder", str(evidence.parent)]) == 0
    (tree / "empty").mkdir()
    assert main([*required, str(tree / "empty")]) == 1, "nothing kept is nothing current"


def test_commands_mark_what_is_stale(
    evidence: Path, tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "impl" / "norm.py").write_text("x = 1\n")
    monkeypatch.setattr(staleness, "ROOT", tree)
    out = evidence.parent / "out"
    assert main(["evidence", "--folder", str(evidence.parent)]) == 0
    assert "STALE, 2 of 2 verdicts" in capsys.readouterr().out
    assert main(["render", str(evidence), "--output", str(out), "--against-tree"]) == 0
    assert capsys.readouterr().out.startswith("STALE: 2 held, 2 STALE")
    assert json.loads((out / "gpu.json").read_text())["stale"] == 2
    assert main(["render", str(evidence), "--output", str(out)]) == 0
    assert capsys.readouterr().out.startswith("HELD: 2 held\n")


def test_contract_that_does_not_load_is_an_error_without_traceback(
    evidence: Path, tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "contracts" / "sample-v1.yaml").write_text("contract: sample\n")
    monkeypatch.setattr(staleness, "ROOT", tree)
    assert main(["render", str(evidence), "--output", str(evidence.parent / "out"), "--against-tree"]) == 2
    assert "do not load" in capsys.readouterr().err
    assert not (evidence.parent / "out").exists()
    assert main(["evidence", "--folder", str(evidence.parent / "absent")]) == 2


def test_what_a_run_reads_by_itself_is_the_shipped_model_and_corpus() -> None:
    assert {"model": display_path(CHECKPOINT), "corpus": display_path(CORPUS_HELDOUT)} == evidence_module.SHIPPED
