"""The scripts that the learning benchmark asks about: made by the corpus's generator from another seed, and used for no choice."""

from collections.abc import Iterable, Sequence

from benchmarks.shipped_data.labeller import label
from benchmarks.shipped_data.scripts import SEED, TRAIN_COUNTS, Example, make_unseen

UNSEEN_SEED = SEED + 1
UNSEEN_COUNTS = TRAIN_COUNTS


def unseen_scripts(known: Sequence[str], counts: tuple[int, ...] = UNSEEN_COUNTS, seed: int = UNSEEN_SEED) -> list[Example]:
    """`counts` scripts a class, by the generator alone; raises what `require_unseen` raises."""
    examples = make_unseen(counts, seed, known)
    require_unseen(examples, known)
    return examples


def require_unseen(examples: Iterable[Example], known: Iterable[str]) -> None:
    """Raises a ValueError for a script with the same characters as a known one but for blanks, in any order, so for its minimal pairs too;
    and for a label that the labeller, which reads the text alone, does not derive.
    """
    characters = {_characters(text) for text in known}
    for example in examples:
        if _characters(example.text) in characters:
            raise ValueError(f"a script that is known already, or the minimal pair of one; choose another seed:\n{example.text}")
        if (derived := label(example.text)) != example.label:
            raise ValueError(f"a script is labelled {example.label}, and its text says {derived}; the generator is wrong:\n{example.text}")


def _characters(text: str) -> str:
    return "".join(sorted("".join(text.split())))
