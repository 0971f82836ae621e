"""Contract files to contracts. Every problem of every file is collected before anything is refused."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from blackswan.contracts.document import Document, read
from blackswan.contracts.domains import build
from blackswan.contracts.lint import faults, is_system
from blackswan.contracts.model import (
    Check,
    Claim,
    Contract,
    Domain,
    Example,
    Examples,
    Factors,
    Location,
    Rule,
    Signature,
    Source,
    Tolerance,
    Vocabulary,
)
from blackswan.contracts.named_domains import expanded
from blackswan.contracts.problems import ContractError, Problem, shown_path
from blackswan.contracts.schema import violations
from blackswan.contracts.vocabulary import VOCABULARY_FILES, factors, folders, load_vocabulary

_PATTERN = "*-v*.yaml"


def load(paths: Iterable[Path | str] | None = None, vocabulary: Vocabulary | None = None) -> list[Contract]:
    """The contracts of files and folders, by default of this folder and the user's own.

    ContractError holds every problem of every file: nothing is loaded unless all of it can be.
    """
    problems: list[Problem] = []
    files = _files(folders() if paths is None else [Path(path) for path in paths], problems)
    documents = [document for path in files if (document := _read(path, problems))]
    try:
        vocabulary = vocabulary or load_vocabulary()
    except ContractError as error:
        raise ContractError([*problems, *error.problems]) from error
    for document in documents:
        problems += _problems(document, vocabulary)
    problems += _duplicates(documents)
    if problems:
        raise ContractError(problems)
    return [_contract(document, vocabulary) for document in documents]


def _files(paths: Iterable[Path], problems: list[Problem]) -> list[Path]:
    files: dict[Path, None] = {}
    for path in paths:
        found = sorted(path.glob(_PATTERN)) if path.is_dir() else [path]
        if not found:
            problems.append(Problem(shown_path(path), 1, "", f"has no contracts; expected files named {_PATTERN}"))
        if path.is_dir():
            problems += _passed_over(path, found)
        files.update(dict.fromkeys(found))
    return list(files)


def _passed_over(folder: Path, found: Iterable[Path]) -> Iterator[Problem]:
    """YAML that nobody would read, so that none of its claims is asked."""
    known = {*found, *(folder / name for name in VOCABULARY_FILES)}
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path not in known):
        yield Problem(
            shown_path(path), 1, "", f"is read by nobody; expected a contract to be named {_PATTERN}, such as {path.stem}-v1.yaml"
        )


def _read(path: Path, problems: list[Problem]) -> Document | None:
    try:
        document, found = expanded(read(path))
    except ContractError as error:
        problems += error.problems
        return None
    problems += found
    return document


def _problems(document: Document, vocabulary: Vocabulary) -> list[Problem]:
    """The problems of one file, in the order of its lines; a claim outside the schema is not examined further."""
    wrong = list(violations(document, "contract.schema.json"))
    broken = {key[:2] for key, _ in wrong}
    found = [document.problem(key, message) for key, message in wrong]
    if not {("contract",), ("version",)} & broken:
        found += _file_name(document)
    claims = document.data.get("claims")
    sources = document.data.get("sources", {})
    for index, claim in enumerate(claims if isinstance(claims, list) else []):
        if ("claims", index) not in broken and isinstance(sources, dict) and "use" not in claim.get("domain", {}):
            found += [document.problem(("claims", index, *key), message) for key, message in faults(claim, vocabulary, sources)]
    return sorted(dict.fromkeys(found), key=lambda problem: (problem.line, problem.key))


def _file_name(document: Document) -> Iterable[Problem]:
    name, version = document.data.get("contract"), document.data.get("version")
    match = re.fullmatch(r"(.+)-v(\d+)\.yaml", document.path.name)
    if not isinstance(name, str) or not isinstance(version, str):
        return
    major = version.split(".")[0]
    if match is None or match[1] != name:
        yield document.problem(("contract",), f"is {name!r} in the file {document.path.name}; expected {name}-v{major}.yaml")
    elif match[2] != major:
        yield document.problem(("version",), f"is {version}, and the file name says v{match[2]}; the major versions must be equal")


def _duplicates(documents: Iterable[Document]) -> Iterable[Problem]:
    first: dict[str, str] = {}
    for document in documents:
        claims = document.data.get("claims")
        for index, claim in enumerate(claims if isinstance(claims, list) else []):
            name = claim.get("id") if isinstance(claim, dict) else None
            if not isinstance(name, str):
                continue
            path = ("claims", index, "id")
            if name in first:
                yield document.problem(path, f"duplicate claim id {name!r}; first given at {first[name]}")
            first.setdefault(name, f"{document.file}:{document.line(path)}")


def _contract(document: Document, vocabulary: Vocabulary) -> Contract:
    raw = document.data
    locations = [Location(document.file, document.line(("claims", index))) for index in range(len(raw["claims"]))]
    return Contract(
        name=raw["contract"],
        version=raw["version"],
        title=raw["title"],
        sources={name: Source(**source) for name, source in raw.get("sources", {}).items()},
        claims=tuple(
            _claim(claim, raw["contract"], vocabulary, location) for claim, location in zip(raw["claims"], locations, strict=True)
        ),
        path=document.path,
        on_request=raw.get("on_request", False),
    )


def _claim(raw: Mapping[str, Any], contract: str, vocabulary: Vocabulary, location: Location) -> Claim:
    domain = _domain(raw, vocabulary)
    return Claim(
        id=raw["id"],
        contract=contract,
        severity=raw["severity"],
        kind=raw["kind"],
        operation=raw.get("operation"),
        statement=raw["statement"].strip(),
        formula=raw.get("formula"),
        domain=domain,
        cases=raw.get("cases"),
        check=raw.get("check"),
        arguments=raw.get("arguments", {}),
        tolerance=_tolerance(raw, domain.dtype, vocabulary) if "tolerance" in raw else None,
        must_catch=tuple(raw.get("must_catch", ())),
        sources=raw.get("sources", {}),
        origin=tuple(raw.get("origin", ())),
        correction=raw.get("correction"),
        rule=_rule(raw["rule"]) if "rule" in raw else None,
        examples=_examples(raw.get("examples", {})),
        location=location,
        content=raw,
        backend=raw.get("backend"),
        resolved_signature=_resolved_signature(raw, vocabulary),
    )


def _resolved_signature(raw: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The entries of the claim's operation, of those that it calls, and of its check, without what changes no verdict."""
    known = vocabulary.operations
    names, waiting = set[str](), [raw["operation"]] if raw.get("operation") in known else []
    while waiting:
        names.add(name := waiting.pop())
        waiting += [called for called in known[name].calls if called not in names and called in known]
    resolved_signature: dict[str, Any] = {"operations": {name: _said(known[name]) for name in sorted(names)}}
    return resolved_signature | ({"check": _said(vocabulary.checks[raw["check"]])} if raw.get("check") in vocabulary.checks else {})


