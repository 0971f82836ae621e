"""Doors of a subject in another process. Dataclasses do not cross: there, nothing of this project can be imported. Plain arrays do."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blackswan.falsifiers.subjects.doors.models import Given, ModelOutputs, Rounded, Whole
from blackswan.falsifiers.subjects.doors.training import Corpus, Epoch, Kept, Kill, Plan, Problem, Rank, Read, Result, Run, Step
from blackswan.falsifiers.subjects.protocol import Lacks, Subject, TracedCall

Ask = Callable[..., Any]
"""Asks a method of METHODS in the other process."""


class FarModels:
    """The door `models`: see the protocol Model."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def outputs(self, whole: Whole, dtype: str, rounded: Rounded | None = None) -> ModelOutputs:
        """A forward and a backward pass."""
        how = rounded and (rounded.dtype, rounded.replay)
        return ModelOutputs(**self._ask("outputs", *_plain(whole), dtype, how))

    def calls(self, whole: Whole, dtype: str, block: str) -> list[TracedCall]:
        """The calls of a block."""
        return [TracedCall(**call) for call in self._ask("calls", *_plain(whole), dtype, block)]


def _plain(whole: Whole) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return dict(whole.scalars), dict(whole.inputs), dict(whole.parameters())


class FarTrainer:
    """The door `trainer`: see the protocol Trainer. Whole runs are asked of it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    @property
    def backends(self) -> tuple[str, ...]:
        """The ways in which it computes a step."""
        return tuple(self._ask("attribute", "backends"))

    @property
    def stand_in_backends(self) -> tuple[str, ...]:
        """None: its own kernels are asked, wherever they run."""
        return ()

    def __getattr__(self, name: str) -> Any:
        """The reason why it lacks that question, or that it does not get there."""
        self._ask("attribute", name)
        raise Lacks(f"a trainer is asked in a process of its own, where {name} does not reach it")

    def fit(self, problem: Problem, folder: Path, plan: Plan) -> Run:
        """A run in that folder."""
        own = {name: getattr(problem, name) for name in ("architecture", "parameters", "settings")}
        corpora = [corpus and asdict(corpus) for corpus in (problem.training, problem.validation)]
        found: dict[str, Any] = self._ask("fit", own, *corpora, str(folder), asdict(plan))
        parts: dict[str, Any] = {name: [kind(**each) for each in found.pop(name)] for name, kind in _PARTS.items()}
        result = found.pop("result")
        return Run(**parts, **found, result=result and Result(**result))

    def kept(self, folder: Path) -> Kept:
        """Reads the folder of a run."""
        return Kept(**self._ask("kept", str(folder)))


_PARTS: Mapping[str, Callable[..., Any]] = {"reads": Read, "steps": Step, "epochs": Epoch, "ranks": Rank}
DOORS: Mapping[str, Callable[[Ask], object]] = {"models": FarModels, "trainer": FarTrainer}
METHODS = ("door", "outputs", "calls", "attribute", "fit", "kept")


def asked(subject: Subject, method: str, backend: str | None, *arguments: Any) -> Any:
    """In the subject's process: a question to one of its doors, whose answer is made plain."""
    subject = subject if backend is None else subject.using(backend)
    if method == "door":
        subject.door(*arguments)
        return None
    door: Any = subject.door("models" if method in ("outputs", "calls") else "trainer")
    if method == "attribute":
        value = getattr(door, *arguments)
        return None if callable(value) else value
    if method == "kept":
        return asdict(door.kept(Path(*arguments)))
    if method == "fit":
        own, training, validation, folder, plan = arguments
        problem = Problem(**own, training=Corpus(**training), validation=validation and Corpus(**validation))
        plan |= {"kill": plan["kill"] and Kill(**plan["kill"]), "before": plan["before"] and Corpus(**plan["before"])}
        return asdict(door.fit(problem, Path(folder), Plan(**plan)))
    *given, dtype, last = arguments
    if method == "outputs":
        return vars(door.outputs(Given(*given), dtype, last and Rounded(*last)))
    return [vars(call) for call in door.calls(Given(*given), dtype, last)]
