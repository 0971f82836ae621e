"""A case: the concrete inputs of one attack, replayable from its file alone."""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.contracts.model import Signature
from blackswan.reference.classifier import trainable_names
from blackswan.reference.table import Array


@dataclass(frozen=True)
class Case:
    """Inputs of an operation: flat arrays by name, scalars with the signature's attributes, and where they came from.

    Real arrays are float64 and hold values that the dtype can hold.
    """

    operation: str
    dtype: str
    sizes: Mapping[str, int]
    scalars: Mapping[str, Any]
    seed: int
    flavour: str
    inputs: Mapping[str, Array]
    cotangents: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits over the operation, the dtype, the scalars and every array."""
        state = hashlib.sha256(json.dumps([self.operation, self.dtype, dict(self.scalars)], sort_keys=True, default=str).encode())
        for name, value in sorted(self._arrays().items()):
            array = np.ascontiguousarray(value)
            state.update(f"{name}:{array.dtype}:{array.shape}".encode())
            state.update(array.tobytes())
        return state.hexdigest()[:12]

    def _arrays(self) -> dict[str, Array]:
        return {f"input:{name}": value for name, value in self.inputs.items()} | {
            f"cotangent:{name}": value for name, value in self.cotangents.items()
        }

    def describe(self) -> dict[str, Any]:
        """The case as a record has it."""
        return {
            "sizes": dict(self.sizes),
            "scalars": {name: value for name, value in self.scalars.items() if name not in self.sizes},
            "seed": self.seed,
            "flavour": self.flavour,
            "digest": self.digest,
        }

    def save(self, path: Path, claim: str, answer: Mapping[str, Array] | None = None) -> None:
        """Writes the tensors and everything else that a replay needs, and an answer that was recorded, in float64.

        OSError where that cannot be; then nothing is left of it.
        """
        header = {"claim": claim, **{name: getattr(self, name) for name in ("operation", "dtype", "seed", "flavour")}}
        header |= {"sizes": dict(self.sizes), "scalars": dict(self.scalars)}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        arrays = self._arrays() | {f"answer:{name}": np.asarray(value, np.float64) for name, value in (answer or {}).items()}
        try:
            np.savez_compressed(partial, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]  # the stub types the keywords as allow_pickle
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # what a full disk cut off


def differentiable(signature: Signature, case: Case) -> list[str]:
    """The inputs to differentiate by: those of the signature that are present, groups spelt out."""
    present = []
    for name in signature.gradients:
        if name == "trainable":
            present += [f"parameters/{parameter}" for parameter in trainable_names(case.scalars)]
        elif name == "parameters":
            present += [key for key in case.inputs if key.startswith("parameters/")]
        elif name in case.inputs:
            present.append(name)
    return present


def load(path: Path) -> tuple[str, Case]:
    """The claim and the case of a replay file. ValueError where the file is no such file."""
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"not a replay file ({type(error).__name__}: {error})"
        raise ValueError(f"{path}: {why}; expected a case written by a falsified claim (counterexamples/*.npz)") from None


MOST_BYTES = 2**31
"""The most that a replay file may hold; no case that is drawn has as much."""


def _read(path: Path) -> tuple[str, Case]:
    with zipfile.ZipFile(path) as archive:
        claimed = sum(entry.file_size for entry in archive.infolist())
    if claimed > MOST_BYTES:
        raise ValueError(f"its arrays take {claimed:,} bytes; expected {MOST_BYTES:,} at most")
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
        header = json.loads(str(stored["header"]))
        inputs = {name.removeprefix("input:"): stored[name] for name in stored.files if name.startswith("input:")}
        cotangents = {name.removeprefix("cotangent:"): stored[name] for name in stored.files if name.startswith("cotangent:")}
    claim = str(header.pop("claim"))
    return claim, Case(inputs=inputs, cotangents=cotangents, **header)
