"""One value in many spellings: those that the core schema of YAML 1.2 has for it, in a file and on a command line."""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any


def in_a_file(value: Any) -> tuple[str, ...]:
    """The value of a key."""
    if value is None:
        return ("null", "~", "Null", "NULL", "", "!!null null")
    if isinstance(value, bool):
        return (str(value), str(value).lower(), str(value).upper(), f"!!bool {value}")
    if isinstance(value, list):
        return (*(f"[{', '.join(each)}]" for each in zip(*map(_numbers, value), strict=False)), in_lines(map(repr, value)))
    if isinstance(value, str):
        listed = (f"[{value.replace(',', ', ')}]", in_lines(value.split(","))) if "," in value else ()
        return (value, f"'{value}'", f'"{value}"', f"!!str {value}", *listed)
    return _numbers(value)


def in_lines(entries: Iterable[str]) -> str:
    """A list whose entries have lines of their own."""
    return "".join(f"\n  - {entry}" for entry in entries)


def as_option(value: Any) -> tuple[str, ...]:
    """The value of an option; a switch has none."""
    if isinstance(value, bool):
        return ()
    if isinstance(value, list):
        rows = (", ".join(each) for each in zip(*map(_numbers, value), strict=False))
        return tuple(each for text in rows for each in (text, text.replace(" ", "")))
    return ("none", "None", "NONE") if value is None else (value,) if isinstance(value, str) else _numbers(value)


def _numbers(value: float) -> tuple[str, ...]:
    if isinstance(value, int):
        return (str(value), f"+{value}", hex(value), oct(value), f"0{value}")
    digits = Decimal(repr(value))
    plain = f"{digits:f}"
    scaled = (f"{digits.scaleb(places):f}{exponent}" for places, exponent in ((4, "e-4"), (-3, "e3"), (-2, "E+02")))
    places = max(0, -int(digits.as_tuple().exponent))
    whole = f"{digits.scaleb(places):f}.e-{places}"  # a point may have no digit behind it
    return (repr(value), f"+{value!r}", plain, f"{plain}0", plain.removeprefix("0"), whole, *scaled)
