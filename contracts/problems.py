"""Problems of files, told to people: the place, the fault, what was expected, and the nearest valid name."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

KeyPath = tuple[str | int, ...]

_LISTED = 16
_NEAREST = 4


@dataclass(frozen=True)
class Problem:
    """One finding; `key` is a path such as `claims[3].domain.sizes.hiden`, empty for the whole file."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        """The finding as `file:line: key: message`."""
        key = f"{self.key}: " if self.key else ""
        return f"{self.file}:{self.line}: {key}{self.message}"


class ContractError(Exception):
    """Contract files that cannot be used, with every problem that was found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def shown_path(path: Path) -> str:
    """The path relative to the working directory where it lies below it."""
    absolute = path.absolute()
    working = Path.cwd()
    return str(absolute.relative_to(working) if absolute.is_relative_to(working) else path)


def shown_key(path: Sequence[str | int]) -> str:
    """A key path as text, `claims[3].domain.sizes.hidden`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def unknown(what: str, name: object, valid: Iterable[str]) -> str:
    """The message for a name outside a vocabulary: expected names, of many the most similar ones, and the nearest one."""
    names = sorted(valid)
    nearest = [other for other in names if other.lower() == str(name).lower()] or difflib.get_close_matches(str(name), names, n=1)
    many = f"{len(names)}, such as {', '.join(difflib.get_close_matches(str(name), names, _NEAREST, cutoff=0.0))}"
    listed = many if len(names) > _LISTED else ", ".join(names)
    expected = "nothing is declared" if not names else f"expected {'one of ' if len(names) > 1 else ''}{listed}"
    return f"unknown {what} {name!r}; {expected}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
