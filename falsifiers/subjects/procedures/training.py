"""Whole runs of `impl`: what each step and epoch did, what lies in the folder afterwards, and what a kill at some moment leaves."""

import dataclasses
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.patching import planted
from blackswan.falsifiers.subjects.procedures.kill_points import KillPoints, file_events
from blackswan.falsifiers.subjects.procedures.workers import WORKERS, Outcome, Run
from blackswan.impl import dispatch
from blackswan.impl.adapter import load_adapter
from blackswan.impl.classifier import trainable_shapes
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.evaluation import Evaluation
from blackswan.impl.fit import BEST, LAST, STATE, EpochRecord, FitResult, StepRecord, fit
from blackswan.impl.group import Group
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import Samples
from blackswan.impl.tokens import ByteTokens
from blackswan.impl.trainer import BatchResult
from blackswan.impl.training_state import load_state
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
Arrays = dict[str, Array]
_ENDED = "ended"


def fit_run(scalars: Scalars, device: torch.device) -> Arrays:
    """A run from its first step to its last, in this process; see `_run` for the outputs. `spoil` plants a NaN after that step."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(scalars, device, Path(folder) / "run", resume=False)


def fit_run_killed(scalars: Scalars, device: torch.device) -> Arrays:
    """The same in processes of its own: killed at the moments in `kills`, one after the other, and continued each time.

    A moment is a name, of a write to the folder or of a step, and how often it has come in that process. `log` holds a line for each step
    that any process made, `moments` the names of those of the last process in their order, `kills` how many were killed.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder, killed = Path(parent) / "run", 0
        for kill in (*scalars["kills"], None):
            request = {**scalars, "folder": str(folder), "kill": kill, "resume": (folder / "run.json").exists()}
            outcome = WORKERS.run(Run(f"{__name__}:process", 1, request, str(device), planted()))[0]
            killed += outcome.signal == signal.SIGKILL
            if outcome.signal != signal.SIGKILL and (kill is None or outcome.error):
                break
        return {**_answered(outcome), "log": np.asarray(_log(folder).read_text().splitlines()), "kills": np.asarray(killed)}


def fit_continued(scalars: Scalars, device: torch.device) -> Arrays:
    """A run broken off after `stop` steps, and continued with `changes` to the request; `damage` changes a bit of its state before.

    The damage is a part of the state's file, see `_places`, and a share of the way through it. Before that the run is continued with each
    of `others`, changes by a name: `others/<name>` is the refusal, empty where there is none. `settings` are the last ones, as JSON.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        _run({**scalars, "stop": scalars["stop"]}, device, folder, resume=False)
        if (damage := scalars.get("damage")) is not None:
            path = next((folder / STATE).iterdir())
            content = bytearray(path.read_bytes())
            part, share = damage
            places = _places(content, part)
            content[places[int(share * len(places))]] ^= 1
            path.write_bytes(content)
        others = scalars.get("others", {}).items()
        refusals = {f"others/{name}": np.asarray(_refusal(scalars, changes, device, folder)) for name, changes in others}
        settings = dataclasses.asdict(ClassifyConfig.from_mapping({**scalars, **scalars["changes"]}["settings"]))
        return _continued(scalars, scalars["changes"], device, folder) | refusals | {"settings": np.asarray(json.dumps(settings))}


def _places(content: bytearray, part: str) -> Sequence[int]:
    """Where a part of a safetensors file lies: the whole `file`, its `tensors`, or the digits of what it says of the run's `progress`.

    A digit with its last bit changed is another one, so that the file can still be read.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    if part != "progress":
        return range(end if part == "tensors" else 0, len(content))
    text = json.dumps(json.loads(content[8:end])["__metadata__"]["progress"])[1:-1].encode()
    start = content.index(text)
    return [start + at for at, byte in enumerate(text) if chr(byte).isdigit()]


