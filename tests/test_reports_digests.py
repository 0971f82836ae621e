import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from reports_factory import run_record, verdict, write

from contracts import contract_digest, load
from falsifiers.dependencies import entries as dependency_entries
from reports import staleness
from reports.__main__ import main
from reports.dependencies import PARTS, Sources
from reports.digests import FOLDERS, DigestError, folder_digest, source_digest, tree_digests
from reports.evidence import collect, listing
from reports.records import read
from reports.staleness import current_tree, stale_verdicts

SOURCE = '''"""Module."""

import math


def norm(x: float, eps: float = 1e-6) -> float:
    """Doc."""
    return x / math.sqrt(x * x + eps)
'''

SAME = [
    SOURCE.replace("import math", "import math  # used below"),
    SOURCE.replace('"""Doc."""', '"""Another\n\n    doc."""'),
    SOURCE.replace("x * x + eps", "(x   *   x)\n        + eps"),
    SOURCE.replace('"""Module."""\n', ""),
    SOURCE.replace("\n", "\r\n"),
    SOURCE.replace("1e-6", "0.000001"),
]

OTHER = [
    SOURCE.replace("+ eps", "- eps"),
    SOURCE.replace("1e-6", "1e-5"),
    SOURCE.replace("x * x + eps", "x * (x + eps)"),
    SOURCE.replace("eps: float = 1e-6", "eps: float | None = None"),
    SOURCE.replace("math.sqrt", "math.cbrt"),
    SOURCE.replace("    return x", "    x = x\n    return x"),
    SOURCE.replace("x / math", "1 / math").replace("1 /", "1.0 /"),
    SOURCE + '"not a docstring"\n',
]

