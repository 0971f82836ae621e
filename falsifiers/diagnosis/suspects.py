"""Suspects of a falsified claim: the functions of `impl` that its words and the failures of mutants point to. They are ranked, not proven.

Four things count for a function. Mutants of it were seen to fail the claim at the same place (`run_failures`); an error that stands in an
answer's place came through it; one of its mutants was seen to fail at a place, of this claim or another, whose words are alike; and its
source says the words of the claim and of the place. The weights were chosen on rounds 1 to 3 of `benchmarks/attackers`;
`benchmarks/README.md` has the hit rates. Of a claim on an operation only functions are ranked that ran while the subject answered.
"""

import ast
import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.run_failures import NAMED, place, recorded
from blackswan.falsifiers.mutants.registry import STEPS

SOURCES = Path(__file__).parents[2] / "impl"
ALIKE, THROUGH, KIN, WORDS = 2.0, 1.0, 1.0, 0.1
"""Weights: of a mutant that fails at the same place, up to MOST_ALIKE; of a function that an error came through; of the likeness of the
nearest failure; of the score by words."""
MOST_ALIKE = 2
SATURATION, LENGTH = 1.2, 0.75
"""The usual k₁ and b of BM25 (Robertson & Zaragoza 2009, doi:10.1561/1500000019)."""


@dataclass(frozen=True)
class Program:
    """The functions of `impl` by name, `impl.fit:_Run._after`, with their sources; and where the names that modules import are defined."""

    functions: Mapping[str, str]
    imports: Mapping[str, str]

    def defined(self, name: str) -> str:
        """The name of a function where it is defined, for one by which another module knows it."""
        module, _, attribute = name.partition(":")
        first, *rest = attribute.split(".")
        while (known := f"{module}:{first}") in self.imports:
            module, _, first = self.imports[known].partition(":")
        return f"{module}:{'.'.join([first, *rest])}"


def suspects(claim: Claim, tensor: str, among: Collection[str] | None = None) -> tuple[str, ...]:
    """The most suspicious functions, at most three, the most suspicious first; of those `among`, where given.

    `tensor` is the name of what was found wrong, or what was raised (`Comparison.where`).
    """
    alike, kin, words = _alike(claim, tensor), _kin(claim, tensor), _by_words(claim, tensor)
    through = set(re.findall(r"\bimpl[\w.]*:[\w.]*\w", tensor))
    names = [name for name in program().functions if among is None or name in among]
    scores = {
        name: ALIKE * min(alike[name], MOST_ALIKE) + THROUGH * (name in through) + KIN * kin.get(name, 0.0) + WORDS * words[name]
        for name in names
    }
    return tuple(sorted((name for name in names if scores[name] > 0), key=lambda name: -scores[name])[:NAMED])


@contextmanager
def executed() -> Iterator[set[str]]:
    """The functions of `impl` that are called inside the block, in this thread; the set is whole when the block ends."""
    found, codes, before = set[str](), set[CodeType](), sys.gettrace()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del event, argument
        codes.add(frame.f_code)

    sys.settrace(note)
    try:
        yield found
    finally:
        sys.settrace(before)
        found.update(name for code in codes if (name := _name(code)) is not None)


def _name(code: CodeType) -> str | None:
    """The name of a function of `impl`; a function inside another one has the name of that one. None for code of others."""
    path = Path(code.co_filename).resolve()
    return f"{_module(path)}:{code.co_qualname.partition('.<locals>')[0]}" if path.is_relative_to(SOURCES.resolve()) else None


def _module(path: Path) -> str:
    parts = path.resolve().relative_to(SOURCES.resolve()).with_suffix("").parts
    return ".".join(["impl", *(part for part in parts if part != "__init__")])


@cache
def program() -> Program:
    """Reads every file of `impl`."""
    functions, imports = dict[str, str](), dict[str, str]()
    for path in sorted(SOURCES.rglob("*.py")):
        module, text = _module(path), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.splitlines()
        functions |= {f"{module}:{name}": "\n".join(lines[node.lineno - 1 : node.end_lineno]) for name, node in _functions(tree, "")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blackswan.impl"):
                source = (node.module or "").removeprefix("blackswan.")
                imports |= {f"{module}:{each.asname or each.name}": f"{source}:{each.name}" for each in node.names}
    return Program(functions, imports)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Functions and methods, also those that a condition defines, by dotted names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, prefix)


def words(text: str) -> list[str]:
    """The words of prose or source, without endings; the parts of a name are words of their own."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()
    return [re.sub(r"(?<=...)(ings?|ed|e?s|e)$", "", word) for word in re.findall(r"[a-z]{3,}", parted)]


def _alike(claim: Claim, tensor: str) -> Counter[str]:
    """How many mutants of a function fail the claim at the same place."""
    failures = recorded().get(claim.id, {})
    return Counter(program().defined(STEPS[name].step) for name, at in failures.items() if at == place(tensor) and name in STEPS)


def _kin(claim: Claim, tensor: str) -> dict[str, float]:
    """By function the likeness, 0 to 1, of this failure to the nearest one of its mutants: the share of words, rare ones counting more."""
    failures = _failures()
    rarity = Counter(word for _, said in failures for word in said)
    size = {word: math.log1p(len(failures) / count) for word, count in rarity.items()}

    def weight(said: frozenset[str]) -> float:
        return sum(size.get(word, 1.0) for word in said)

    here, found = frozenset(words(f"{claim.id} {place(tensor)}")), dict[str, float]()
    for function, said in failures:
        if common := weight(here & said):
            found[function] = max(found.get(function, 0.0), common / math.sqrt(weight(here) * weight(said)))
    return found


@cache
def _failures() -> list[tuple[str, frozenset[str]]]:
    """The function of each recorded failure of a mutant, and the words of claim and place."""
    known = ((name, f"{claim} {at}") for claim, failures in recorded().items() for name, at in failures.items() if name in STEPS)
    return [(program().defined(STEPS[name].step), frozenset(words(said))) for name, said in known]


@cache
def _counted() -> tuple[dict[str, Counter[str]], Counter[str]]:
    """The words of every function's source, and in how many functions each word is."""
    counted = {name: Counter(words(source)) for name, source in program().functions.items()}
    return counted, Counter(word for found in counted.values() for word in found)


def _by_words(claim: Claim, tensor: str) -> dict[str, float]:
    """BM25 of every function's source for the words of the claim and of the place; a word of both counts twice."""
    counted, spread = _counted()
    query = Counter(set(words(f"{claim.id} {claim.statement}"))) + Counter(set(words(place(tensor))))
    mean = sum(map(Counter.total, counted.values())) / max(len(counted), 1)
    rarity = {word: math.log1p((len(counted) - spread[word] + 0.5) / (spread[word] + 0.5)) for word in query}

    def score(found: Counter[str]) -> float:
        norm = SATURATION * (1 - LENGTH + LENGTH * found.total() / mean)
        shared = query.keys() & found.keys()
        return sum(query[word] * rarity[word] * found[word] * (SATURATION + 1) / (found[word] + norm) for word in shared)

    return {name: score(found) for name, found in counted.items()}
