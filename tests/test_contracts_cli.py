"""The contracts' command line: what it prints, and its exit statuses."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from blackswan import contracts
from blackswan.contracts import Vocabulary, fields, load_operations
from blackswan.contracts.__main__ import UsageError, _values, main
from blackswan.contracts.advice import Finding, check
from blackswan.contracts.model import Check, Location, Mutant
from blackswan.impl import settings
from blackswan.impl.config import ClassifyConfig

NOWHERE = Location("vocabulary.yaml", 1)
VOCABULARY = Vocabulary(
    load_operations(),
    {"sums": Check("sums", ("invariant",), "The entries sum to 1.", NOWHERE, arguments=("axis",))},
    {
        "rms_norm_eps_hard_coded": Mutant("rms_norm_eps_hard_coded", "rms_norm", ("S2",), "Epsilon is always 1e-5.", NOWHERE),
        "defaults_of_the_ancestor": Mutant("defaults_of_the_ancestor", None, ("S31",), "Alpha equals rank.", NOWHERE),
    },
)
CONTRACT = """\
contract: small
version: 1.2.3
title: Small
sources:
  higham2002: {cite: "Higham, Accuracy and Stability", locator: "§3"}
claims:
  - id: SMALL-PARITY
    severity: P0
    kind: parity
    operation: rms_norm
    statement: RMSNorm equals the reference within the rounding noise of its dtype, as wide and as tall as it may be.
    domain:
      sizes: {rows: {min: 1, max: 4}, hidden: 8}
      dtype: [float32]
      scalars: {eps: 1e-6}
      require: [rows < 5]
      boundary: [{sizes: {rows: 4}}]
    tolerance: {basis: rounding, factors: {rms: 1.5, row: 4, max: 3}}
    must_catch: [rms_norm_eps_hard_coded]
    sources: {higham2002: "§3.1"}
    origin: [F-CUDA-007]
  - id: SMALL-SUM
    severity: P1
    kind: invariant
    operation: softmax
    check: sums
    arguments: {axis: last}
    statement: Sums to one.
    domain: {sizes: {rows: 1, classes: 2}, dtype: [float32]}
    tolerance: {basis: literal, value: 1e-5, unit: absolute, source: known}
    must_catch: [rms_norm_eps_hard_coded]
