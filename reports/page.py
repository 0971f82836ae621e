"""The HTML page of a run: one file, no scripts, nothing loaded from elsewhere."""

import math
from collections.abc import Iterable, Sequence
from html import escape as html_escape
from pathlib import Path
from typing import Final

from blackswan.reports import words
from blackswan.reports.markdown import facts
from blackswan.reports.summary import HIDDEN, WORDS, Entry, Group, Summary, environment

_META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
_STYLE = Path(__file__).with_name("page.css")
_GLYPHS: Final = {"HELD": "✓", "FALSIFIED": "✕", "NOT_RUN": "–", "VACUOUS": "∅", "FLAKY": "≈"}
_TOLERANCE_AT: Final = 70.0
"""The place on a headroom bar, in per cent of its length, at which the error reaches the tolerance."""


def render(summary: Summary) -> str:
    """The page as text."""
    style = _STYLE.read_text(encoding="utf-8")
    body = [
        _header(summary),
        _falsified(summary),
        _attention(summary),
        _contracts(summary),
        _not_run(summary),
        _hidden(summary),
        *(_claims(place, group) for place, group in enumerate(summary.groups)),
        _environment(summary),
    ]
    title = f"Blackswan: {escape(summary.headline)}"
    head = f"{_META}<title>{title}</title><style>\n{style}</style>"
    content = "\n".join(part for part in body if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{content}\n</main></body></html>\n'


def escape(text: str) -> str:
    """Text that HTML takes literally, in content and in attributes."""
    return html_escape(words.plain(text), quote=True)


def _header(summary: Summary) -> str:
    run = summary.run.header
    device = run["device"] + (f", {run['device_name']}" if run["device_name"] else "")
    subtitle = escape(f"{run['subject']} on {device} · {', '.join(run['dtypes'])} · {run['started']}")
    counts = [(WORDS[state], summary.counts[state], str(state)) for state in WORDS]
    counts += [("stale", summary.stale, "STALE")] if summary.stale else []
    tiles = "".join(f'<div class="tile {state}{"" if count else " none"}"><b>{count}</b>{word}</div>' for word, count, state in counts)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in summary.run.notes)
    result = f'<h1>Blackswan <span class="result {summary.result.split()[0]}">{escape(summary.result)}</span></h1>'
    return f'<header>{result}<p class="sub">{subtitle}</p>{notes}<div class="tiles">{tiles}</div></header>'


def _falsified(summary: Summary) -> str:
    if not summary.falsified:
        return ""
    return "<section><h2>Falsified</h2>" + "\n".join(_counterexample(entry) for entry in summary.falsified) + "</section>"


def _counterexample(entry: Entry) -> str:
    verdict = entry.verdict
    found = verdict["counterexample"]
    rows = [(name, escape(value)) for name, value in facts(entry)]
    if found and (command := found["replay"]):
        rows.append(("Replay", f"<code>{escape(command)}</code>"))
    named = (verdict["severity"], verdict["dtype"], verdict["device"], verdict["contract"])
    tags = "".join(f"<span>{escape(tag)}</span>" for tag in named if tag)
    facts_list = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows)
    title = f"<h3>{escape(verdict['claim'])} <small>{tags}</small>{_stale(entry)}</h3>"
    kind = "card known" if entry.excused else "card"
    return f'<article class="{kind}">{title}<p>{escape(verdict["statement"])}</p><dl>{facts_list}</dl></article>'


def _attention(summary: Summary) -> str:
    items = []
    for entry in summary.attention:
        verdict = entry.verdict
        text = "; ".join(part for part in (verdict["reason"], entry.remark) if part)
        where = " · ".join(part for part in (verdict["dtype"], verdict["device"], verdict["contract"]) if part)
        items.append(f"<li>{_badge(entry)} <b>{escape(verdict['claim'])}</b> <small>{escape(where)}</small><br>{escape(text)}</li>")
    return f'<section><h2>Needs attention</h2><ul class="plain">{"".join(items)}</ul></section>' if items else ""


def _contracts(summary: Summary) -> str:
    head = ("contract", "verdicts", *(f">{word}" for word in WORDS.values()), ">worst headroom", ">time")
    rows = []
    for place, group in enumerate(summary.groups):
        counts = [str(group.counts[state]) if group.counts[state] else '<i class="zero">0</i>' for state in WORDS]
        name = f'<a href="#contract-{place}">{escape(group.contract)}</a> <small>{escape(group.version)}</small>'
        rows.append((name, _strip(group), *counts, words.figure(group.worst), words.seconds(group.seconds)))
    return f'<section><h2>Contracts</h2><div class="wide">{_table(head, rows)}</div>{_legend()}</section>'


def _not_run(summary: Summary) -> str:
    if not summary.not_run:
        return ""
    rows = ((escape(reason), str(count)) for reason, count in summary.not_run)
    return f'<section><h2>Not run</h2><div class="wide">{_table(("reason", ">verdicts"), rows)}</div></section>'


