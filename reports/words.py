"""Numbers, cases and escapes as the pages show them."""

import math
from collections.abc import Mapping
from typing import Any

from blackswan.reports.records import Case, Counterexample, Verdict, number


def figure(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits; anything else as text, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def seconds(value: float) -> str:
    """A duration in seconds."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def pairs(mapping: Mapping[str, Any] | None) -> str:
    """`name=value, …` in the mapping's order."""
    return ", ".join(f"{name}={figure(value, 6)}" for name, value in (mapping or {}).items())


def case(value: Case | Counterexample | None) -> str:
    """A case in one line: sizes, scalars, flavour, seed and the beginning of its digest."""
    if value is None:
        return "–"
    parts = [pairs(value["sizes"]), pairs(value["scalars"])]
    parts += [f"{name} {value[name]}" for name in ("flavour", "seed") if value[name] is not None]
    if value["digest"]:
        parts.append(f"digest {value['digest'][:12]}")
    return "; ".join(part for part in parts if part) or "–"


def element(counterexample: Counterexample) -> str:
    """The worst element: `y[0, 3]: expected 1.0, got 1.5`."""
    index = counterexample["index"]
    place = (counterexample["tensor"] or "") + (f"[{', '.join(map(str, index))}]" if index else "")
    values = f"expected {figure(counterexample['expected'], 9)}, got {figure(counterexample['actual'], 9)}"
    return f"{place}: {values}" if place else values


def excess(counterexample: Counterexample) -> str:
    """The error against its tolerance: `rms error 0.5 against a limit of 0.01, 50 times too large; 3 ulp; cosine 0.9`."""
    error, limit, metric = counterexample["error"], counterexample["limit"], counterexample["metric"]
    if error is None and limit is None:
        return metric or "–"
    text = f"{metric + ' ' if metric else ''}error {figure(error, 4)} against a limit of {figure(limit, 4)}"
    if isinstance(error, int | float) and isinstance(limit, int | float) and limit > 0 and math.isfinite(error / limit) and error > limit:
        text += f", {error / limit:.3g} times too large"
    extras = [f"{figure(counterexample['ulp'])} ulp"] if counterexample.get("ulp") is not None else []
    extras += [f"cosine {figure(counterexample['cosine'], 6)}"] if counterexample.get("cosine") is not None else []
    return "; ".join([text, *extras])


def culprit(verdict: Verdict) -> str | None:
    """The call that a falsified claim was traced to: operation, path, explanation, the mutant that answers alike, changes, suspects."""
    found = verdict["culprit"]
    if found is None:
        return None
    place = " at ".join(part for part in (found["operation"], found["path"]) if part)
    distance = f", distance {figure(found['distance'])}" if found["distance"] is not None else ""
    mutant = f" (mutant {found['mutant']}{distance})" if found["mutant"] else ""
    suspects = f"; suspects, ranked and not proven: {', '.join(found['suspects'])}" if found.get("suspects") else ""
    changed = f"; changed, and run: {', '.join(found['changed'])}" if found.get("changed") else ""
    return (f"{place}: " if place else "") + found["explanation"] + mutant + changed + suspects


def worst(verdict: Verdict) -> float | None:
    """The verdict's worst error / tolerance; NaN counts as infinite, so that it sorts as the worst."""
    if verdict["headroom"] is None:
        return None
    value = number(verdict["headroom"]["worst"])
    return math.inf if math.isnan(value) else value


def headroom(verdict: Verdict) -> str:
    """`0.71 rms of y`."""
    found = verdict["headroom"]
    if found is None:
        return "–"
    return f"{figure(found['worst'])} {found['metric']}" + (f" of {found['tensor']}" if found["tensor"] else "")


def plain(text: str) -> str:
    """One line of printable characters: control and direction characters as escapes, line breaks as spaces."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in line)