def _continued(scalars: Scalars, changes: Scalars, device: torch.device, folder: Path) -> Arrays:
    before = _content(folder)
    try:
        return _run({**scalars, "stop": None, **changes}, device, folder, resume=True)
    except Exception:
        if _content(folder) != before:
            raise RuntimeError("the refusal changed the folder") from None
        raise


def _refusal(scalars: Scalars, changes: Scalars, device: torch.device, folder: Path) -> str:
    try:
        _continued(scalars, changes, device, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def process(group: Group, device: torch.device, scalars: Scalars) -> Arrays:
    """One process of `fit_run_killed`."""
    del group
    folder = Path(scalars["folder"])
    moment = KillPoints(scalars["kill"])
    with file_events(folder, moment):
        found = _run(scalars, device, folder, resume=scalars["resume"], moment=lambda: moment("step"))
    return {**found, "moments": np.asarray(moment.seen)}


def pipeline_steps(scalars: Scalars, device: torch.device) -> Arrays:
    """Calls of a pipeline's entry points, in order: `calls` are pairs of a name and what it is given.

    `<i>/loss`, `/norm`, `/total`, `/correct`, `/accuracy` of call i, `<i>/vector` of a gradient vector, `<i>/classes` and `/probabilities`
    of a prediction, `<i>/confusion`, `/precision`, … of an evaluation, `<i>/error` of a refusal, and `<i>/state/…` after it. `summary` is
    the pipeline's text.
    """
    pipeline = _pipeline(scalars, device)
    found: Arrays = {"summary": np.asarray(pipeline.summary())}
    for index, (name, given) in enumerate(scalars["calls"]):
        found |= {f"{index}/{key}": value for key, value in _called(pipeline, scalars, name, given).items()}
        found |= {f"{index}/state/{key}": value.numpy() for key, value in _on_host(pipeline.trainer.state()).items()}
    return found


def _called(pipeline: ClassifyPipeline, scalars: Scalars, name: str, given: Any) -> Arrays:
    samples = _samples(scalars, "train")
    try:
        if name == "gradient_vector":
            return {"vector": pipeline.gradient_vector().cpu().numpy()}
        if name == "apply":
            return _batch_result(pipeline.apply())
        if name == "apply_gradient_vector":
            return _batch_result(pipeline.apply_gradient_vector(torch.tensor(given, device=pipeline.device)))
        if name == "evaluate":
            return _evaluation(pipeline.evaluate(samples.select(given)))
        if name in ("predict", "probabilities"):
            texts = [bytes(samples.rows[i]).decode("latin-1") for i in given]
            classes, probabilities = pipeline.answers(texts)
            return {"classes": np.asarray(classes), "probabilities": probabilities.numpy()}
        return _batch_result(getattr(pipeline, name)(samples.select(given)))
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        return {"error": np.asarray(f"{type(error).__name__}: {error}")}


def _evaluation(found: Evaluation) -> Arrays:
    numbers = {name: np.asarray(getattr(found, name)) for name in ("loss", "accuracy", "total", "confusion")}
    scores = {name: np.asarray([getattr(each, name) for each in found.per_class]) for name in ("precision", "recall", "f1", "support")}
    return numbers | scores


def _batch_result(result: BatchResult) -> Arrays:
    norm = np.nan if result.gradient_norm is None else result.gradient_norm
    numbers = {"loss": result.loss, "norm": norm, "total": result.total, "correct": result.correct, "accuracy": result.accuracy}
    return {name: np.asarray(value) for name, value in numbers.items()}


def _run(scalars: Scalars, device: torch.device, folder: Path, *, resume: bool, moment: Callable[[], None] = lambda: None) -> Arrays:
    """A run in the folder; it ends after `stop` steps where that is given, and with `next_rate` each step sets the next one's rate to that
    share of the schedule's.

    A column a field of the step and epoch records (`steps/loss`, …); `fed/<step>` the samples of a step as text; `state/<step>/…` the
    trainer's state after a step and `epoch/<n>/…` the trainable tensors after an epoch, `final/…`, `best/…` and `last/…` what lies in the
    folder; `before/…` and `after/…` what is not trained.
    """
    pipeline = _pipeline(scalars, device)
    watch = _Watch(pipeline, folder, moment, scalars)
    before = _frozen(pipeline)
    validation = _samples(scalars, "validation") if scalars.get("validation_rows") else None
    stopped, result = "", None
    with dispatch.recording() if scalars.get("record") else _nothing() as calls:
        watch.calls = calls
        try:
            result = fit(
                pipeline,
                _samples(scalars, "train"),
                validation,
                folder,
                resume=resume,
                save_every=scalars.get("save_every"),
                on_step=watch.step,
                on_epoch=watch.epoch,
            )
        except _Stop:
            pass
        except FloatingPointError as error:
            stopped = str(error)
    found = watch.columns() | watch.found | {"stopped": np.asarray(stopped)}
    found |= {f"before/{name}": value for name, value in before.items()}
    found |= {f"after/{name}": value for name, value in _frozen(pipeline).items()}
    return found | _result(result) | _folder(folder, pipeline)


class _Stop(BaseException):
    pass


class _Watch:
    """Notes what a run says of itself, and what the trainer holds then."""

    def __init__(self, pipeline: ClassifyPipeline, folder: Path, moment: Callable[[], None], scalars: Scalars) -> None:
        self.pipeline, self.log, self.moment, self.scalars = pipeline, _log(folder), moment, scalars
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []
        self.found: Arrays = {}
        self.calls: list[dispatch.Call] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)
        with self.log.open("a") as file:
            file.write(f"{record.step} {record.epoch} {record.loss!r} {record.gradient_norm!r} {record.learning_rate!r}\n")
        if self.scalars.get("states"):
            self.found |= {f"state/{record.step}/{name}": value.numpy() for name, value in _on_host(self.pipeline.trainer.state()).items()}
        if self.scalars.get("record"):
            self.found[f"fed/{record.step}"] = np.asarray(_fed(self.calls))
            self.calls.clear()
        rates = self.pipeline.trainer.learning_rates
        if (share := self.scalars.get("next_rate")) is not None and record.step < len(rates):
            self.pipeline.learning_rate = share * rates[record.step]
        self.moment()
        if record.step == self.scalars.get("spoil"):
            self.pipeline.classifier.score.bias.data[0] = float("nan")
        if record.step == self.scalars.get("stop"):
            raise _Stop

    def epoch(self, record: EpochRecord) -> None:
        self.epochs.append(record)
        trainable = self.pipeline.classifier.trainable_parameters()
        self.found |= {f"epoch/{record.epoch}/{name}": value.detach().cpu().numpy().copy() for name, value in trainable.items()}
        if self.scalars.get("record"):
            self.calls.clear()
        self.moment()

    def columns(self) -> Arrays:
        return _columns("steps", StepRecord, self.steps) | _columns("epochs", EpochRecord, self.epochs)


