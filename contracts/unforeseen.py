"""Rules that end their own evaluation in what the linter does not foresee, such as a division by zero: problems of their files."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from blackswan.contracts import loader
from blackswan.contracts.document import read
from blackswan.contracts.model import Contract, Vocabulary
from blackswan.contracts.problems import ContractError, Problem
from blackswan.contracts.schema import violations
from blackswan.contracts.vocabulary import FOLDER

UNFORESEEN: Final = (ArithmeticError, LookupError, MemoryError)


def load(paths: Iterable[Path | str] | None = None, vocabulary: Vocabulary | None = None) -> list[Contract]:
    """`loader.load`, with a ContractError that names the rule where one ends the linter."""
    given = None if paths is None else [Path(path) for path in paths]
    try:
        return loader.load(given, vocabulary)
    except UNFORESEEN as error:
        places = [FOLDER] if given is None else given
        files = [file for place in places for file in (sorted(place.glob("*.yaml")) if place.is_dir() else [place])]
        found = [problem for file in dict.fromkeys(files) for problem in _of_rules(file)]
        if not found:
            raise
        raise ContractError(found) from error


def diagnose(config: Mapping[str, Any], statistics: Mapping[str, Any]) -> list[Any]:
    """`contracts.rules.diagnose` by the rules of all contracts, with a ContractError that names the rule where one ends it."""
    from blackswan.contracts import rules

    try:
        return rules.diagnose(config, statistics)
    except UNFORESEEN:
        for claim in [claim for contract in load() for claim in contract.claims]:
            try:
                rules.diagnose(config, statistics, [claim])
            except UNFORESEEN as error:
                problem = Problem(*claim.location, claim.id, f"cannot be evaluated on this configuration ({_said(error)})")
                raise ContractError([problem]) from error
        raise


def _of_rules(file: Path) -> Iterator[Problem]:
    """The rules of one file that end the linter; those outside the schema are not examined by it."""
    from blackswan.contracts import rule_lint

    try:
        document = read(file)
    except ContractError:
        return
    broken = {key[:2] for key, _ in violations(document, "contract.schema.json")}
    claims = document.data.get("claims")
    for index, claim in enumerate(claims if isinstance(claims, list) else []):
        if ("claims", index) in broken or not isinstance(claim, dict) or claim.get("kind") != "rule":
            continue
        try:
            list(rule_lint.faults(claim))
        except UNFORESEEN as error:
            message = f"cannot be evaluated ({_said(error)}); expected expressions and a message that give a value on all of domain.scalars"
            yield document.problem(("claims", index, "rule"), message)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