"""
RULES_FILE = Path(contracts.__file__).parent / "qlora-hyperparameters-v1.yaml"
CONFIG = "learning_rate: 2e-4\nlora_rank: 16\nlora_alpha: 32\nbatch_size: 16\naccumulation_steps: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one contract, which the commands take for their own."""
    (tmp_path / "small-v1.yaml").write_text(CONTRACT, encoding="utf-8")
    monkeypatch.setattr(contracts.loader, "folders", lambda: [tmp_path])
    monkeypatch.setattr(contracts.loader, "load_vocabulary", lambda: VOCABULARY)
    monkeypatch.setattr("blackswan.contracts.__main__.load_vocabulary", lambda: VOCABULARY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lint_counts_what_is_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint"]) == 0
    assert main(["lint", str(folder / "small-v1.yaml")]) == 0
    assert capsys.readouterr().out == "1 contracts, 2 claims, no problems\n" * 2


def test_lint_prints_file_line_key_and_the_nearest_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "small-v1.yaml").write_text(
        CONTRACT.replace("hidden: 8", "hiden: 8").replace("severity: P1", "severity: P7"), encoding="utf-8"
    )
    assert main(["lint"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "small-v1.yaml:13: claims[0].domain.sizes: missing size 'hidden' of the operation 'rms_norm'",
        "small-v1.yaml:13: claims[0].domain.sizes.hiden: unknown size 'hiden'; expected one of hidden, rows; did you mean 'hidden'?",
        "small-v1.yaml:23: claims[1].severity: unknown severity 'P7'; expected one of P0, P1, P2",
        "3 problems",
    ]


@pytest.mark.usefixtures("folder")
def test_list_is_a_table_that_can_be_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["CLAIM", "CONTRACT", "SEV", "KIND", "OPERATION", "STATEMENT"]
    assert first.split()[:5] == ["SMALL-PARITY", "small", "P0", "parity", "rms_norm"]
    assert first.endswith("…")
    assert second.index("Sums") == header.index("STATEMENT")
    assert main(["list", "--kind", "invariant"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["CLAIM", "SMALL-SUM"]
    assert main(["list", "--severity", "P0"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["CLAIM", "SMALL-PARITY"]


@pytest.mark.usefixtures("folder")
def test_show_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "SMALL-PARITY"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "small-v1.yaml:7", "P0 parity, small 1.2.3", "rms_norm: y = x / sqrt", "x [rows, hidden] real", "eps: real", "rows: 1 to 4",
        "hidden: 8", "rows < 5", "rows = 4, hidden = 8, eps = 1e-06, normal", "float32: rms 1.5, row 4, max 3",
        "rms_norm_eps_hard_coded (S2): Epsilon is always", "normal: from the standard normal distribution",
        "source higham2002 Higham, Accuracy and Stability; §3.1", "F-CUDA-007",
    ):  # fmt: skip
        assert expected in shown, shown
    assert main(["show", "SMALL-SUM"]) == 0
    shown = capsys.readouterr().out
    assert "The entries sum to 1." in shown
    assert "1e-05 absolute (known)" in shown
    assert "argument axis" in shown


def test_show_has_a_rule_with_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "C-HP-004-WASTE"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "max_seq_len <= 2.0 * p99_length",
        "max_seq_len = p99_power_of_two",
        "violates       {'max_seq_len': 512, 'p99_length': 120}",
    ):
        assert expected in shown, shown


@pytest.mark.usefixtures("folder")
def test_an_unknown_claim_has_its_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "SMALL-PARTY"]) == 2
    assert "unknown claim 'SMALL-PARTY'; expected one of SMALL-PARITY, SMALL-SUM; did you mean 'SMALL-PARITY'?" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_usage_errors_have_their_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "absent-v1.yaml"]) == 2
    for wrong in ([], ["lnt"], ["list", "--kind", "speed"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
    assert "absent-v1.yaml: no such file or folder" in capsys.readouterr().err


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hyperparameter contract, so that no other contract takes part."""
    found = contracts.load([RULES_FILE], VOCABULARY)
    monkeypatch.setattr("blackswan.contracts.__main__.load", lambda: found)


@pytest.mark.usefixtures("rules")
def test_check_fails_on_errors_and_not_on_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, statistics = tmp_path / "config.yaml", tmp_path / "statistics.yaml"
    statistics.write_text("p99_length: 100\n")
    config.write_text(CONFIG)
    assert main(["check", str(config)]) == 0
    assert capsys.readouterr().out.startswith("no findings\nnot judged, for want of model_params: ")
    config.write_text(CONFIG.replace("alpha: 32", "alpha: 40") + "max_seq_len: 512\n")
    assert main(["check", str(config), "--statistics", str(statistics)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "warn  C-HP-003-ALPHA: lora_alpha 40 is outside a quarter of lora_rank 16 to twice it",
        "      recommended: lora_alpha: 32.0",
    ]
    assert lines[2].startswith("      source: Raschka: Finetuning LLMs with LoRA and QLoRA")
    assert any(line.startswith("      note: The original demanded twice the rank") for line in lines)
    assert "      recommended: max_seq_len: 128" in lines
    assert "all recommendations together leave no finding" in lines
    assert lines[lines.index("2 findings, 0 of them errors") + 2].startswith("not judged, for want of")
    assert any("not judged, for want of epochs, imbalance_ratio, minority_count, sample_count" in line for line in lines)
    config.write_text(CONFIG.replace("2e-4", "-2e-4"))
    assert main(["check", str(config)]) == 1
    assert "error C-HP-001-POSITIVE: learning_rate is -0.0002" in capsys.readouterr().out


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 2e-4\nlora_rnk: 3\nbatch_size: x\n", "config.yaml:2: lora_rnk: unknown field 'lora_rnk'; expected"),
        ("learning_rate: 2e-4\nlora_rnk: 3\nbatch_size: x\n", "config.yaml:3: batch_size: is 'x'; expected an integer"),
        ("lora_rnk: 3\n", "did you mean 'lora_rank'?"),
        ("a: [\n", "is not YAML"),
        ("", "is empty"),
    ],
)
def test_a_configuration_that_cannot_be_judged_is_a_usage_error(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert main(["check", str(config)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("epochs: 3\nlora_alpha: -.inf", ["2: lora_alpha: is -inf; expected a finite number"]),
        (f"pooling: 0x1{'0' * 5000}", ["1: pooling: is a whole number of 20001 bits; expected none of more than 4096"]),
        (
            f"class_weights: [1.0, 0x1{'0' * 5000}]",
            ["1: class_weights[1]: is a whole number of 20001 bits; expected none of more than 4096"],
        ),
        ("lora_alpha: -2e31", ["1: lora_alpha: is -2e+31; expected at least -1e+30"]),
        (f"epochs: 1{'0' * 400}", [f"1: epochs: is 1{'0' * 59}…; expected at most {2**63 - 1}"]),
    ],
)
def test_numbers_that_no_rule_can_compute_with_are_a_usage_error(
    tmp_path: Path, text: str, problems: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    assert main(["check", "config.yaml"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [f"config.yaml:{problem}" for problem in problems]


@pytest.mark.usefixtures("rules")
def test_statistics_have_the_same_bounds_but_for_an_empty_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which `python -m impl train` writes an infinite imbalance."""
    config, statistics = tmp_path / "config.yaml", tmp_path / "statistics.yaml"
    config.write_text(f"{CONFIG}seed: {2**63 - 1}\nmax_seq_len: 1000000000000000\n")
    for text, problem in (
        ("p99_length: .inf", "p99_length: is inf; expected a finite number"),
        ("p99_length: 1.7e308", "p99_length: is 1.7e+308; expected at most 1e+15"),
        ("imbalance_ratio: -.inf", "imbalance_ratio: is -inf; expected at least 1"),
    ):
        statistics.write_text(text)
        assert main(["check", str(config), "--statistics", str(statistics)]) == 2
        assert f"statistics.yaml:1: {problem}" in capsys.readouterr().err
    statistics.write_text("p99_length: 1e15\nimbalance_ratio: .inf\nminority_count: 0")
    assert main(["check", str(config), "--statistics", str(statistics)]) == 0
    assert "C-HP-008-EMPTY-CLASS" in capsys.readouterr().out


def test_statistics_that_contradict_each_other_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "statistics.yaml").write_text("minority_count: 5\nsample_count: 4\n")
    assert main(["check", str(tmp_path / "config.yaml"), "--statistics", str(tmp_path / "statistics.yaml")]) == 2
    assert "minority_count: is 5; expected no more than sample_count, 4" in capsys.readouterr().err


TRIED = [
    *("0", "1", "2", "-1", "0.5", "0.999", "1.0", "1.1", "-0.1", "2.0", "1e-4", "1e30", "1e31", str(2**63 - 1), str(2**63)),
    *("0x10", "0o20", "016", "+3", "1.", "2e0", "1_000", ".nan", ".inf", "-.inf", "null", "~", "true", "FALSE", "yes", "x", "''", "'16'"),
    *("[]", "{a: 1}", "[[1]]", "balanced", "balanced_over_classes", "[1.0, 2.0]", "[1, 2]", "[1.0]", "[1.0, 2.0, 3.0]", "[0.0, 1.0]"),
    *("[1.0, .inf]", "[1, x]", "[1, 1e31]", "q_v", "all", "q_proj", "'q_proj,v_proj'", "'q_proj, v_proj'", "w_proj", "[q_proj]", "[q_v]"),
    *("[q_proj, q_proj]", "[v_proj, q_proj]", "[1]", "constant", "cosine", "linaer", "mean", "last", "first", "left", "right", "bfloat16"),
    *("float16", "auto", "fused", "torch", "Torch"),
]
"""Values that are tried for every setting."""


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ClassifyConfig)])
def test_check_refuses_what_train_refuses_and_nothing_else(name: str, tmp_path: Path) -> None:
    """A refusal is a file that cannot be read so, or a finding of severity error."""
    errors = [claim for claim in contracts.load([RULES_FILE], VOCABULARY)[0].claims if claim.rule and claim.rule.severity == "error"]
    path, beside = tmp_path / "config.yaml", {"num_classes": "2", "multi_label": "false"}
    differ = []
    for value in TRIED:
        path.write_text("".join(f"{key}: {said}\n" for key, said in {**beside, name: value}.items()))
        by_train = _refusal(lambda: settings.resolve(494_032_768, settings.read_file(path)))
        by_check = _refusal(lambda: _errors(check(_values(path, fields.CONFIG), {}, errors)))
        if (by_train is None) != (by_check is None):
            differ.append((value, by_train, by_check))
    assert differ == []


