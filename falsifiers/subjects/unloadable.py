"""An implementation that cannot be loaded, since a name that its users import is not there: to every claim that is its answer."""

from typing import Any, NoReturn

from blackswan.falsifiers.subjects.protocol import Subject


class Unloadable(Subject):
    """Raises, whatever it is asked, what was raised when it was loaded."""

    name, names_errors = "impl", True

    def __init__(self, device: str, error: Exception) -> None:
        self.device, self._error = device, error

    def unsupported(self, operation: str, dtype: str) -> None:
        """Nothing: it had to answer."""
        del operation, dtype

    def _raise(self, *given: Any, **named: Any) -> NoReturn:
        del given, named
        raise ImportError(f"impl cannot be loaded: {self._error}", name="blackswan.impl") from self._error

    run = differentiate = at_rows = door = default_configurations = record = _raise