def _columns(name: str, kind: Any, records: Sequence[Any]) -> Arrays:
    fields = [field.name for field in dataclasses.fields(kind) if field.name != "seconds"]
    return {f"{name}/{field}": np.asarray([_number(getattr(record, field)) for record in records]) for field in fields}


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _fed(calls: Sequence[dispatch.Call]) -> list[str]:
    """The samples that the recorded training passes read, each its tokens and its label as text."""
    found = []
    passes = [call.path.removesuffix("model.embed_tokens") for call in calls if call.path.endswith("model.embed_tokens")]
    by_path = {call.path: call for call in calls}
    for prefix in (each for each in passes if ".micro." in each):
        ids, mask = by_path[f"{prefix}model.embed_tokens"].inputs["input_ids"], by_path[f"{prefix}pool"].inputs["mask"]
        loss = by_path[f"{prefix}loss"].inputs
        labels = loss["labels"] if "labels" in loss else loss["targets"]
        assert ids is not None
        assert mask is not None
        assert labels is not None
        for row, real, label in zip(ids, mask, labels, strict=True):
            found.append(json.dumps([row[real].tolist(), label.tolist()]))
    return found


def _result(result: FitResult | None) -> Arrays:
    if result is None:
        return {_ENDED: np.asarray(False)}
    numbers = {
        "result/steps": result.steps,
        "result/epochs": len(result.epochs),
        "result/best_epoch": _number(result.best_epoch),
        "result/best_loss": _number(result.best_validation_loss),
        "result/stopped_early": result.stopped_early,
    }
    columns = _columns("result/records", EpochRecord, result.epochs)
    return {_ENDED: np.asarray(True), **{name: np.asarray(value) for name, value in numbers.items()}, **columns}


