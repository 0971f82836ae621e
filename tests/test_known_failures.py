"""Known failures: what an entry excuses, and what it does not."""

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from falsifiers_claims import CLAIMS, LOADED
from terminal_processes import ROOT

from blackswan.contracts import ContractError
from blackswan.contracts.model import Claim, Domain
from blackswan.falsifiers.runner.campaign import Campaign, Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.known_failures import KnownFailure, load
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.falsifiers.test_claims import conclude

RESIDUAL = CLAIMS["OP-RESIDUAL"]
ON_CUDA = replace(RESIDUAL, id="ON-CUDA", domain=Domain(dtype=("float32",), device=("cuda",)))
ENTRY = {"claim": "OP-RESIDUAL", "dtype": "float32", "reason": "The branch is lost.", "expiry": "2999-01-31"}


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    """A file of known failures; JSON is YAML."""
    path = folder / "known-failures.yaml"
    path.write_text(json.dumps({"failures": entries}, indent=1), encoding="utf-8")
    return path


def listed(folder: Path, *entries: dict[str, Any]) -> list[KnownFailure]:
    """What such a file is read as."""
    return load([*CLAIMS.values(), ON_CUDA], write(folder, *entries))


def outcome(state: State, entries: list[KnownFailure], claim: Claim = RESIDUAL, device: str = "cpu") -> tuple[str, str]:
    """The test's outcome for a verdict, and its message."""
    campaign = Campaign(ReferenceSubject(), LOADED, Options(), Selection(), None, Path("unused"), known_failures=entries)  # type: ignore[arg-type]  # no real input is read
    try:
        conclude(Verdict(claim, "float32", device, state, "a reason"), campaign, lambda *_: None)
    except (pytest.fail.Exception, pytest.skip.Exception, pytest.xfail.Exception) as raised:
        return type(raised).__name__, str(raised)
    return "passed", ""


def test_the_shipped_file_is_in_order() -> None:
    for entry in load(CLAIMS.values()):
        assert entry.expiry >= datetime.datetime.now(datetime.UTC).date()


TODAY = datetime.datetime.now(datetime.UTC).date()
YESTERDAY = str(TODAY - datetime.timedelta(days=1))
CUDA = {"device": "cuda"}
OUTCOMES: list[tuple[State, dict[str, str], str, str, str]] = [
    (State.FALSIFIED, {}, "cpu", "XFailed", "known until 2999-01-31: The branch is lost."),
    (State.FALSIFIED, {"expiry": str(TODAY)}, "cpu", "XFailed", "known until"),
    (State.FALSIFIED, CUDA, "cuda:1", "XFailed", "known until"),
    (State.FALSIFIED, CUDA, "cpu", "Failed", "FALSIFIED"),
    (State.FALSIFIED, {"dtype": "bfloat16"}, "cpu", "Failed", "FALSIFIED"),
    (State.FALSIFIED, {"claim": "OP-LINEAR"}, "cpu", "Failed", "FALSIFIED"),
    (State.HELD, {}, "cpu", "Failed", "known-failures.yaml:3: OP-RESIDUAL in float32 holds; remove it"),
    *((state, {"expiry": YESTERDAY}, "cpu", "Failed", f"expired on {YESTERDAY}") for state in (State.FALSIFIED, State.HELD, State.NOT_RUN)),
    (State.VACUOUS, {}, "cpu", "Failed", "a reason"),
    (State.FLAKY, {}, "cpu", "Failed", "a reason"),
    (State.NOT_RUN, {}, "cpu", "Skipped", "a reason"),
]


@pytest.mark.parametrize(("state", "changes", "device", "kind", "message"), OUTCOMES)
def test_an_entry_excuses_its_own_falsified_claim_until_it_expires(
    tmp_path: Path, state: State, changes: dict[str, str], device: str, kind: str, message: str
) -> None:
    found, said = outcome(state, listed(tmp_path, {**ENTRY, **changes}), device=device)
    assert (found, message in said) == (kind, True), said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claim": "OP-RESIDUL"}, "did you mean 'OP-RESIDUAL'?"),
        ({"dtype": "float16"}, "OP-RESIDUAL is not claimed in float16; expected float32 or bfloat16"),
        ({"claim": "ON-CUDA", "device": "cpu"}, "ON-CUDA is not claimed on cpu; expected cuda"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"expiry": "31.01.2999"}, "expected a day as YYYY-MM-DD"),
        ({"expiry": 2999}, "is 2999; expected a day"),
        ({"expiry": "2999-02-31"}, "day is out of range for month; expected a day as YYYY-MM-DD"),
        ({"reason": " "}, "expected text that is not blank"),
        ({"expires": "2999-01-31"}, "did you mean 'expiry'?"),
    ],
)
def test_an_entry_that_excuses_nothing_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as caught:
        listed(tmp_path, {**ENTRY, **changes})
    assert message in str(caught.value)
    assert "known-failures.yaml:" in str(caught.value)


@pytest.mark.parametrize("key", ["claim", "dtype", "reason", "expiry"])
def test_an_entry_without_a_key_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ContractError, match=f"missing key '{key}'"):
        listed(tmp_path, {name: value for name, value in ENTRY.items() if name != key})


def test_an_entry_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="listed twice"):
        listed(tmp_path, ENTRY, ENTRY)


@pytest.mark.parametrize(
    ("text", "message"), [("failures: 3\n", "expected a list"), ("failures: [3]\n", "expected a mapping"), ("fails: []\n", "unknown key")]
)
def test_a_file_that_is_no_list_of_entries_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "known-failures.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ContractError, match=message):
        load(CLAIMS.values(), path)


RUN = """
import sys
from pathlib import Path
import pytest
from blackswan.falsifiers.runner import known_failures
from blackswan.impl.operations import OPERATIONS
known_failures.FILE = Path(sys.argv[1])
if sys.argv[2] == "wrong":
    OPERATIONS["residual_add"] = lambda x, branch: branch * 1.0
quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this script imports what pytest would rewrite
sys.exit(pytest.main(["falsifiers", "-q", *quiet, "--claim", "OP-RESIDUAL", "--claim", "OP-EMBEDDING", "--verdicts", sys.argv[3]]))
"""


def run(folder: Path, operation: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, output and records of a run in which OP-RESIDUAL is listed in both dtypes."""
    path = write(folder, ENTRY, {**ENTRY, "dtype": "bfloat16"})
    verdicts = folder / "verdicts.jsonl"
    command = [sys.executable, "-c", RUN, str(path), operation, str(verdicts)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return found.returncode, found.stdout, [json.loads(line) for line in verdicts.read_text().splitlines()]


def test_a_run_with_known_failures_passes_and_shows_them(tmp_path: Path) -> None:
    status, output, records = run(tmp_path, "wrong")
    assert status == 0, output
    assert "known failure: OP-RESIDUAL in bfloat16 until 2999-01-31: The branch is lost." in output
    assert "2 known failure" in output
    known = {record["dtype"]: record["known_failure"] for record in records if record.get("claim") == "OP-RESIDUAL"}
    assert known == {dtype: {"reason": "The branch is lost.", "expiry": "2999-01-31"} for dtype in ("float32", "bfloat16")}
