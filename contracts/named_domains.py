"""Domains by name: `domains:` at the top of a contract file, and `domain: {use: NAME, …}` in its claims.

A claim's own keys replace those of the domain that it uses; in `sizes`, `scalars` and `optional` each entry is replaced by itself. A named
domain may use another one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from blackswan.contracts.document import Document
from blackswan.contracts.problems import KeyPath, Problem, unknown

_BY_ENTRY = ("sizes", "scalars", "optional")

Places = dict[KeyPath, KeyPath]
"""Maps the path of a key in a complete domain to the path at which the file has it."""


class _UseError(Exception):
    """A `use` that leads nowhere; holds its key path and what is wrong."""


def expanded(document: Document) -> tuple[Document, list[Problem]]:
    """The document with the domain of every claim complete; the line of a key is where it is written, in `domains` or in the claim.

    A claim whose `use` leads nowhere keeps it, and the problems say why.
    """
    named, claims = document.data.get("domains", {}), document.data.get("claims")
    if not isinstance(named, dict) or not isinstance(claims, list):
        return document, []
    data: list[Any] = []
    moved: Places = {}
    problems: list[Problem] = []
    used: set[str] = set()
    for index, claim in enumerate(claims):
        at: KeyPath = ("claims", index, "domain")
        if not isinstance(claim, dict) or not isinstance(claim.get("domain"), dict) or not isinstance(claim["domain"].get("use"), str):
            data.append(claim)
            continue
        try:
            domain, places = _complete(claim["domain"], at, named, used)
        except _UseError as error:
            problems.append(document.problem(*error.args))
            data.append(claim)
            continue
        data.append({**claim, "domain": domain})
        moved |= {at + key: place for key, place in places.items() if place[: len(at)] != at}
    problems += [document.problem(("domains", name), "is used by no claim of this file") for name in named if name not in used]
    return replace(document, data={**document.data, "claims": data}, moved=moved), list(dict.fromkeys(problems))


def _complete(
    own: Mapping[str, Any], at: KeyPath, named: Mapping[str, Any], used: set[str], open_: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Places]:
    """A domain with all that it takes over, and where each key stands; adds the names that it uses to `used`."""
    domain: dict[str, Any] = {}
    places: Places = {}
    if isinstance(name := own.get("use"), str):
        if not isinstance(named.get(name), dict):
            raise _UseError((*at, "use"), unknown("domain", name, named))
        if name in open_:
            raise _UseError((*at, "use"), f"the domain {name!r} uses itself")
        used.add(name)
        domain, places = _complete(named[name], ("domains", name), named, used, (*open_, name))
    for key, value in own.items():
        if key == "use" and isinstance(value, str):
            continue
        if key in _BY_ENTRY and isinstance(value, dict) and isinstance(domain.get(key), dict):
            domain[key] = {**domain[key], **value}
        else:
            domain[key] = value
            places = {place: where for place, where in places.items() if place[0] != key}
        places |= dict(_places(key, value, at))
    return domain, places


def _places(key: str, value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, KeyPath]]:
    yield (key,), (*at, key)
    entries: Iterable[str] = value if key in _BY_ENTRY and isinstance(value, dict) else ()
    yield from (((key, entry), (*at, key, entry)) for entry in entries)
