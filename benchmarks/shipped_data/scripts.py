"""The generator of the corpus: real-looking shell scripts whose label is known by construction, with their minimal pairs."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.shipped_data.patterns import PATTERNS, SAFE, Pattern
from benchmarks.shipped_data.vocabulary import FILLERS, HEADERS, POOLS, TITLES, ScriptTemplate

# Scripts of each class (safe, needs-quoting, non-deterministic, non-idempotent, unsafe): 2.3 : 1 at most.
TRAIN_COUNTS = (640, 400, 360, 320, 280)
HELDOUT_COUNTS = (192, 120, 108, 96, 84)
SEED = 20240611

PATTERNS_PER_SCRIPT = (1, 2)
PATTERNS_WEIGHTS = (0.6, 0.4)
PAIR_SHARE = 0.5
FUNCTION_SHARE = 0.1
MAX_LINES = 17

_KNOWN = {value: pool for pool, values in POOLS.items() for value in values}
_KNOWN_NAMES = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(_KNOWN, key=len, reverse=True)))})(?!\w)")


@dataclass(frozen=True)
class Example:
    """One script and its class."""

    text: str
    label: int


class Names:
    """Values for placeholders, each value at most once a script, so that two patterns never share a variable or a path."""

    def __init__(self, rng: random.Random) -> None:
        self._left = {pool: rng.sample(values, len(values)) for pool, values in POOLS.items()}

    def draw(self) -> dict[str, str]:
        """One value for every pool, and a second one under the pool's name followed by 2."""
        chosen: dict[str, str] = {}
        for pool, left in self._left.items():
            chosen[pool], chosen[pool + "2"] = left[0], left[1]
            left.append(left.pop(0))
        return chosen


@dataclass(frozen=True)
class Drawn:
    """A pattern with its names filled in: the blocks of both arrangements, and the function that hides the action (or "")."""

    label: int
    harmless: list[str]
    harmful: list[str]
    harmless_function: str
    harmful_function: str


def draw_pattern(pattern: Pattern, names: dict[str, str], rng: random.Random) -> Drawn:
    """Fill in one pattern; in some scripts its action becomes a function, defined on top and called in the action's place."""
    texts = {letter: ScriptTemplate(rng.choice(variants)).substitute(names) for letter, variants in pattern.blocks.items()}
    functions = {"a": "", "b": ""}
    if rng.random() < FUNCTION_SHARE:
        for letter in functions.keys() & texts.keys():
            body = texts[letter].replace("\n", "\n  ")
            functions[letter] = f"{names['function']}() {{\n  {body}\n}}"
            texts[letter] = names["function"]
    return Drawn(
        label=pattern.label,
        harmless=[texts[letter] for letter in pattern.harmless],
        harmful=[texts[letter] for letter in pattern.harmful],
        harmless_function=functions["a"],
        harmful_function=functions["b" if "b" in pattern.harmful else "a"],
    )


class Skeleton:
    """A script with every choice made except which of its patterns, if any, is harmful."""

    def __init__(self, patterns: list[Pattern], rng: random.Random) -> None:
        names = Names(rng)
        first = names.draw()
        title = ScriptTemplate(rng.choice(TITLES)).substitute(first)
        self._head = [line for line in (rng.choice(HEADERS), title) if line]
        self._patterns = [draw_pattern(pattern, names.draw(), rng) for pattern in patterns]
        count = rng.randint(2, 4) if len(patterns) == 1 else rng.randint(0, 3)
        self._fillers = [ScriptTemplate(filler).substitute(names.draw()) for filler in rng.sample(FILLERS, count)]
        order = [index for index, drawn in enumerate(self._patterns) for _ in drawn.harmless] + [-1] * count
        rng.shuffle(order)
        self._order = order

    def render(self, harmful: int | None) -> Example:
        """The script in which pattern number `harmful` is arranged harmfully and every other one harmlessly; None for a safe script."""
        blocks = [iter(drawn.harmful if index == harmful else drawn.harmless) for index, drawn in enumerate(self._patterns)]
        blocks.append(iter(self._fillers))
        functions = [drawn.harmful_function if index == harmful else drawn.harmless_function for index, drawn in enumerate(self._patterns)]
        lines = [*self._head, *filter(None, functions), *(next(blocks[source]) for source in self._order)]
        return Example("\n".join(lines) + "\n", SAFE if harmful is None else self._patterns[harmful].label)


def normalise(text: str) -> str:
    """The script with every name of the pools replaced by its kind and every number by 0: two scripts equal here are duplicates."""
    return re.sub(r"\d+(\.\d+)*", "0", _KNOWN_NAMES.sub(lambda match: _KNOWN[match.group()], text))


def _choose_patterns(label: int, rng: random.Random) -> list[Pattern]:
    """The patterns of a script, of different classes, the first one of class `label` (of any class for a safe script)."""
    classes = sorted({pattern.label for pattern in PATTERNS})
    first = rng.choice(classes) if label == SAFE else label
    count = rng.choices(PATTERNS_PER_SCRIPT, PATTERNS_WEIGHTS)[0]
    others = rng.sample([other for other in classes if other != first], count - 1)
    return [rng.choice([pattern for pattern in PATTERNS if pattern.label == chosen]) for chosen in (first, *others)]


def _variants(counts: Counter[int], rng: random.Random) -> Iterator[Example]:
    """Endless scripts, by the classes still wanted; about half of them come with all of their minimal pairs."""
    while True:
        label = rng.choices(list(counts), [max(count, 0) for count in counts.values()])[0]
        skeleton_patterns = _choose_patterns(label, rng)
        skeleton = Skeleton(skeleton_patterns, rng)
        alternatives: list[int | None] = [None, *range(len(skeleton_patterns))]
        main = None if label == SAFE else 0
        yield skeleton.render(main)
        if rng.random() < PAIR_SHARE:
            yield from (skeleton.render(other) for other in alternatives if other != main)


def make_split(counts: tuple[int, ...], seen: set[str], rng: random.Random) -> list[Example]:
    """Scripts with exactly `counts` a class, none equal to another or to one in `seen` after normalisation; `seen` is extended."""
    wanted = Counter(dict(enumerate(counts)))
    examples: list[Example] = []
    for example in _variants(wanted, rng):
        key = normalise(example.text)
        if wanted[example.label] > 0 and key not in seen and example.text.count("\n") <= MAX_LINES:
            seen.add(key)
            wanted[example.label] -= 1
            examples.append(example)
        if not any(wanted.values()):
            break
    rng.shuffle(examples)
    return examples


def make_corpus(seed: int = SEED) -> tuple[list[Example], list[Example]]:
    """The training split (2,000 scripts) and the held-out split (600), the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - reproducible data, no secret
    seen: set[str] = set()
    return make_split(TRAIN_COUNTS, seen, rng), make_split(HELDOUT_COUNTS, seen, rng)


def make_unseen(counts: tuple[int, ...], seed: int, known: Iterable[str]) -> list[Example]:
    """Scripts with exactly `counts` a class, none equal to another or to one of `known` after normalisation; the same for the same seed."""
    return make_split(counts, {normalise(text) for text in known}, random.Random(seed))  # noqa: S311 - reproducible data, no secret
