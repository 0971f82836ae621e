"""Digests of what a verdict depends on, blind to comments, docstrings and formatting and equal across Python versions."""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from blackswan.contracts.model import Claim, contract_digest

FOLDERS: Final = ("contracts", "reference", "impl", "falsifiers")


class DigestError(ValueError):
    """A file that should be digested cannot be read or parsed; the message gives file and line."""


def source_digest(paths: Iterable[Path | str]) -> str:
    """SHA-256 over the meaning of Python files, by file name; the order of the paths does not matter.

    Raises:
        DigestError: a file is missing or is not Python.
    """
    return _combined(sorted((Path(path).name, _of_file(Path(path))) for path in paths))


def folder_digest(folder: Path | str) -> str:
    """SHA-256 over a folder's Python, YAML, JSON and kernel sources, by path in the folder; other files do not count.

    Raises:
        DigestError: the folder is missing, or a file cannot be parsed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DigestError(f"{folder}: no such folder; run from the root of the checkout")
    files = [path for path in folder.rglob("*") if path.suffix in _CANONICAL and path.is_file()]
    return _combined(sorted((path.relative_to(folder).as_posix(), _of_file(path)) for path in files))


def tree_digests(root: Path | str) -> dict[str, str]:
    """The digest of each folder that verdicts depend on, as a run record's `digests` holds them."""
    return {folder: folder_digest(Path(root) / folder) for folder in FOLDERS}


def file_digest(path: Path | str) -> str:
    """SHA-256 over the meaning of one file.

    Raises:
        DigestError: the file is missing, or cannot be parsed.
    """
    return _of_file(Path(path))


def claim_digest(claim: Claim) -> str:
    """SHA-256 over a claim: its content and terms, and what the loader makes of them."""
    tolerance = None if claim.tolerance is None else asdict(claim.tolerance)
    loaded = [claim.kind, claim.operation, claim.check, claim.path, claim.cases, asdict(claim.domain), tolerance, dict(claim.arguments)]
    return hashlib.sha256(json.dumps([contract_digest(claim), loaded], sort_keys=True).encode()).hexdigest()


def _combined(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def _of_file(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DigestError(f"{path}: cannot be read: {error.strerror}") from error
    return hashlib.sha256(_CANONICAL.get(path.suffix, _verbatim)(path, content)).hexdigest()


def _python(path: Path, content: bytes) -> bytes:
    try:
        tree = ast.parse(content, filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise DigestError(f"{path}:{getattr(error, 'lineno', 0) or 0}: is not Python: {error}") from error
    return json.dumps(_canonical(tree)).encode()


def _canonical(node: Any) -> Any:
    """A syntax tree as nested lists. Empty fields are left out: Python versions differ in which ones exist (`type_params` from 3.12)."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if isinstance(node, ast.Constant):
        return ["Constant", repr(node.value)]
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends a format specification in an empty literal, where 3.11 and 3.13 do not.
        return ["JoinedStr", [_canonical(part) for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, clean=False):
        fields["body"] = node.body[1:]
    return [type(node).__name__, {name: _canonical(value) for name, value in sorted(fields.items()) if value is not None and value != []}]


def _yaml(path: Path, content: bytes) -> bytes:
    import yaml

    try:
        value = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise DigestError(f"{path}: is not YAML: {error}") from error
    return json.dumps(value, sort_keys=True, default=str).encode()


def _json(path: Path, content: bytes) -> bytes:
    try:
        return json.dumps(json.loads(content), sort_keys=True).encode()
    except ValueError as error:
        raise DigestError(f"{path}: is not JSON: {error}") from error


def _verbatim(_path: Path, content: bytes) -> bytes:
    return content


_CANONICAL: Final[dict[str, Callable[[Path, bytes], bytes]]] = {
    ".py": _python,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
    ".cu": _verbatim,
    ".cuh": _verbatim,
    ".cpp": _verbatim,
    ".h": _verbatim,
}
