"""`blackswan vet-model`: a model as somebody has it, from their own `from_pretrained`, against the reference on its own weights."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackswan.contracts.conventions import Declaration, shared_out, shown
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.subjects.doors.models import Described
from blackswan.falsifiers.subjects.isolated import Isolated
from blackswan.falsifiers.subjects.named import Named
from blackswan.falsifiers.subjects.protocol import WholeSubject
from blackswan.falsifiers.system.handed_parity import Handed, held

EXIT_FAILED, EXIT_USAGE = 1, 4


@dataclass(frozen=True)
class Parity:
    """What a model came to: every output in the order of the computation, up to the first that leaves its noise."""

    name: str
    dtype: str
    comparisons: list[Comparison]
    declared: str = ""
    raised: str = ""

    @property
    def held(self) -> bool:
        """Whether all outputs are within their noise."""
        return not self.raised and held(self.comparisons)

    @property
    def first(self) -> str | None:
        """The first output that left its noise, such as `hidden/model.layers.2`."""
        return next((one.tensor for one in self.comparisons if not one.held), None)

    def __str__(self) -> str:
        """State, model, and how near it came or what is wrong."""
        worst = max(self.comparisons, key=lambda one: one.headroom, default=None)
        drowned = [one.tensor for one in self.comparisons if one.rejected]
        if self.raised:
            found = self.raised
        elif self.first:
            failed = self.comparisons[-1]
            found = f"{failed.tensor} is the first to leave its noise ({failed.reason or f'{failed.headroom:.3g} × its tolerance'})"
            found += f"; at {list(failed.index)}: expected {failed.expected}, got {failed.actual}"
        else:
            assert worst is not None
            found = f"{len(self.comparisons)} outputs, the worst error {worst.headroom:.3g} × its tolerance ({worst.tensor})"
        found += f"; {len(drowned)} prove nothing, for noise drowns them: {', '.join(drowned[:3])}" if drowned else ""
        found += f"; declared {self.declared}" if self.declared else ""
        return f"{'HELD' if self.held else 'FALSIFIED':<9}  {self.name} in {self.dtype}: {found}"


def check_model(
    model: Any,
    *,
    names: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    pooling: str = "last",
    alpha: float | None = None,
    declared: Declaration | None = None,
    device: str = "cpu",
    seed: int = 0,
    on_fail: str = "raise",
) -> Parity:
    """Holds a module, or what a function returns, to the reference on its own weights, in this process.

    `names` maps its names to Hugging Face's (see `subjects.handed`); `config` is the content of a config.json where the module has no
    `.config`; `pooling` is that before a head of classes; `alpha` is LoRA's where there is no `peft_config`. Raises a ValueError for what
    cannot be held to the reference, and with on_fail="raise" an AssertionError that names the first wrong output.
    """
    __tracebackhide__ = True
    if on_fail not in ("raise", "return"):
        raise ValueError(f"on_fail={on_fail!r}: expected raise or return")
    from blackswan.falsifiers.subjects.handed import HandedModel

    name = getattr(model, "__qualname__", type(model).__name__)
    found = asked(HandedModel(model, name, device, Described(names or {}, config, pooling, alpha)), name, device, declared or {}, seed)
    if not found.held and on_fail == "raise":
        raise AssertionError(str(found))
    return found


def asked(model: Any, name: str, device: str, declared: Declaration, seed: int) -> Parity:
    """Asks a HandedModel, here or in another process."""
    handed = Handed(**model.described(), seed=seed)
    subject = WholeSubject(name, device, {key: own for key, own in shared_out(signatures(), declared).items() if own})
    try:
        answer = model.answered(handed.inputs)
    except ValueError:
        raise
    except Exception as error:  # whatever a model raises on a batch is its answer
        said = str(error) if isinstance(error, SubjectError) else f"raises {type(error).__name__}: {error}"
        return Parity(name, handed.dtype, [], raised=said)
    return Parity(name, handed.dtype, handed.compare(answer, subject), shown(declared))


def run(given: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    try:
        pairs = [text.partition("=") for text in given.declare]
        if wrong := next((text for text, (name, _, value) in zip(given.declare, pairs, strict=True) if not (name and value)), None):
            raise ValueError(f"--declare {wrong}: expected NAME=VALUE, such as loss_dtype=storage")
        told = Described(_object(given.names) or {}, _object(given.config), given.pooling, given.alpha)
        model = Isolated(Named(given.model, device=given.device, told=told))
        try:
            found = asked(model, given.model, given.device, {name: value for name, _, value in pairs}, given.seed)
        finally:
            model.close()
    except Exception as error:
        if not any(kind.__name__ in ("ValueError", "OSError") for kind in type(error).__mro__):
            raise
        print(f"vet-model: {error}", file=sys.stderr)
        return EXIT_USAGE
    record = {"model": given.model, "dtype": found.dtype, "held": found.held, "first": found.first}
    record |= {"declared": found.declared, "raised": found.raised, "outputs": [one.describe() for one in found.comparisons]}
    print(json.dumps(record, indent=2, ensure_ascii=False) if given.json else found)
    return 0 if found.held else EXIT_FAILED


def _object(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}; expected a JSON object")
    return found