@lru_cache(maxsize=1024)  # many claims ask for one operation
def _said(entry: Signature | Check) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if name not in ("doc", "location", "conventions")}


def _domain(raw: Mapping[str, Any], vocabulary: Vocabulary) -> Domain:
    if raw["kind"] == "rule":
        from blackswan.contracts.rule_lint import domain_choice

        return Domain(input="none", scalars={name: domain_choice(name, value) for name, value in raw["domain"]["scalars"].items()})
    if is_system(raw):
        plain, given = Domain(input="none"), raw.get("domain", {})
        return Domain(input="none", dtype=tuple(given.get("dtype", plain.dtype)), device=tuple(given.get("device", plain.device)))
    return build(raw["domain"], vocabulary.operations[raw["operation"]])


def _tolerance(raw: Mapping[str, Any], dtypes: Iterable[str], vocabulary: Vocabulary) -> Tolerance:
    """A tolerance; the factors of a rounding one are the claim's own, or those of calibration.json."""
    tolerance = raw["tolerance"]
    if tolerance["basis"] != "rounding":
        return Tolerance(**tolerance)
    given = tolerance.get("factors", {})
    own = dict.fromkeys(dtypes, given) if "rms" in given else given
    measured = (vocabulary.factors or {}).get(raw["id"], {})
    return Tolerance("rounding", {name: factors(own[name]) if own else measured.get(name, Factors(1.0, 1.0, 1.0)) for name in dtypes})


def _rule(raw: Mapping[str, Any]) -> Rule:
    from blackswan.contracts.rule_lint import parse

    return parse(raw)


def _examples(raw: Mapping[str, Any]) -> Examples:
    from blackswan.contracts.fields import split

    return Examples(**{kind: tuple(Example(*split(example)) for example in listed) for kind, listed in raw.items()})
