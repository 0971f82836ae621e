"""The Markdown page of a run (GitHub Flavored Markdown)."""

import re
from collections.abc import Iterable, Sequence

from blackswan.reports import words
from blackswan.reports.records import Verdict
from blackswan.reports.summary import HIDDEN, WORDS, Entry, Group, Summary, environment

_SPECIAL = re.compile(r"([\\`*_\[\]|#~!$])")


def render(summary: Summary) -> str:
    """The page as text; the first line has the overall result."""
    sections = [
        [f"# Blackswan: {escape(summary.headline)}", *(f"**{escape(note)}.**" for note in summary.run.notes)],
        _falsified(summary),
        _attention(summary),
        ["## Contracts", _contracts(summary)],
        _not_run(summary),
        _hidden(summary),
        ["## Environment", table(("", ""), ((f"**{name}**", escape(value)) for name, value in environment(summary.run)))],
        *(_claims(group) for group in summary.groups),
    ]
    return "\n\n".join(block for section in sections for block in section) + "\n"


def escape(text: str) -> str:
    """Text that Markdown and the HTML within it take literally, on one line."""
    html = words.plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", html)


def code(text: str) -> str:
    """A code span that holds the text whatever backticks it has; for use outside tables, where `|` is literal."""
    line = words.plain(text)
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are escaped already. A head that starts with `>` is aligned right."""
    rule = " | ".join("---:" if name.startswith(">") else "---" for name in head)
    lines = [" | ".join(name.removeprefix(">") for name in head), rule, *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _falsified(summary: Summary) -> list[str]:
    return ["## Falsified", *(_counterexample(entry) for entry in summary.falsified)] if summary.falsified else []


def _counterexample(entry: Entry) -> str:
    verdict = entry.verdict
    lines = [f"### {escape(_title(verdict))}{_stale(entry)}", "", escape(verdict["statement"]), ""]
    lines += [f"- **{name}**: {escape(value)}" for name, value in facts(entry)]
    found = verdict["counterexample"]
    if found and (command := found["replay"]):
        lines.append(f"- **Replay**: {code(command)}")
    return "\n".join(lines)


def facts(entry: Entry) -> list[tuple[str, str]]:
    """The facts about a falsified claim, as name and value, without the replay line."""
    verdict = entry.verdict
    found = verdict["counterexample"]
    rows: list[tuple[str, str | None]] = [("Reason", verdict["reason"])]
    if found:
        rows += [("Counterexample", words.case(found)), ("Worst element", words.element(found)), ("Error", words.excess(found))]
    rows += [("Culprit", words.culprit(verdict)), ("Known failure", entry.remark), ("Stale", entry.stale)]
    return [(name, value) for name, value in rows if value]


def _attention(summary: Summary) -> list[str]:
    if not summary.attention:
        return []
    lines = []
    for entry in summary.attention:
        text = "; ".join(part for part in (entry.verdict["reason"], entry.remark) if part)
        lines.append(f"- {WORDS[entry.state]}: **{escape(_title(entry.verdict))}**{_stale(entry)}: {escape(text)}")
    return ["## Needs attention", "\n".join(lines)]


def _contracts(summary: Summary) -> str:
    head = ("contract", ">held", ">falsified", ">not run", ">vacuous", ">flaky", ">worst headroom", ">time")
    rows = []
    for group in summary.groups:
        counts = (str(group.counts[state]) for state in WORDS)
        rows.append((f"{escape(group.contract)} {escape(group.version)}", *counts, words.figure(group.worst), words.seconds(group.seconds)))
    total = sum(group.seconds for group in summary.groups)
    rows.append(("**all**", *(f"**{summary.counts[state]}**" for state in WORDS), "", words.seconds(total)))
    return table(head, rows)


def _not_run(summary: Summary) -> list[str]:
    if not summary.not_run:
        return []
    return ["## Not run", table(("reason", ">verdicts"), ((escape(reason), str(count)) for reason, count in summary.not_run))]


def _hidden(summary: Summary) -> list[str]:
    if not summary.hidden:
        return []
    return ["## Hidden by rounding", HIDDEN, table(("claim", "dtype", "bug"), (tuple(map(escape, row)) for row in summary.hidden))]


def _claims(group: Group) -> list[str]:
    head = ("claim", "dtype", "device", "severity", "verdict", ">headroom", "worst case", "statement")
    return [f"## {escape(group.contract)} {escape(group.version)}", table(head, (_row(entry) for entry in group.entries))]


def _row(entry: Entry) -> tuple[str, ...]:
    verdict = entry.verdict
    state = WORDS[entry.state] if entry.state == "HELD" else f"**{WORDS[entry.state]}**"
    known = " (known failure)" if entry.excused else ""
    reason = f"<br>{escape(verdict['reason'])}" if verdict["reason"] else ""
    cells = (escape(verdict["claim"]), escape(verdict["dtype"] or "–"), escape(verdict["device"] or "–"), verdict["severity"])
    worst = (escape(words.headroom(verdict)), escape(words.case(verdict["worst_case"])))
    return (*cells, state + known + _stale(entry) + reason, *worst, escape(verdict["statement"]))


def _title(verdict: Verdict) -> str:
    where = " · ".join(part for part in (verdict["dtype"], verdict["device"], verdict["severity"], verdict["contract"]) if part)
    return f"{verdict['claim']} · {where}"


def _stale(entry: Entry) -> str:
    return " **STALE**" if entry.stale else ""
