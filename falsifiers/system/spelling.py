"""One value in many spellings: those that the core schema of YAML 1.2 has for it, in a file and on a command line."""

from decimal import Decimal
from typing import Any


def in_a_file(value: Any) -> tuple[str, ...]:
    """The value of a key."""
    if value is None:
        return ("null", "~", "Null", "NULL", "", "!!null null")
    if isinstance(value, bool):
        return (str(value), str(value).lower(), str(value).upper(), f"!!bool {value}")
    if isinstance(value, list):
        return tuple(f"[{', '.join(each)}]" for each in zip(*map(_numbers, value), strict=False))
    if isinstance(value, str):
        return (value, f"'{value}'", f'"{value}"', f"!!str {value}", *([f"[{value.replace(',', ', ')}]"] if "," in value else []))
    return _numbers(value)


def as_option(value: Any) -> tuple[str, ...]:
    """The value of an option; a switch has none."""
    if isinstance(value, bool):
        return ()
    if isinstance(value, list):
        return tuple(each for text in in_a_file(value) for each in (text[1:-1], text[1:-1].replace(" ", "")))
    return ("none", "None", "NONE") if value is None else (value,) if isinstance(value, str) else _numbers(value)


def _numbers(value: float) -> tuple[str, ...]:
    if isinstance(value, int):
        return (str(value), f"+{value}", hex(value), oct(value), f"0{value}")
    digits = Decimal(repr(value))
    plain = f"{digits:f}"
    scaled = (f"{digits.scaleb(places):f}{exponent}" for places, exponent in ((4, "e-4"), (-3, "e3"), (-2, "E+02")))
    return (repr(value), f"+{value!r}", plain, f"{plain}0", plain.removeprefix("0"), *scaled)
