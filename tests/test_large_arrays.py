"""Claims on arrays of more elements than 32 bits count: how they are asked on a CPU, with a small bound, and on a GPU without room."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS
from torch import Tensor

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.runner import vet
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.subjects.functions import Functions
from blackswan.falsifiers.subjects.guards import Guards
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.isolated import Isolated
from blackswan.falsifiers.subjects.named import Named
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.falsifiers.subjects.repeated import Repeated
from blackswan.impl.operations import OPERATIONS
from tests import cheating_subjects
from tests.cheating_subjects import WRAPPING

LARGE = {name: claim for name, claim in CLAIMS.items() if name.startswith("LARGE-")}
ROWS = {"rms_norm": 64, "swiglu": 64, "softmax": 64, "linear": 64, "rope": 16, "attention": 1, "cross_entropy_per_sample": 8}
"""The first row of each operation's input that begins beyond WRAPS elements."""
FILE = Path(cheating_subjects.__file__)


def verdict(claim: Claim, function: Any) -> Verdict:
    """The verdict of the claim on a function in this process."""
    named = {claim.operation or "": function}
    return falsify(claim, "bfloat16", Functions(named, "a function", within=Guards()), Options(shrink=False))


@pytest.mark.parametrize("name", sorted(LARGE))
def test_an_index_that_wraps_is_caught_and_a_wide_one_holds(name: str) -> None:
    claim = LARGE[name]
    assert verdict(claim, OPERATIONS[claim.operation or ""]).state is State.HELD
    wrapping = verdict(claim, WRAPPING[claim.operation or ""])
    assert wrapping.state is State.FALSIFIED
    assert wrapping.comparison is not None
    if not name.endswith("-GRADIENT"):  # the gradient of rows that were read twice is wrong where they are
        assert wrapping.comparison.index[0] >= ROWS[claim.operation or ""]


def test_a_row_that_was_never_written_is_named() -> None:
    def unwritten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        y[:50] = cheating_subjects.honest(x[:50], weight, eps)
        return y

    falsified = verdict(LARGE["LARGE-RMSNORM"], unwritten)
    assert falsified.reason == "asked for 78 rows, which repeat those of the case"
    found = falsified.comparison
    assert found is not None
    assert (found.reason, found.index[0] >= 50) == ("non-finite", True)


def test_an_index_that_wraps_is_caught_by_no_other_claim() -> None:
    claims = [claim for claim in CLAIMS.values() if claim.operation == "rms_norm" and claim.id.startswith("OP-")]
    subject = Functions({"rms_norm": WRAPPING["rms_norm"]}, "wrapping", within=Guards())
    assert {falsify(claim, "bfloat16", subject, Options()).state for claim in claims} == {State.HELD}


def test_the_implementation_answers_by_rows_as_the_functions_do() -> None:
    x, eps = np.random.default_rng(0).standard_normal((3, 8)), {"eps": 1e-6}
    inputs, upstream = {"x": x, "weight": np.ones(8)}, {"y": x[::-1].copy()}
    subjects = Implementation("cpu"), Functions({"rms_norm": OPERATIONS["rms_norm"]}, "functions")
    for cotangents in (None, upstream):
        one, other = (each.at_rows("rms_norm", inputs, eps, "float32", 12, [0, 5, 11], cotangents) for each in subjects)
        assert one.keys() == other.keys() == {"x" if cotangents else "y"}
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
            assert value.shape == (3, 8)


def test_a_claim_is_not_run_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named = [f"{FILE}:honest", "--operation", "rms_norm", "--claim", "LARGE-RMSNORM", "--verdicts", str(tmp_path / "v.jsonl")]
    assert vet.main(named) == vet.EXIT_NOTHING_HELD
    assert "NOT_RUN    LARGE-RMSNORM in bfloat16" in (said := capsys.readouterr().out)
    assert "the claim is about cuda, and this run's device is cpu" in said


def test_the_large_arrays_stay_in_the_process_of_the_subject() -> None:
    subject = Isolated(Named(f"{FILE}:honest", "rms_norm"))
    try:
        assert falsify(LARGE["LARGE-RMSNORM"], "bfloat16", subject, Options()).state is State.HELD
        found = subject.at_rows(
            "rms_norm", {"x": np.ones((3, 4)), "weight": np.ones(4)}, {"eps": 0.0}, "float32", 3 * 10**6, [3 * 10**6 - 1]
        )
    finally:
        subject.close()
    assert found["y"].tolist() == [[1.0] * 4]


class Scarce(Functions):
    """A subject that computes on the CPU as if on a GPU whose memory takes no more than `most` rows."""

    def __init__(self, most: int) -> None:
        super().__init__({"rms_norm": OPERATIONS["rms_norm"]}, "scarce")
        self.device, self.most, self.asked = "cuda", most, list[int]()

    def at_rows(
        self, operation: str, inputs: Any, scalars: Any, dtype: str, count: int, rows: Any, cotangents: Any = None
    ) -> dict[str, Any]:
        """Lacks for more rows."""
        self.asked.append(count)
        if count > self.most:
            raise Lacks("no room")
        return super().at_rows(operation, inputs, scalars, dtype, count, rows, cotangents)


@pytest.mark.parametrize(("most", "state", "tries"), [(1000, State.HELD, 1), (100, State.HELD, 2), (10, State.NOT_RUN, 2)])
def test_the_largest_bound_that_there_is_room_for_is_asked(most: int, state: State, tries: int) -> None:
    claim = replace(LARGE["LARGE-RMSNORM"], arguments={"elements": [2**15, 2**17]})
    subject = Scarce(most)
    found = falsify(claim, "bfloat16", subject, Options(examples=1))
    assert found.state is state
    assert found.reason == (None if state is State.HELD else "no room")
    assert subject.asked[:tries] == [143, 52][:tries]


@pytest.mark.parametrize(("free", "message"), [(10, "need 0 GiB at least, and cuda has 0 GiB free"), (10**9, "out of memory")])
def test_a_gpu_without_room_is_no_error_of_the_subject(free: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: Mapping[str, Any] = {"x": torch.ones(2, 4), "weight": torch.ones(4)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    class OnCuda:
        """A tensor that says that it is on a GPU."""

        def __init__(self, plain: Tensor) -> None:
            self.plain, self.device = plain, torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plain, name)

        def __getitem__(self, row: int) -> Tensor:
            return self.plain[row]

        def __len__(self) -> int:
            return len(self.plain)

    def exhausting(_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory. Tried to allocate")

    whole = Repeated(signatures()["rms_norm"], 6, [5])
    with pytest.raises(Lacks, match=f"outputs of rms_norm for 6 rows .*{message}"):
        whole.around(exhausting)({name: OnCuda(value) for name, value in given.items()})  # type: ignore[misc]
