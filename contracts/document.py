"""YAML files as contracts need them: YAML 1.2 scalars, no duplicate keys, and the line of every key."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from blackswan.contracts.problems import ContractError, KeyPath, Problem, shown_key, shown_path

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # the C loader has no stub, and may be missing
    """The core schema of YAML 1.2: `1e-5` is a number; `on`, `yes`, `1_000`, `1:30` and dates are text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  # PyYAML's own attribute


_DEEPEST = 40
_LARGEST = 50_000
_TAG = "tag:yaml.org,2002:"
_PATTERNS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
)
for _name, _pattern, _first in _PATTERNS:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and the line where each key path stands.

    `moved` says where a key stands that `data` has elsewhere: a named domain in the claim that uses it.
    """

    path: Path
    data: Any
    root: yaml.Node
    moved: Mapping[KeyPath, KeyPath] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The path as messages show it."""
        return shown_path(self.path)

    def line(self, path: KeyPath) -> int:
        """The line (from 1) of a key or list item; of the nearest enclosing one where the path ends nowhere."""
        node, line = self.root, self.root.start_mark.line
        for part in self._written(path):
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == part), None)
                if found is None:
                    break
                line, node = found[0].start_mark.line, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            else:
                break
        return int(line) + 1

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A problem at a key path of this file."""
        return Problem(self.file, self.line(path), shown_key(self._written(path)), message)

    def _written(self, path: KeyPath) -> KeyPath:
        """The key path as the file has it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.moved:
                return self.moved[path[:length]] + path[length:]
        return path


def read(path: Path) -> Document:
    """Reads a YAML mapping. ContractError: unreadable, not UTF-8, not YAML, empty, not a mapping, duplicate or non-text keys."""

    def refuse(message: str, line: int = 1) -> ContractError:
        return ContractError([Problem(shown_path(path), line, "", message)])

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8: byte 0x{raw[error.start]:02x}", raw[: error.start].count(b"\n") + 1) from error
    try:
        if (line := _too_deep(text)) is not None:
            raise refuse(f"is nested more than {_DEEPEST} levels deep", line)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        described = f"{error.problem or error.context}" + (f" ({error.context})" if error.problem and error.context else "")
        raise refuse(f"is not YAML: {described}", mark.line + 1 if mark else 1) from error
    except yaml.YAMLError as error:
        raise refuse(f"is not YAML: {str(error).splitlines()[0]}") from error
    if root is None:
        raise refuse("is empty; expected a mapping")
    if not isinstance(root, yaml.MappingNode):
        raise refuse("is not a mapping; expected `key: value` lines at the top", root.start_mark.line + 1)
    builder = _Builder(path)
    data = builder.build(root, ())
    if builder.problems:
        raise ContractError(builder.problems)
    return Document(path, data, root)


def _too_deep(text: str) -> int | None:
    """The line where a text is nested too deeply. The C composer is recursive: ten thousand brackets would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            return event.start_mark.line + 1 if event.start_mark else 1
    return None


class _Builder:
    """Nodes to plain data, collecting duplicate keys, keys that are not text, foreign tags and aliases to themselves."""

    def __init__(self, path: Path) -> None:
        self.file = shown_path(path)
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._nodes = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._nodes += 1
        if len(path) > _DEEPEST or self._nodes > _LARGEST:
            return self._overgrown(node, path)
        if id(node) in self._open:
            self._report(node, path, f"the alias refers to itself ({node.start_mark.line + 1})")
            return None
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._report(node, path, f"unsupported tag {node.tag!r}; expected plain YAML")
        self._open.add(id(node))
        built = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self._open.discard(id(node))
        return built

    def _overgrown(self, node: yaml.Node, path: KeyPath) -> None:
        """Aliases of aliases can grow a short text without limit."""
        if not self.problems:
            self._report(node, path[:1], f"grows by its aliases beyond {_DEEPEST} levels or {_LARGEST} values")

    def _sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        built: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
                name = key.value if isinstance(key, yaml.ScalarNode) else "of several values"
                self._report(key, path, f"the key {name!r} is not text; put it in quotes")
                continue
            line = key.start_mark.line + 1
            if key.value in built:
                self._report(key, (*path, key.value), f"duplicate key {key.value!r}; first given in line {first[key.value]}")
                continue
            first[key.value] = line
            built[key.value] = self.build(value, (*path, key.value))
        return built

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        value, kind = node.value, node.tag.removeprefix(_TAG)
        try:
            if kind == "str":
                return value
            if kind == "null":
                return None
            if kind == "bool" and value.lower() in ("true", "false"):
                return value.lower() == "true"
            if kind == "int":
                return int(value, 0) if value.startswith(("0o", "0x")) else int(value)
            if kind == "float":
                return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self._report(node, path, f"{_short(value)} cannot be read as a number")
            return None
        self._report(node, path, f"{_short(value)} has the unsupported tag {node.tag!r}; expected plain YAML")
        return None

    def _report(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(self.file, node.start_mark.line + 1, shown_key(path), message))


def _short(value: str) -> str:
    return repr(value if len(value) <= 40 else f"{value[:40]}…")