RICH = (
    SOURCE
    + '''

@decorated(1, *rest, key=-0.0, **more)
class A(B, metaclass=C):
    """Doc."""

    field: int = 3

    async def f(self, x, /, *, y: "int" = 2):
        async with x as z:
            yield [i async for i in z if (j := i) > 0x10]


def g(a, *b, **c):
    match a:
        case [1, *_] | {"k": v}:
            return lambda: f"{a!r:>{b}} {c=}" "tail" f"{a}" if v else not a
    return {**c, "x": ...}, a[1:2, ::3], b"y", 1j, None, True, 10**20
'''
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "norm.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("text", SAME)
def test_comments_docstrings_and_formatting_do_not_count(source: Path, text: str) -> None:
    assert text != SOURCE
    before = source_digest([source])
    source.write_bytes(text.encode())
    assert source_digest([source]) == before


def test_every_change_of_meaning_counts(source: Path) -> None:
    digests = {source_digest([source])}
    for text in OTHER:
        source.write_text(text)
        digests.add(source_digest([source]))
    assert len(digests) == len(OTHER) + 1


def test_constants_of_different_types_differ(source: Path) -> None:
    digests = set()
    for constant in ("1", "1.0", "True", "'1'", "b'1'", "None", "...", "1j"):
        source.write_text(f"x = {constant}\n")
        digests.add(source_digest([source]))
    assert len(digests) == 8


def test_digest_is_the_same_on_every_python_version(source: Path) -> None:
    """Recorded with Python 3.11, 3.12 and 3.13, whose syntax trees differ."""
    source.write_text(RICH)
    assert source_digest([source]) == "e813cee9409566736359e5e93dee03d1b4a0ea120ed46ac6e83753ca9c5f35bd"


def test_order_of_paths_does_not_matter_but_names_do(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("x = 1\n")
    two.write_text("x = 2\n")
    before = source_digest([one, two])
    assert source_digest([two, one]) == before
    one.write_text("x = 2\n")
    two.write_text("x = 1\n")
    assert source_digest([one, two]) != before


@pytest.mark.parametrize(("text", "expected"), [("x = (", "norm.py:1: is not Python"), ("x = '\0'", "is not Python")])
def test_file_that_is_not_python_is_named(source: Path, text: str, expected: str) -> None:
    source.write_text(text)
    with pytest.raises(DigestError, match=expected):
        source_digest([source])


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match=r"absent\.py: cannot be read"):
        source_digest([tmp_path / "absent.py"])
    with pytest.raises(DigestError, match="absent: no such folder"):
        folder_digest(tmp_path / "absent")


def test_yaml_counts_by_content(tmp_path: Path) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text("a: 1\nb: [1, 2]\n")
    before = folder_digest(tmp_path)
    file.write_text("# comment\nb:\n  - 1\n  - 2\na:   1\n")
    assert folder_digest(tmp_path) == before
    file.write_text("a: 1\nb: [2, 1]\n")
    assert folder_digest(tmp_path) != before
    file.write_text("a: [\n")
    with pytest.raises(DigestError, match=r"claims\.yaml: is not YAML"):
        folder_digest(tmp_path)


def test_other_files_and_caches_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = folder_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\0")
    (tmp_path / "derivation.md").write_text("dx = dy")
    assert folder_digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert folder_digest(tmp_path) != before


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
def tree(tmp_path: Path) -> Path:
    """A small checkout."""
    for folder in FOLDERS:
        (tmp_path / "tree" / folder).mkdir(parents=True)
        (tmp_path / "tree" / folder / "norm.py").write_text(SOURCE)
    (tmp_path / "tree" / "contracts" / "sample-v1.yaml").write_text(yaml.safe_dump(CONTRACT))
    return tmp_path / "tree"


@pytest.fixture
def evidence(tmp_path: Path, tree: Path) -> Path:
    """A verdict file made on that checkout."""
    claims = [claim for contract in load([tree / "contracts"]) for claim in contract.claims]
    sources, depends = Sources(tree), {part: [f"{folder}/norm.py"] for part, folder in PARTS.items()}
    digests = {part: sources.digest(part, entries) for part, entries in depends.items()}
    verdicts = [
        verdict(c.id, contract=c.contract, operation=c.operation, digests={"claim": contract_digest(c), **digests}, depends=depends)
        for c in claims
    ]
    (tmp_path / "evidence").mkdir()
    header = run_record(digests=tree_digests(tree), device="cuda", device_name="NVIDIA H200")
    return write(tmp_path / "evidence" / "gpu.jsonl", *verdicts, header=header)


def reasons(evidence: Path, tree: Path) -> list[str]:
    return sorted(f"{key[1]}: {reason}" for key, reason in stale_verdicts(read(evidence), current_tree(tree)).items())


def test_untouched_tree_makes_nothing_stale(evidence: Path, tree: Path) -> None:
    assert reasons(evidence, tree) == []
    assert "current" in listing(collect(evidence.parent, current_tree(tree)))


def test_comment_makes_nothing_stale(evidence: Path, tree: Path) -> None:
    for folder in FOLDERS:
        file = tree / folder / "norm.py"
        file.write_text("# a comment\n" + file.read_text())
    contract = tree / "contracts" / "sample-v1.yaml"
    contract.write_text("# a comment\n" + contract.read_text())
    assert reasons(evidence, tree) == []


@pytest.mark.parametrize("part", PARTS)
def test_operator_makes_every_verdict_that_depends_on_it_stale(evidence: Path, tree: Path, part: str) -> None:
    file = tree / PARTS[part] / "norm.py"
    file.write_text(file.read_text().replace("+ eps", "- eps"))
    assert reasons(evidence, tree) == [f"SOFTMAX-TOO: its {part} has changed", f"SOFTMAX: its {part} has changed"]


@pytest.mark.parametrize("part", PARTS)
def test_file_that_no_entry_imports_makes_nothing_stale(evidence: Path, tree: Path, part: str) -> None:
    (tree / PARTS[part] / "other.py").write_text(SOURCE)
    assert reasons(evidence, tree) == []


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("gone", [True, False])
def test_missing_and_broken_entries_make_verdicts_stale(evidence: Path, tree: Path, part: str, gone: bool) -> None:
    file = tree / PARTS[part] / "norm.py"
    file.unlink() if gone else file.write_text("def f(:\n")
    assert reasons(evidence, tree) == [f"SOFTMAX-TOO: its {part} has changed", f"SOFTMAX: its {part} has changed"]


def test_a_table_that_gives_something_else_makes_its_verdicts_stale(evidence: Path, tree: Path) -> None:
    run, own = read(evidence), current_tree(tree)
    same = {verdict["claim"]: verdict["depends"] for verdict in run.verdicts}
    assert stale_verdicts(run, replace(own, depends=same)) == {}
    other = {**same, "SOFTMAX": {**same["SOFTMAX"], "subject": ["impl/norm.py::faster"]}}
    found = stale_verdicts(run, replace(own, depends=other))
    assert {key[1]: reason for key, reason in found.items()} == {"SOFTMAX": "its subject has changed"}


def test_tables_that_do_not_load_leave_nothing_current(tree: Path) -> None:
    (tree / "falsifiers" / "dependencies.py").write_text("")
    (tree / "falsifiers" / "__main__.py").write_text("raise SystemExit('no such table')\n")
    with pytest.raises(DigestError, match="python -m falsifiers depends: no such table"):
        current_tree(tree)


IMPORTS = {
    "from {folder}.layers.helper import f": True,
    "from {folder}.layers import helper": True,
    "import {folder}.layers.helper": True,
    "def f():\n    from {folder}.layers import helper": True,
    "from {folder}.layers.middle import g": True,
    "from {folder}.layers import other": False,
    "from {folder}.layers.table import TABLE": False,
    "from elsewhere.layers import helper": False,
}


@pytest.mark.parametrize(("line", "reaches"), IMPORTS.items())
def test_digest_follows_imports_within_the_folder_and_not_through_tables_of_contents(tree: Path, line: str, reaches: bool) -> None:
    layers = tree / "impl" / "layers"
    layers.mkdir()
    (layers / "helper.py").write_text("def f():\n    return 1\n")
    (layers / "middle.py").write_text("from impl.layers.helper import f\n")
    (layers / "other.py").write_text("x = 1\n")
    (layers / "__init__.py").write_text("from impl.layers import helper\nTABLE = {'f': helper.f}\n")
    (layers / "table").mkdir()
    (layers / "table" / "__init__.py").write_text("from impl.layers import helper\nTABLE = {'f': helper.f}\n")
    (tree / "impl" / "entry.py").write_text(line.format(folder="impl") + "\n")
    before = Sources(tree).digest("subject", ["impl/entry.py"])
    (layers / "helper.py").write_text("def f():\n    return 2\n")
    assert (Sources(tree).digest("subject", ["impl/entry.py"]) != before) is reaches


def test_what_a_check_asks_of_the_reference_is_what_its_verdict_depends_on() -> None:
    claims = {claim.id: claim for contract in load() for claim in contract.claims}
    whole, rule = (dependency_entries(claims[name])["reference"] for name in ("WHOLE-TORCH", "C-HP-001-RANGE"))
    files = Sources(staleness.ROOT).closure("reference", whole)
    assert {"reference/by_layer.py", "reference/attention.py", "reference/run.py"} <= set(files)
    assert rule == []


def test_a_verdict_on_an_operation_depends_on_no_procedure() -> None:
    sources = Sources(staleness.ROOT)
    claims = {claim.id: claim for contract in load() for claim in contract.claims}

    def comparison(name: str) -> list[str]:
        return sources.closure("comparison", dependency_entries(claims[name])["comparison"])

    for name in ("OP-RMSNORM", "CLS-GRADIENT"):
        assert not [path for path in comparison(name) if path.startswith("falsifiers/subjects/procedures/") or "whole_model" in path]
    assert "falsifiers/whole_model.py" in comparison("WHOLE-TORCH")


def test_every_claim_has_entries_that_exist_and_only_its_own() -> None:
    sources = Sources(staleness.ROOT)
    by_claim = {claim.id: dependency_entries(claim) for contract in load() for claim in contract.claims}
    for claim, parts in by_claim.items():
        assert set(parts) == set(PARTS)
        assert parts["comparison"], claim
        assert parts["subject"], claim
        for part, entries in parts.items():
            assert len(sources.digest(part, entries)) == 64
    norm = sources.closure("subject", by_claim["OP-RMSNORM"]["subject"])
    assert "impl/operations/layers.py" in norm
    assert "impl/operations/attention.py" not in norm
    assert "reference/rms_norm.py" in sources.closure("reference", by_claim["OP-RMSNORM"]["reference"])
    forward = sources.closure("subject", by_claim["CLS-FORWARD"]["subject"])
    assert {"impl/decoder.py", "impl/classifier.py", "impl/operations/attention.py", "impl/operations/layers.py"} <= set(forward)
    assert "impl/corpus.py" in sources.closure("subject", by_claim["CLS-CORPUS-REFUSES"]["subject"])


def test_changed_claim_makes_its_own_verdict_stale(evidence: Path, tree: Path) -> None:
    contract = tree / "contracts" / "sample-v1.yaml"
    contract.write_text(contract.read_text().replace("rms: 1.5", "rms: 2.5", 1))
    assert reasons(evidence, tree) == ["SOFTMAX: the claim has changed"]
    assert "STALE, 1 of 2 verdicts: 1 × the claim has changed" in listing(collect(evidence.parent, current_tree(tree)))


def test_removed_claim_makes_its_verdict_stale(evidence: Path, tree: Path) -> None:
    contract = tree / "contracts" / "sample-v1.yaml"
    contract.write_text(yaml.safe_dump({**CONTRACT, "claims": CONTRACT["claims"][:1]}))
    assert reasons(evidence, tree) == ["SOFTMAX-TOO: the claim no longer exists"]


def test_evidence_lists_device_date_result_and_staleness(evidence: Path, tree: Path) -> None:
    (tree / "impl" / "norm.py").write_text("x = 1\n")
    line = listing(collect(evidence.parent, current_tree(tree))).splitlines()[1]
    for expected in (
        "gpu.jsonl",
        "cuda (NVIDIA H200)",
        "2025-03-01",
        "HELD: 2 held",
        "STALE, 2 of 2 verdicts: 2 × its subject has changed",
    ):
        assert expected in line


def test_commands_mark_what_is_stale(
    evidence: Path, tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "impl" / "norm.py").write_text("x = 1\n")
    monkeypatch.setattr(staleness, "ROOT", tree)
    out = evidence.parent / "out"
    assert main(["evidence", "--folder", str(evidence.parent)]) == 0
    assert "STALE, 2 of 2 verdicts" in capsys.readouterr().out
    assert main(["render", str(evidence), "--output", str(out), "--against-tree"]) == 0
    assert capsys.readouterr().out.startswith("HELD: 2 held, 2 STALE")
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


def test_digests_of_this_checkout_can_be_taken() -> None:
    assert set(tree_digests(staleness.ROOT)) == set(FOLDERS)
