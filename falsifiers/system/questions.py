"""Questions to a subject as text for people: which call, and with which settings."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

MOST = 900
"""Characters of a question that are shown."""


def question(door: str, call: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """`trainer.fit(epochs=2, pooling='last', resume=True)`: the plain values among the arguments, defaults left out."""
    parts = [part for value in given for part in _parts("", value)]
    parts += [part for name, value in named.items() for part in _parts(name, value)]
    text = ", ".join(parts)
    return f"{door}.{call}({text if len(text) <= MOST else text[:MOST] + ' …'})"


def _parts(name: str, value: Any) -> Iterator[str]:
    """`name=value` of every plain value in an argument; arrays and long lists are left out."""
    label = f"{name}=" if name else ""
    if isinstance(value, str | int | float | bool):
        long = isinstance(value, int) and value.bit_length() > 1000  # Python writes 4,300 digits, and any number of hexadecimal ones
        yield f"{label}{value:#x}" if long else f"{label}{value!r}"
    elif isinstance(value, Path):
        yield f"{label}{value.name.encode(errors='backslashreplace').decode()}"  # a name may hold bytes that are no text
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _parts(str(key), entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if (entry := getattr(value, field.name)) is not None and not _default(entry, field.default):
                yield from _parts(field.name, entry)


def _default(value: Any, default: Any) -> bool:
    return isinstance(value, str | int | float | bool) and value == default
