"""Suspects of a falsified claim: the functions of `impl` that ran, ranked by what its words and known failures say of them.

Three things count for a function: a wrong version of it, a mutant or a planted change, was seen to fail at a place, of this claim or
another, whose words are alike (`run_failures`), or one of a function that calls it; so was one of its module's; and its source says the
words of the claim and of the place. Suspects are ranked, not proven. The weights were chosen on the recorded failures, each mutant left out
in turn; `benchmarks/README.md` has the hit rates on bugs that were planted, by what was known before.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.changes import definitions
from blackswan.falsifiers.diagnosis.run_failures import place, planted, recorded
from blackswan.falsifiers.diagnosis.tracing import IMPL, module_of
from blackswan.falsifiers.mutants.registry import STEPS

NAMED = 8
"""So many functions are named."""
MUTANTS = 3
"""And so many mutants of the first."""
KIN, CALLED, MODULE, WORDS = 1.0, 0.7, 1.0, 0.5
"""Weights: of the likeness of the nearest known failure of a function, of that of one which calls it, of that of its module's, and of the
score by words."""
SATURATION, LENGTH = 1.2, 0.75
"""The usual k₁ and b of BM25 (Robertson & Zaragoza 2009, doi:10.1561/1500000019)."""


@dataclass(frozen=True)
class Program:
    """The functions of `impl` by name, `impl.fit:_Run._after`, with their sources; and where the names that modules import are defined.

    `kernels` are those functions that Triton compiles, or its interpreter rewrites: none of them is seen to run.
    """

    functions: Mapping[str, str]
    imports: Mapping[str, str]
    kernels: frozenset[str] = frozenset()

    @cached_property
    def calls(self) -> Mapping[str, frozenset[str]]:
        """The functions of its own module that each function calls, by their names alone: of whichever object a method is."""
        by_name = dict[tuple[str, str], set[str]]()
        for name in self.functions:
            by_name.setdefault((_module_of(name), _last(name)), set()).add(name)
        called = {name: {(_module_of(name), word) for word in re.findall(r"\b(\w+)\(", source)} for name, source in self.functions.items()}
        return {name: frozenset().union(*(by_name.get(place, ()) for place in places)) for name, places in called.items()}

    def defined(self, name: str) -> str:
        """The name of a function where it is defined, for one by which another module knows it."""
        module, _, attribute = name.partition(":")
        first, *rest = attribute.split(".")
        while (known := f"{module}:{first}") in self.imports:
            module, _, first = self.imports[known].partition(":")
        return f"{module}:{'.'.join([first, *rest])}"


def suspects(claim: Claim, tensor: str, ran: Collection[str] | None = None) -> tuple[str, ...]:
    """The most suspicious functions, at most `NAMED`, the most suspicious first; of those that `ran`, where that is known.

    `tensor` is the name of what was found wrong, or what was raised (`Comparison.where`).
    """
    scores = _scores(claim, tensor, ran)
    return tuple(sorted((name for name in scores if scores[name] > 0), key=lambda name: -scores[name])[:NAMED])


def suspects_among(names: Collection[str], claim: Claim, tensor: str, ran: Collection[str] | None) -> tuple[str, ...]:
    """Those of the names that ran, the most suspicious first, at most `NAMED`."""
    scores = _scores(claim, tensor, ran, names)
    return tuple(sorted(scores.keys() & set(names), key=lambda name: (-scores[name], name))[:NAMED])


def _scores(claim: Claim, tensor: str, ran: Collection[str] | None, others: Collection[str] = ()) -> dict[str, float]:
    """How suspicious functions are that ran, and the `others`; a kernel or a constant counts as run where a function of its module is."""
    own, words, functions = _kin(claim, tensor), _by_words(claim, tensor), program().functions
    kin = dict(own)
    for caller, called in program().calls.items():
        for name in called if ran is None or caller in ran else ():
            kin[name] = max(kin.get(name, 0.0), CALLED * own.get(caller, 0.0))
    unseen = {*kin, *others} - functions.keys() | program().kernels
    modules, beside = dict[str, float](), {_module_of(name) for name in ran or ()}
    for name, likeness in kin.items():
        modules[_module_of(name)] = max(modules.get(_module_of(name), 0.0), likeness)
    return {
        name: KIN * kin.get(name, 0.0) + MODULE * modules.get(_module_of(name), 0.0) + WORDS * words.get(name, 0.0)
        for name in {**functions, **kin, **dict.fromkeys(others)}
        if ran is None or name in ran or (name in unseen and _module_of(name) in beside)
    }


def failures_like(claim: Claim, tensor: str, function: str) -> str:
    """Which wrong versions of the function are known to fail the claim, at the same place or elsewhere, as a reason to suspect it."""
    known = {failure.name: failure.place for failure in _failures() if (failure.claim, failure.function) == (claim.id, function)}
    alike = [name for name, at in known.items() if at == place(tensor)]
    if not known:
        return "no wrong version of it is known to fail this claim; its source, what calls it and failures of other claims point to it"
    where = "here too" if alike else "this claim, though elsewhere"
    return f"a wrong version of it fails {where} ({', '.join((alike or [*known])[:MUTANTS])})"


def _module_of(name: str) -> str:
    return name.partition(":")[0]


def _last(name: str) -> str:
    return re.split(r"[:.]", name)[-1]


@cache
def program() -> Program:
    """Reads every file of `impl`."""
    functions, imports, kernels = dict[str, str](), dict[str, str](), set[str]()
    for path in sorted(IMPL.rglob("*.py")):
        module, text = module_of(path), path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError:  # nothing can import it
            continue
        lines = text.splitlines()
        for name, definition in definitions(tree):
            if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{module}:{name}"] = "\n".join(lines[definition.lineno - 1 : definition.end_lineno])
                if any("jit" in ast.unparse(decorator) for decorator in definition.decorator_list):
                    kernels.add(f"{module}:{name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blackswan.impl"):
                source = (node.module or "").removeprefix("blackswan.")
                found = {f"{module}:{each.asname or each.name}": f"{source}:{each.name}" for each in node.names}
                imports |= {name: original for name, original in found.items() if name != original}  # a package imports its modules
    return Program(functions, imports, frozenset(kernels))


def words(text: str) -> list[str]:
    """The words of prose or source, without endings; the parts of a name are words of their own."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()
    return [re.sub(r"(?<=...)(ings?|ed|e?s|e)$", "", word) for word in re.findall(r"[a-z]{3,}", parted)]