def _refusal(judge: Callable[[], object]) -> str | None:
    try:
        judge()
    except (ValueError, UsageError) as error:
        return str(error)
    return None


def _errors(found: list[Finding]) -> None:
    if errors := [finding.message for finding in found if finding.severity == "error"]:
        raise ValueError(errors)


def test_a_folder_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    for line in (["check", ""], ["check", "config.yaml", "--statistics", "."]):
        assert main(line) == 2
        assert capsys.readouterr().err == "python -m contracts: .: is a folder; expected a YAML file\n"


RULE = """\
contract: site
version: 1.0.0
title: Site
claims:
  - id: SITE-RULE
    severity: P2
    kind: rule
    statement: A rule of somebody else.
    domain: {scalars: {epochs: {min: 1, max: 3}, lora_targets: [[q_proj]]}}
    rule: {when: epochs != null && lora_targets != null, require: "REQUIRE", severity: warn, message: "MESSAGE"}
    examples: {holds: [{}], violates: [{epochs: 1}]}
"""
UNFORESEEN = [
    ("1 / 0 == 1", "ZeroDivisionError: division by zero"),
    ("int(1e300) == 1", "OverflowError: "),
    ("lora_targets[5] == 'q_proj'", "IndexError: "),
]


@pytest.mark.parametrize(("require", "reason"), UNFORESEEN)
@pytest.mark.parametrize("line", [["lint"], ["lint", "."], ["lint", "site-v1.yaml"], ["list"], ["show", "SMALL-SUM"]])
def test_a_rule_that_cannot_be_evaluated_is_a_problem_of_its_file(
    folder: Path, line: list[str], require: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "site-v1.yaml").write_text(RULE.replace("REQUIRE", require).replace("MESSAGE", "few"))
    assert main(line) == 1
    problem, count = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"site-v1.yaml:10: claims[0].rule: cannot be evaluated ({reason}")
    assert problem.endswith("expected expressions and a message that give a value on all of domain.scalars")
    assert count == "1 problem"


def test_a_rule_that_fails_on_a_configuration_alone_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "site-v1.yaml").write_text(RULE.replace("REQUIRE", "6 / int(epochs) > 1").replace("MESSAGE", "few"))
    (folder / "config.yml.txt").write_text("epochs: 0\nlora_targets: [q_proj]\n")
    assert main(["check", "config.yml.txt"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "site-v1.yaml:5: SITE-RULE: cannot be evaluated on this configuration (ZeroDivisionError: division by zero in CEL expression)",
        "1 problem",
    ]


def test_the_installed_contracts_are_without_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint"]) == 0, capsys.readouterr().err


def test_the_page_of_calls_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calls"]) == 0
    page = Path(contracts.__file__).parent / "CALLS.md"
    assert capsys.readouterr().out == page.read_text(encoding="utf-8"), "python -m contracts calls > contracts/CALLS.md"