def _folder(folder: Path, pipeline: ClassifyPipeline) -> Arrays:
    """What lies in the run's folder."""
    found: Arrays = {}
    state = load_state(folder / STATE)
    if state is not None:
        progress = dataclasses.asdict(state[0])
        kept = {name: progress[name] for name in ("step", "epoch", "position", "best_loss", "best_epoch", "stale_epochs", "finished")}
        found |= {f"final/progress/{name}": np.asarray(_number(value)) for name, value in kept.items()}
        found |= {f"final/{name}": value.numpy() for name, value in state[1].items()}
    for part in (BEST, LAST):
        if (folder / part).is_dir():
            stored = load_adapter(folder / part, pipeline.architecture).trainable
            found |= {f"{part}/{name}": value.numpy() for name, value in stored.items()}
    return found


def _pipeline(scalars: Scalars, device: torch.device) -> ClassifyPipeline:
    """With the parameters of a case of `train_steps`."""
    from blackswan.falsifiers.subjects.implementation import _config  # imports this package

    architecture = dataclasses.replace(_config(scalars["scalars"]), max_positions=1024)
    # What a step read is taken from the calls of operations, which the hand-written layers do not make.
    engine = {"engine": "torch"} if scalars.get("record") else {}
    config = ClassifyConfig.from_mapping({**scalars["settings"], **engine})
    parameters = {name.removeprefix("parameters/"): torch.tensor(value, dtype=torch.float32) for name, value in scalars["inputs"].items()}
    tokens = ByteTokens(config.max_seq_len, config.padding_side)
    from blackswan.impl.classifier import Adaptation

    names = trainable_shapes(architecture, Adaptation.of(config))
    base = {name: value for name, value in parameters.items() if name not in names}
    return ClassifyPipeline(architecture, config, base, {name: parameters[name] for name in names}, tokens, device=device)


def _samples(scalars: Scalars, part: str) -> Samples:
    rows, targets = (scalars[f"{part}_{name}"] for name in ("rows", "targets"))
    several = bool(scalars["settings"].get("multi_label", False))
    return Samples(tuple(map(tuple, rows)), tuple(tuple(t) if several else t for t in targets), scalars["settings"]["num_classes"], several)


def _frozen(pipeline: ClassifyPipeline) -> Arrays:
    """What the model holds besides the trainable tensors; and the weight that each projection computes with."""
    trainable = pipeline.classifier.trainable_parameters()
    found = {name: value for name, value in pipeline.classifier.state_dict().items() if name not in trainable}
    for name, module in pipeline.classifier.named_modules():
        if getattr(module, "quantized", None) is not None:
            found[f"used/{name}.weight"] = module.quantized.dequantized(torch.float32)
    # NumPy has no bfloat16, whose values are all float32's.
    kept = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in found.items()}
    return {name: value.detach().cpu().clone().numpy() for name, value in kept.items()}


def _on_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _answered(outcome: Outcome) -> Arrays:
    if outcome.error is not None:
        raise RuntimeError(f"the run did not go on: {outcome.error}: {outcome.message}")
    return dict(outcome.arrays)


def _log(folder: Path) -> Path:
    return folder.with_name("log.txt")


@contextmanager
def _nothing() -> Iterator[list[dispatch.Call]]:
    yield []