def _kin(claim: Claim, tensor: str) -> dict[str, float]:
    """By function the likeness, 0 to 1, of this failure to the nearest known one of it: the share of words, rare ones counting more."""
    failures = _failures()
    rarity = Counter(word for failure in failures for word in failure.words)
    size = {word: math.log1p(len(failures) / count) for word, count in rarity.items()}

    def weight(said: frozenset[str]) -> float:
        return sum(size.get(word, 1.0) for word in said)

    here, found = frozenset(words(f"{claim.id} {place(tensor)}")), dict[str, float]()
    for failure in failures:
        if common := weight(here & failure.words):
            likeness = common / math.sqrt(weight(here) * weight(failure.words))
            found[failure.function] = max(found.get(failure.function, 0.0), likeness)
    return found


@dataclass(frozen=True)
class _Failure:
    """A claim that fails at a place on a mutant or a planted change of this name, of which the function is wrong."""

    name: str
    function: str
    claim: str
    place: str

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words(f"{self.claim} {self.place}"))


@cache
def _failures() -> list[_Failure]:
    """The recorded failures of mutants, and those of planted changes whose function there still is."""
    defined, functions = program().defined, program().functions
    mutants = ((name, STEPS[name].step, claim, at) for claim, known in recorded().items() for name, at in known.items() if name in STEPS)
    found = [_Failure(name, defined(step), claim, at) for name, step, claim, at in mutants]
    changes = ((name, *said, claim) for claim, known in planted().items() for name, said in known.items())
    return found + [_Failure(name, defined(step), claim, at) for name, step, at, claim in changes if defined(step) in functions]


@cache
def _counted() -> tuple[dict[str, Counter[str]], Counter[str]]:
    """The words of every function's source, and in how many functions each word is."""
    counted = {name: Counter(words(source)) for name, source in program().functions.items()}
    return counted, Counter(word for found in counted.values() for word in found)


def _by_words(claim: Claim, tensor: str) -> dict[str, float]:
    """BM25 of every function's source for the words of the claim and of the place, by the highest; a word of both counts twice."""
    counted, spread = _counted()
    query = Counter(set(words(f"{claim.id} {claim.statement}"))) + Counter(set(words(place(tensor))))
    mean = sum(map(Counter.total, counted.values())) / max(len(counted), 1)
    rarity = {word: math.log1p((len(counted) - spread[word] + 0.5) / (spread[word] + 0.5)) for word in query}

    def score(found: Counter[str]) -> float:
        norm = SATURATION * (1 - LENGTH + LENGTH * found.total() / mean)
        shared = query.keys() & found.keys()
        return sum(query[word] * rarity[word] * found[word] * (SATURATION + 1) / (found[word] + norm) for word in shared)

    scores = {name: score(found) for name, found in counted.items()}
    most = max(scores.values(), default=0.0) or 1.0
    return {name: found / most for name, found in scores.items()}
