"""What honest implementations may do in more than one way, and what one of them declares of itself.

An operation's `conventions` in operations.yaml name the choices; every operation has `intermediates` beside them. The first of a choice's
values is what an implementation is held to that declares nothing.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from blackswan.contracts.model import Signature

Declaration = Mapping[str, str]
"""Values by the name of the convention."""
DECLARED = "blackswan_declared"
"""The attribute that `declare` leaves on a function."""
NARROW_ONLY = ("intermediates", "loss_dtype")
"""They change nothing where values are stored in the dtype that they are computed in."""


def choices(signature: Signature) -> dict[str, tuple[str, ...]]:
    """The values of each convention of an operation, its default first."""
    intermediates = sorted(("float32", "storage"), key=lambda value: value != signature.intermediates)
    return {"intermediates": tuple(intermediates), **signature.conventions}


def checked(signature: Signature, declared: Mapping[str, Any]) -> dict[str, str]:
    """What is declared of an operation. ValueError, with the closed list, for a name or value that it does not have."""
    known = choices(signature)
    for name, value in declared.items():
        if name not in known:
            raise ValueError(f"{signature.name} has no convention {name!r}; it has {', '.join(known)}")
        if value not in known[name]:
            raise ValueError(f"{signature.name}: {name} is {value!r}; expected one of {', '.join(known[name])}")
    return dict(declared)


def shared_out(operations: Mapping[str, Signature], declared: Declaration) -> dict[str, Declaration]:
    """Each operation gets what is declared of it: a name is of every operation that has such a convention, `operation.name` of one alone.

    ValueError where none of them has it.
    """
    for name in declared:
        one, dot, _ = name.partition(".")
        if dot and one not in operations:
            raise ValueError(f"{name}: there is no operation {one!r} here; expected one of {', '.join(operations)}")
        if not dot and not any(name in choices(signature) for signature in operations.values()):
            known = dict.fromkeys(choice for signature in operations.values() for choice in choices(signature))
            raise ValueError(f"none of {', '.join(operations)} has a convention {name!r}; expected one of {', '.join(known)}")
    return {
        operation: checked(
            signature,
            {name: value for name, value in declared.items() if name in choices(signature)}
            | {name.removeprefix(f"{operation}."): value for name, value in declared.items() if name.startswith(f"{operation}.")},
        )
        for operation, signature in operations.items()
    }


def alternatives(signature: Signature, narrow: bool) -> Iterator[dict[str, str]]:
    """Everything that may be declared of an operation and changes something, the fewest conventions first."""
    known = {name: values for name, values in choices(signature).items() if narrow or name not in NARROW_ONLY}
    known |= {name: values[:1] for name, values in known.items() if name == "intermediates" and signature.intermediates == "storage"}
    drawn = [
        {name: value for (name, values), value in zip(known.items(), chosen, strict=True) if value != values[0]}
        for chosen in product(*known.values())
    ]
    yield from sorted(filter(None, drawn), key=len)


def shown(declared: Declaration) -> str:
    """In words: `intermediates: storage, reduction: weights`."""
    return ", ".join(f"{name}: {value}" for name, value in declared.items())


def declare(function: Callable[..., Any], **declared: str) -> Callable[..., Any]:
    """The same function or module, which says which conventions it follows: `declare(f, intermediates="storage", reduction="weights")`.

    The names and values are those of the operation in operations.yaml; they are checked where the function is asked as that operation.
    """
    former, plain = declared_of(function)

    @functools.wraps(plain)
    def same(*arguments: Any, **keywords: Any) -> Any:
        return plain(*arguments, **keywords)

    setattr(same, DECLARED, {**former, **declared})
    return same


def declared_of(function: Callable[..., Any]) -> tuple[Declaration, Callable[..., Any]]:
    """What is declared of a function or module, and the function itself."""
    found = getattr(function, DECLARED, None)
    return ({}, function) if found is None else (found, function.__wrapped__)  # type: ignore[attr-defined]