def _hidden(summary: Summary) -> str:
    if not summary.hidden:
        return ""
    shown = _table(("claim", "dtype", "bug"), (tuple(map(escape, row)) for row in summary.hidden))
    return f'<section><h2>Hidden by rounding</h2><p>{HIDDEN}</p><div class="wide">{shown}</div></section>'


def _claims(place: int, group: Group) -> str:
    head = ("claim", "verdict", "dtype", "error / tolerance", "worst case")
    name = f"{escape(group.contract)} <small>{escape(group.version)}</small>"
    before = [None, *(entry.verdict["claim"] for entry in group.entries)]
    rows = (_row(entry, entry.verdict["claim"] == previous) for entry, previous in zip(group.entries, before, strict=False))
    return f'<section id="contract-{place}"><h2>{name}</h2><div class="wide">{_table(head, rows, "claims")}</div></section>'


def _row(entry: Entry, repeated: bool) -> tuple[str, ...]:
    """A claim's statement stands in the first of its rows only."""
    verdict = entry.verdict
    statement = "" if repeated else f"<br><small>{escape(verdict['statement'])}</small>"
    reason = f'<br><small class="reason">{escape(verdict["reason"])}</small>' if verdict["reason"] and entry.state != "FALSIFIED" else ""
    name = f"<b>{escape(verdict['claim'])}</b> <small>{verdict['severity']}</small>"
    place = f"{escape(verdict['dtype'] or '–')}<br><small>{escape(verdict['device'] or '–')}</small>"
    return (
        name + statement + reason,
        _badge(entry) + _stale(entry),
        place,
        _bar(entry),
        f"<small>{escape(words.case(verdict['worst_case']))}</small>",
    )


def _strip(group: Group) -> str:
    """One cell a verdict; state is told by colour, shape and tooltip."""
    cells = []
    for entry in group.entries:
        verdict = entry.verdict
        label = escape(" ".join(part for part in (verdict["claim"], verdict["dtype"], verdict["device"], WORDS[entry.state]) if part))
        cells.append(f'<i class="cell {entry.state}{" stale" if entry.stale else ""}" title="{label}">{_GLYPHS[entry.state]}</i>')
    return f'<span class="strip">{"".join(cells)}</span>'


def _legend() -> str:
    items = "".join(f'<span><i class="cell {state}">{_GLYPHS[state]}</i> {word}</span>' for state, word in WORDS.items())
    return f'<p class="legend">{items}<span>outlined: stale</span><span>On the bars below, the line marks the tolerance.</span></p>'


def _bar(entry: Entry) -> str:
    """The worst error / tolerance on a linear scale; the line is the tolerance, and a bar that leaves the scale ends in an arrow."""
    value = words.worst(entry.verdict)
    if value is None:
        return "–"
    end = min(value * _TOLERANCE_AT, 100.0) if math.isfinite(value) else 100.0
    beyond = '<path class="over" d="M92 1 L99 6 L92 11 Z"/>' if value * _TOLERANCE_AT > 100 else ""
    bar = '<rect class="full" width="100" height="12"/>'
    bar += f'<rect class="{"over" if value > 1 else "part"}" width="{end:.2f}" height="12"/>'
    line = f'<line x1="{_TOLERANCE_AT}" x2="{_TOLERANCE_AT}" y1="-2" y2="14"/>'
    image = f'<svg class="bar" viewBox="0 -2 100 16" preserveAspectRatio="none" aria-hidden="true">{bar}{beyond}{line}</svg>'
    return f'<span class="headroom">{image}<span>{escape(words.headroom(entry.verdict))}</span></span>'


def _badge(entry: Entry) -> str:
    known = " <small>known</small>" if entry.excused else ""
    return f'<span class="badge {entry.state}">{_GLYPHS[entry.state]} {WORDS[entry.state]}</span>{known}'


def _stale(entry: Entry) -> str:
    return f' <span class="badge STALE" title="{escape(entry.stale)}">STALE</span>' if entry.stale else ""


def _environment(summary: Summary) -> str:
    rows = ((f"<b>{name}</b>", escape(value)) for name, value in environment(summary.run))
    return f'<section><h2>Environment</h2><div class="wide">{_table((), rows, "environment")}</div></section>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already; a head that starts with `>` is a column of numbers."""
    classes = [' class="number"' if name.startswith(">") else "" for name in head]
    top = "".join(f"<th{style}>{name.removeprefix('>')}</th>" for name, style in zip(head, classes, strict=True))
    lines = []
    for row in rows:
        cells = zip(row, classes or [""] * len(row), strict=True)
        lines.append("<tr>" + "".join(f"<td{style}>{cell}</td>" for cell, style in cells) + "</tr>")
    return f'<table class="{kind}">{f"<thead><tr>{top}</tr></thead>" if head else ""}<tbody>{chr(10).join(lines)}</tbody></table>'
