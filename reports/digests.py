"""Digests of everything that a verdict depends on: the files of four folders, and the claim."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from blackswan.contracts.model import Claim, contract_digest

FOLDERS: Final = ("contracts", "reference", "impl", "falsifiers")
_DATA: Final = (
    "contracts/*-v*.yaml",
    *(f"contracts/{name}.yaml" for name in ("operations", "checks", "origins")),
    *(f"contracts/{name}.json" for name in ("contract.schema", "vocabulary.schema", "calibration", "mutants", "system_checks")),
    *(f"falsifiers/data/*.{suffix}" for suffix in ("json", "jsonl", "safetensors")),
    "falsifiers/numeric/calibration_record.json",
    *(f"falsifiers/diagnosis/{name}.json" for name in ("failures", "planted")),
    "falsifiers/runner/known-failures.yaml",
)
"""The files that a run reads beside Python code. A file of another name changes no verdict, such as an export or an editor's backup."""


class DigestError(ValueError):
    """A folder or file that should be digested cannot be read; the message names it."""


def folder_digest(folder: Path | str) -> str:
    """SHA-256 over the bytes of a folder's code, contracts and data, and where in the folder they lie.

    Python code counts, and the data that a run reads; hidden files and files of other names do not.

    Raises:
        DigestError: the folder is missing, or a file cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DigestError(f"{folder}: no such folder; run from the root of the checkout")
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    found = {name: path for name, path in files.items() if _counts(folder.name, name)}
    try:
        content = [(name, hashlib.sha256(path.read_bytes()).hexdigest()) for name, path in sorted(found.items())]
    except OSError as error:
        raise DigestError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _counts(folder: str, name: str) -> bool:
    if any(part.startswith(".") for part in name.split("/")):
        return False
    return name.endswith(".py") or any(fnmatchcase(f"{folder}/{name}", pattern) for pattern in _DATA)


def tree_digests(root: Path | str) -> dict[str, str]:
    """The digest of each folder that verdicts depend on, as a run record's `digests` holds them."""
    return {folder: folder_digest(Path(root) / folder) for folder in FOLDERS}


def claim_digest(claim: Claim) -> str:
    """SHA-256 over a claim: its content, its resolved signature, and what the loader makes of them."""
    tolerance = None if claim.tolerance is None else asdict(claim.tolerance)
    loaded = [claim.kind, claim.operation, claim.check, claim.backend, claim.cases, asdict(claim.domain), tolerance, dict(claim.arguments)]
    return hashlib.sha256(json.dumps([contract_digest(claim), loaded], sort_keys=True).encode()).hexdigest()


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 over what a record of a verdict file says, apart from its own `digest`; blind to the order of keys.

    Raises:
        UnicodeEncodeError: a text in it is not Unicode.
    """
    said = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sealed(record: Mapping[str, Any], before: list[str]) -> dict[str, Any]:
    """The record with its digest, which is added to those `before` it in the file; the end record has a digest over all of these too."""
    complete = dict(record)
    if record.get("record") == "end":
        complete["lines"] = lines_digest(before)
    complete["digest"] = record_digest(complete)
    before.append(complete["digest"])
    return complete


def lines_digest(before: list[str]) -> str:
    """SHA-256 over the digests of all records but the end."""
    return hashlib.sha256("".join(before).encode()).hexdigest()
