"""Text for the terminal: the story of a claim that did not hold, and the table at the end."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blackswan.falsifiers.numeric.attack import STAGES
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.runner.verdict import Culprit, State, Verdict

Record = Mapping[str, Any]


def story(verdict: Verdict) -> str:
    """Culprit, statement, smallest case, worst element, error against tolerance, and the line that replays it."""
    claim = verdict.claim
    lines = [
        f"{verdict.state.value}  {claim.id} ({claim.severity}, {claim.contract}, {claim.location.file}:{claim.location.line})",
        *_blame(verdict.culprit),
        f"  claim      {claim.statement}",
        f"  attacked   {claim.operation or claim.check or 'a rule'} in {verdict.dtype} on {verdict.device}: {verdict.tally.run} cases",
    ]
    if verdict.reason:
        lines.append(f"  reason     {verdict.reason}")
    if verdict.case is not None:
        case = verdict.case.describe()
        drawn = {**case["scalars"], **{name: case[name] for name in ("flavour", "seed", "digest")}}
        rows = [{"seed": case["seed"]}] if claim.system else [case["sizes"], drawn]
        lines += [f"  {label:<10} {_pairs(row)}" for label, row in zip(("case", ""), rows, strict=False)]
    if verdict.comparison is not None:
        lines += worst_element(verdict.comparison)
    if verdict.replay:
        lines.append(f"  replay     {verdict.replay}")
    return "\n".join(lines)


def _blame(culprit: Culprit | None) -> Iterable[str]:
    if culprit is None:
        return
    yield f"  culprit    {culprit.operation} at {culprit.path}: {culprit.explanation}"
    if culprit.mutant:
        yield f"             the answer equals the mutant {culprit.mutant}, to {culprit.distance:.2g}"
    if culprit.suspects or culprit.changed:
        changed = [f"{', '.join(culprit.changed)} (changed, and run)"] if culprit.changed else []
        others = [name for name in culprit.suspects if name not in culprit.changed]
        ranked = [f"{', '.join(others)} (ranked, not proven)"] if others else []
        yield f"  suspects   {'; '.join([*changed, *ranked])}"


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def worst_element(comparison: Comparison) -> Iterable[str]:
    """The worst element of a comparison, and its error against the tolerance."""
    found, headroom = comparison.describe(), comparison.headroom
    at = f" at {found['index']}" if found["index"] else ""
    numbers = f": expected {_number(found['expected'])}, got {_number(found['actual'])}"
    yield f"  worst      {found['tensor']}{at}{'' if found['expected'] is found['actual'] is None else numbers}"
    if found["error"] is not None:
        ulp = "" if found["ulp"] is None else f", {found['ulp']:.3g} ulp"
        cosine = "" if found["cosine"] is None else f", cosine {found['cosine']:.9f}"
        against = f"{found['metric']} {_number(found['error'])} against {_number(found['limit'])}"
        yield f"  error      {against}: {headroom:.3g} × the tolerance{ulp}{cosine}"
    else:
        yield f"  difference {found['metric']}"


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def table(records: Sequence[Record]) -> list[str]:
    """A row a contract: states, worst headroom of what held, seconds."""
    columns = ("contract", "held", "falsified", "not run", "vacuous", "flaky", "worst headroom", "seconds")
    by_contract: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_contract[record["contract"]].append(record)
    rows = [columns] + [_row(name, group) for name, group in sorted(by_contract.items())]
    if len(by_contract) > 1:
        rows.append(_row("all", records))
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]


def _row(name: str, records: Sequence[Record]) -> tuple[str, ...]:
    states = Counter(record["state"] for record in records)
    held = [record for record in records if record["state"] == State.HELD and record["headroom"]]
    worst = max(held, key=lambda record: float(record["headroom"]["worst"]), default=None)
    shown = f"{float(worst['headroom']['worst']):.2f} {worst['claim']} {worst['dtype']}" if worst else "–"
    seconds = sum(record["seconds"]["total"] for record in records)
    order = (State.HELD, State.FALSIFIED, State.NOT_RUN, State.VACUOUS, State.FLAKY)
    return (name, *(str(states[state]) for state in order), shown, f"{seconds:.1f}")


def not_run(records: Iterable[Record]) -> list[str]:
    """Counts the claims that were not run, by reason."""
    reasons = Counter(record["reason"] for record in records if record["state"] == State.NOT_RUN)
    return [f"not run: {count} × {reason}" for reason, count in reasons.most_common()]


def known(records: Iterable[Record]) -> list[str]:
    """The claims that failed as they are known to."""
    return [
        f"known failure: {record['claim']} in {record['dtype']} until {listed['expiry']}: {listed['reason']}"
        for record in records
        if (listed := record["known_failure"]) and record["state"] == State.FALSIFIED
    ]


def failures(records: Iterable[Record]) -> list[str]:
    """Names the verdicts that fail the run, whatever pytest calls them."""
    named = ", ".join(f"{record['claim']} in {record['dtype']} {record['state']}" for record in records)
    return [f"this run fails: {named}"] if named else []


def time_spent(records: Sequence[Record]) -> str:
    """Seconds by stage over all attacks, of all processes together."""
    totals = {stage: sum(record["seconds"].get(stage, 0.0) for record in records) for stage in STAGES}
    totals["rest"] = sum(record["seconds"]["total"] for record in records) - sum(totals.values())
    return "seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in totals.items())
