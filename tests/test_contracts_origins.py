"""The list of the modelled system's claims: whole, each taken up or refused, and a gap is said with file and line."""

from dataclasses import replace
from pathlib import Path

import pytest

from blackswan import contracts
from blackswan.contracts import Contract, ContractError
from blackswan.contracts.__main__ import main
from blackswan.contracts.origins import origins

NUMBERED = {
    **{"F-CLASS": range(1, 9), "F-CUDA": range(1, 15), "F-DP": range(1, 7), "C-HP": range(1, 9), "EVAL-METHODOLOGY": (1, 2)},
    **{"FALSIFY-CUDA-FORWARD-PARITY": (1, 2, 3), "INIT-CUDA": (1, 2, 3), "INV-TRAIN": (3, 7, 8), "INV-ARCH-370M": (1,)},
    **{"C-PRETOK": (1,), "C-GPUBACK": (1,), "C-SYNCWT": (1,)},
}
UNNUMBERED = {"backward-parity": 2, "lora": 5, "quantization": 5, "optimizer": 5, "gpu-backend": 4, "pipeline": 4}
"""Claims without a number there, by contract."""


@pytest.fixture(scope="module")
def installed() -> list[Contract]:
    return contracts.load()


def test_the_list_is_whole_and_every_claim_is_taken_up_or_refused(installed: list[Contract]) -> None:
    found, problems = origins(installed)
    assert [*map(str, problems)] == []
    names = {origin.id for origin in found}
    assert {name for name in names if "/" not in name} == {f"{name}-{n:03}" for name, numbers in NUMBERED.items() for n in numbers}
    assert {prefix: sum(name.startswith(f"{prefix}/") for name in names) for prefix in UNNUMBERED} == UNNUMBERED
    assert {origin.id for origin in found if origin.refused} == {
        *("F-CUDA-002", "F-CUDA-008", "F-CUDA-009", "F-CUDA-013", "F-CUDA-014", "F-DP-004", "INIT-CUDA-001")
    }


def test_claims_that_a_refusal_names_exist(installed: list[Contract]) -> None:
    claims = {claim.id for contract in installed for claim in contract.claims}
    text = " ".join(origin.refused or "" for origin in origins(installed)[0])
    named = {word.strip("().,;") for word in text.split() if word.strip("().,;").startswith(("DEV-", "CLS-"))}
    assert named
    assert named <= claims


def test_a_claim_that_goes_leaves_a_gap_that_is_said(installed: list[Contract]) -> None:
    left = [replace(each, claims=tuple(claim for claim in each.claims if claim.id != "DP-SHARDS")) for each in installed]
    (problem,) = origins(left)[1]
    assert problem.file.endswith("origins.yaml")
    assert (problem.line > 1, problem.key, problem.message) == (True, "origins.F-DP-002", "has neither a claim nor `refused`")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("origins: {F-DP-002: {statement: x, refused: no}}", "is refused, and DP-SHARDS took it up"),
        ("origins: {F-DP-02: {statement: x, refused: no}}", "unknown origin 'F-DP-002'; expected F-DP-02; did you mean 'F-DP-02'?"),
    ],
)
def test_a_claim_that_is_refused_and_taken_up_or_unknown(installed: list[Contract], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "origins.yaml").write_text(text)
    assert message in [problem.message for problem in origins(installed, tmp_path / "origins.yaml")[1]]


def test_an_origin_without_a_statement_is_refused(installed: list[Contract], tmp_path: Path) -> None:
    (tmp_path / "origins.yaml").write_text("origins: {F-DP-002: {refused: no}}")
    with pytest.raises(ContractError, match="missing key 'statement'"):
        origins(installed, tmp_path / "origins.yaml")


def test_the_command_shows_claims_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["origins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("F-DP-002: The workers' shares are complete and disjoint.") + 1] == "    claims: DP-SHARDS"
    assert any(line.startswith("    refused: A run would go on elsewhere") for line in lines)
    assert lines[-1] == "76 origins, 69 with claims, 7 refused"
