"""JSON without silence: a key that is given twice is an error, when it is read and when it is written."""

import json
from typing import Any


def loads(text: str | bytes, *, repeated: bool = False) -> Any:
    """The value of a JSON text. Raises a ValueError for bad syntax, text that is not UTF-8, NaN or Infinity, and a key given twice.

    With `repeated` the last value of a key counts, for formats that say so.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json would guess UTF-16 and UTF-32 too
    if text.startswith("\ufeff"):
        raise ValueError("begins with a byte order mark; save it as UTF-8 without one")
    try:
        return json.loads(text, object_pairs_hook=dict if repeated else _unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """The text of a value, in lines. Raises a TypeError for what JSON does not have, and a ValueError for what `loads` would refuse.

    That is NaN, an infinity, and keys that differ only until they are text, as 1 and "1" do.
    """
    text = json.dumps(value, indent=2)
    loads(text)
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {key!r} is given twice")
        values[key] = value
    return values


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def require_text(text: str) -> None:
    """ValueError where a string holds half of a surrogate pair, which is valid JSON but no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"character {error.start + 1} is {half}, half of a surrogate pair; expected text that UTF-8 can hold") from None
