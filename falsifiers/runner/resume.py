"""Going on with an interrupted run: verdicts are taken over from its file, where nothing that they depend on has changed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.runner.verdict import State, Tally, Verdict
from blackswan.reports.records import RecordError, read

SAME = ("subject", "device", "effort", "seed", "model", "corpus", "digests", "versions")
"""What must be as it was, for a verdict of then to be one of now."""


def former(path: Path, header: Mapping[str, Any], claims: Iterable[Claim]) -> list[tuple[Verdict, dict[str, Any]]]:
    """The verdicts of a file, with their records; none where there is no file yet.

    Raises a ValueError where the file is of another run: other code, versions, device, effort, seed or input, or a replay.
    """
    if not path.exists():
        return []
    try:
        run = read(path)
    except RecordError as error:
        raise ValueError(f"--resume: {error}") from None
    before: Mapping[str, Any] = {**run.header}
    if "replay" in before:
        raise ValueError(f"--resume: {path} is of a replay of one stored case, no attack on a claim; run without --resume")
    for key in SAME:
        if before.get(key) != header.get(key):
            raise ValueError(f"--resume: {path} is of a run with other {key}; run without --resume, or with another --verdicts file")
    known = {claim.id: claim for claim in claims}
    return [(_verdict(known[record["claim"]], record), {**record}) for record in run.verdicts if record["claim"] in known]


def _verdict(claim: Claim, record: Mapping[str, Any]) -> Verdict:
    cases, headroom = record["cases"], record["headroom"]
    worst = Comparison(headroom["tensor"] or "", True, float(headroom["worst"]), headroom["metric"]) if headroom else None
    tally = Tally(cases["run"], cases["compared"], cases["rejected"], worst)
    return Verdict(
        claim,
        record["dtype"],
        record["device"],
        State(record["state"]),
        record["reason"],
        tally,
        seconds=record["seconds"],
        known_failure=record["known_failure"],
    )
