"""The places of a run's verdicts and pages, and the names of its commands."""

from pathlib import Path
from typing import Final

CODE: Final = Path(__file__).resolve().parents[1]
"""The folder that holds contracts, reference, impl, falsifiers and reports: the root of a checkout, or the installed package."""


def in_checkout() -> bool:
    """Whether this code is a checkout of the project and the working directory lies in it."""
    return (CODE / "blackswan" / "__init__.py").is_file() and Path.cwd().is_relative_to(CODE)


def generated() -> Path:
    """The folder for verdicts and pages: `reports/generated` of a checkout that one works in, else `blackswan-reports` here."""
    return CODE / "reports" / "generated" if in_checkout() else Path.cwd() / "blackswan-reports"


def shown(path: Path) -> str:
    """The path as seen from the working directory where it lies below it."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)


def attack_command() -> str:
    """The beginning of a command line that attacks claims from the working directory."""
    if not (CODE / "blackswan" / "__init__.py").is_file():
        return "blackswan falsify"
    return f"pytest {shown(CODE / 'falsifiers')}"
