"""What a verdict depends on, file by file: the sources that its entries import, data among the entries, and a digest of their meaning.

An entry is a path from the root, or `path::name` for what was found there by a table.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from reports.digests import DigestError, file_digest

PARTS: Final = {"reference": "reference", "subject": "impl", "comparison": "falsifiers"}
"""Part of a verdict's digests → the folder whose imports are followed from its entries."""
_ALSO: Final = {"comparison": ("contracts/",)}
"""Folders that a part may import from besides."""
_CATALOGUES: Final = frozenset({"reference/run.py"})
"""Files that import what they find by name: what a verdict takes from them is among its entries."""


class Sources:
    """The files of a checkout; each is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._digests: dict[str, str] = {}
        self._modules: dict[str, frozenset[str]] = {}
        self._combined: dict[tuple[str, tuple[str, ...]], str] = {}

    def digest(self, part: str, entries: Sequence[str]) -> str:
        """SHA-256 over the entries' files and what they import from the part's folder, directly or not.

        A package's `__init__.py` counts only where it is an entry: it is a table of contents, and a new line in it changes no other's
        meaning.

        Raises:
            DigestError: an entry is missing, or a file is not Python.
        """
        key = (part, tuple(entries))
        if key not in self._combined:
            files = [(name, self._digest(name)) for name in self.closure(part, entries)]
            self._combined[key] = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return self._combined[key]

    def closure(self, part: str, entries: Iterable[str], folders: tuple[str, ...] = ()) -> list[str]:
        """The entries' files and those that they import from the part's folder, or from others that are given instead; sorted."""
        folders = folders or (f"{PARTS[part]}/", *_ALSO.get(part, ()))
        found: set[str] = set()
        waiting = [_file(entry) for entry in entries]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [other for other in self._imported(name) if other.startswith(folders)]
        return sorted(found)

    def imported(self, part: str, entries: Iterable[str], other: str) -> list[str]:
        """The files of another part's folder that the entries import, or what they import from their own; sorted."""
        folder = f"{PARTS[other]}/"
        return sorted({path for name in self.closure(part, entries) for path in self._imported(name) if path.startswith(folder)})

    def mentions(self, entry: str, module: str) -> bool:
        """Whether the entry's file imports the module or package, or something of its own."""
        return module in self._of(_file(entry))

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = file_digest(self.root / name)
        return self._digests[name]

    def _imported(self, name: str) -> list[str]:
        if name in _CATALOGUES or not name.endswith(".py"):
            return []
        return [path for module in sorted(self._of(name)) if (path := self._file_of(module)) is not None]

    def _file_of(self, module: str) -> str | None:
        """The module's file. DigestError where a package stands before it, which Python takes instead."""
        path = self.root / (module.replace(".", "/") + ".py")
        if not path.is_file():
            return None
        if (path.with_suffix("") / "__init__.py").is_file():
            raise DigestError(f"{path}: the package {path.with_suffix('')} of that name is what Python imports; expected one of the two")
        return path.relative_to(self.root).as_posix()

    def _of(self, name: str) -> frozenset[str]:
        """The modules that a file may import."""
        if name not in self._modules:
            try:
                tree = ast.parse((self.root / name).read_bytes(), filename=name)
            except OSError as error:
                raise DigestError(f"{name}: cannot be read: {error.strerror}") from error
            except (SyntaxError, ValueError) as error:
                raise DigestError(f"{name}: is not Python: {error}") from error
            self._modules[name] = frozenset(_modules(tree))
        return self._modules[name]


def _file(entry: str) -> str:
    return entry.partition("::")[0]


def _modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names that may be modules; imports inside functions count, the project has no relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
