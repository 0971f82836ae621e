"""`blackswan vet-checkpoint`: a checkpoint on disk, with its own tokenizer and a text, against the float64 reference."""

import argparse
import gc
import json
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from blackswan.impl.progress import duration

if TYPE_CHECKING:
    from blackswan.falsifiers.system.checkpoint_parity import Answer, Parity

EXIT_FAILED, EXIT_USAGE = 1, 4
DTYPES = ("float32", "bfloat16")
TEXT = Path(__file__).resolve().parents[1] / "data" / "text.md"
DESCRIPTION = """Holds a checkpoint to the float64 reference: hidden states after every layer, logits and next-token loss of a text,
within the noise of the dtype; then every call of every layer on its own inputs; and the logits of transformers, where it is installed.
The model has to fit into memory once in the dtype; the reference holds one layer of it. Exit status: 0 all held, 1 something left its
noise, 4 the checkpoint, the text or an option cannot be used, 6 no such device."""
PEER = "transformers"


def add_parser(commands: Any) -> None:
    """The sub-command of `python -m falsifiers`."""
    add = commands.add_parser(
        "vet-checkpoint", help="hold a published checkpoint to the reference, layer by layer", description=DESCRIPTION
    )
    _add_options(add)
    add.set_defaults(run=run)


def _add_options(found: argparse.ArgumentParser) -> None:
    from blackswan.falsifiers.runner.options import positive

    add = found.add_argument
    add("model", type=Path, metavar="MODEL", help="a folder with config.json, safetensors and tokenizer.json, or a file MODEL.apr")
    add(
        "--text", type=Path, default=TEXT, metavar="FILE", help="the text; paragraphs are separated by empty lines (default: a shipped one)"
    )
    add("--paragraphs", type=positive, default=3, metavar="N", help="how many of its paragraphs (default: 3)")
    add("--tokens", type=positive, default=32, metavar="N", help="how many tokens of each (default: 32)")
    add("--dtype", action="append", choices=DTYPES, help="this dtype only; may be repeated")
    add("--device", action="append", metavar="NAME", help="this device only; may be repeated (default: cpu, and cuda where it is)")
    add("--no-transformers", action="store_true", help="do without the logits of transformers")
    add("--output", type=Path, metavar="FILE", help="write all comparisons as JSON")


def run(given: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    started = time.monotonic()
    try:
        vetting = Vetting.of(given)
    except (ValueError, OSError) as error:
        print(f"vet-checkpoint: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(vetting.description, flush=True)
    results = []
    for result in vetting.results():
        print(result.line, flush=True)
        results.append(result)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    failed = [result for result in results if not result.held]
    print(f"{len(results) - len(failed)} of {len(results)} held; {duration(time.monotonic() - started)}, {peak / 2**30:.1f} GiB of memory")
    if given.output:
        record = {"model": str(given.model), "text": str(given.text), "results": [result.record for result in results]}
        given.output.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return EXIT_FAILED if failed else 0


@dataclass
class Result:
    """One answer's verdict: what left its noise, or how near it came."""

    name: str
    held: bool
    found: str
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """State, answer and finding."""
        return f"{'HELD' if self.held else 'FALSIFIED':<9}  {self.name:<24}  {self.found}"


@dataclass(frozen=True)
class Vetting:
    """A checkpoint, a text in its tokens, and where they are to be computed."""

    model: Path
    scalars: dict[str, Any]
    inputs: dict[str, Any]
    dtypes: Sequence[str]
    devices: Sequence[str]
    peer: str | None
    description: str

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Vetting":
        """Reads everything small. ValueError or OSError says which file or option cannot be used."""
        import torch

        from blackswan.falsifiers.runner.real_input import RealInput
        from blackswan.impl.checkpoint import load_checkpoint
        from blackswan.impl.decoder import parameter_count
        from blackswan.impl.device import resolve_device
        from blackswan.impl.tokens import load_tokenizer

        config = load_checkpoint(given.model).config
        text = given.text.read_text(encoding="utf-8")
        paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()][: given.paragraphs]
        if not paragraphs:
            raise ValueError(f"{given.text}: no paragraph; expected text")
        tokens = load_tokenizer(given.model, min(given.tokens, config.max_positions))
        ids, mask = tokens.batch(paragraphs)
        if mask.sum(dim=1).max() < 2:
            raise ValueError(f"{given.text}: no paragraph has two tokens, of which one could predict the other")
        if int(ids.max()) >= config.vocab:
            raise ValueError(f"{tokens.description}: gives token {int(ids.max())}, but the model has vocab_size {config.vocab}")
        devices = given.device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        for device in devices:
            resolve_device(device)
        missing = None if given.no_transformers else _why_no_peer(given.model)
        description = (
            f"model      {given.model}: {config.family}, {config.layers} layers, {parameter_count(config):,} parameters\n"
            f"text       {given.text}: {len(paragraphs)} paragraphs, {int(mask.sum())} tokens by its own tokenizer"
        )
        description += f"\ntransformers is not asked: {missing}" if missing else ""
        peer = None if given.no_transformers or missing else PEER
        inputs = {"input_ids": ids.numpy(), "mask": mask.numpy()}
        return cls(given.model, RealInput(given.model, given.text).scalars, inputs, given.dtype or DTYPES, devices, peer, description)

    def results(self) -> Iterator[Result]:
        """The verdict on every answer."""
        from blackswan.falsifiers.runner.real_input import RealInput
        from blackswan.falsifiers.subjects.implementation import Implementation
        from blackswan.falsifiers.system.checkpoint_parity import Parity

        stored = RealInput(self.model, TEXT).stored
        for dtype in self.dtypes:
            answers = {PEER: _of_transformers(self.model, self.inputs)} if self.peer and dtype == "float32" else {}
            for device in self.devices:
                answers[device] = _of_impl(self.model, self.inputs, dtype, device)
            parity = Parity(self.scalars, stored, self.inputs, dtype, Implementation("cpu"), answers, Progress(sys.stderr))
            compared = parity.whole()
            for name, comparisons in compared.items():
                yield _result(parity, name, comparisons)
            answers.clear()
            gc.collect()


def _result(parity: "Parity", name: str, comparisons: Sequence[Any]) -> Result:
    """The verdict on one answer, with the first call that is wrong on its own inputs."""
    from blackswan.falsifiers.system.whole_models import DROWNED

    answer, subject = parity.answers[name], f"{parity.dtype} on {name}" if name != PEER else f"{parity.dtype}, {PEER}"
    failed = next((each for each in comparisons if not each.held), None)
    wrong = list(parity.by_layer(name)) if answer.calls else []
    drowned = [each.tensor for each in comparisons if each.rejected]
    parts = []
    if failed:
        parts.append(f"{failed.tensor} is the first to leave its noise ({failed.reason or f'{failed.headroom:.3g} × its tolerance'})")
    else:
        worst = max(comparisons, key=lambda each: each.headroom)
        parts.append(f"{len(comparisons)} outputs, the worst error {worst.headroom:.3g} × its tolerance ({worst.tensor})")
    parts += [f"{len(drowned)} of them prove nothing, for noise drowns them: {', '.join(drowned[:3])}"] if drowned else []
    parts += [f"{each.path} ({each.operation}): {each.explanation}" for each in wrong[:1]]
    parts += [f"{len(wrong)} layers have a call that is wrong"] if len(wrong) > 1 else []
    parts += ["every call is right on its own inputs"] if answer.calls and not wrong else []
    if "loss" in answer.outputs:
        parts.append(f"next-token loss {float(answer.outputs['loss']):.5f}")
    held = not failed and not wrong and len(drowned) <= DROWNED * len(comparisons)
    calls = [{"path": each.path, "operation": each.operation, "explanation": each.explanation} for each in wrong]
    record = {"dtype": parity.dtype, "by": name, "held": held, "outputs": [each.describe() for each in comparisons], "wrong_calls": calls}
    return Result(subject, held, "; ".join(parts), record)


def _of_impl(model: Path, inputs: dict[str, Any], dtype: str, device: str) -> "Answer":
    """The decoder of `impl` on the text, with its calls."""
    import torch

    from blackswan.falsifiers.subjects.conversion import to_numpy
    from blackswan.falsifiers.subjects.implementation import DTYPES as TORCH
    from blackswan.falsifiers.subjects.implementation import traced
    from blackswan.falsifiers.system.checkpoint_parity import EMBEDDING, HEAD, NORM, Answer
    from blackswan.impl import dispatch
    from blackswan.impl.checkpoint import load_decoder
    from blackswan.impl.device import resolve_device, set_tf32

    place = resolve_device(device)
    set_tf32(False)
    decoder = load_decoder(model, dtype=TORCH[dtype], device=place)
    with torch.no_grad(), dispatch.recording() as calls:
        decoder.loss(*(torch.tensor(inputs[name], device=place) for name in ("input_ids", "mask")))
    paths = {f"model.layers.{index}.mlp_residual": f"hidden/model.layers.{index}" for index in range(decoder.config.layers)}
    paths |= {EMBEDDING: f"hidden/{EMBEDDING}", NORM: f"hidden/{NORM}", HEAD: "logits", "loss": "loss"}
    outputs = {paths[call.path]: to_numpy(next(iter(call.outputs.values()))) for call in calls if call.path in paths}
    return Answer(outputs, {call.path: partial(traced, call) for call in calls if call.path not in (EMBEDDING, HEAD, "loss")})


def _why_no_peer(model: Path) -> str | None:
    if not model.is_dir():
        return "it reads folders, and this is a file"
    import importlib.util

    return None if importlib.util.find_spec(PEER) else "it is not installed"


def _of_transformers(model: Path, inputs: dict[str, Any]) -> "Answer":
    """The logits of transformers in float32, with its plain attention."""
    import torch

    from blackswan.falsifiers.system.checkpoint_parity import Answer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
        options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32, "local_files_only": True}
        peer: Any = transformers.AutoModelForCausalLM.from_pretrained(model, **options)
    peer.eval()
    with torch.no_grad():
        found = peer(input_ids=torch.tensor(inputs["input_ids"]), attention_mask=torch.tensor(inputs["mask"]).long(), use_cache=False)
    return Answer({"logits": found.logits.numpy()})


class Progress:
    """Says which layer is done and about how long the others take: in place on a terminal, every tenth part elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.live = stream, stream.isatty()
        self._started = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many parts of `total` are done; with none the clock starts."""
        if done == 0:
            self._started = time.monotonic()
            return
        left = (time.monotonic() - self._started) / done * (total - done)
        line = f"{what}: {done} of {total}, {duration(left)} left"
        if self.live:
            self.stream.write("\r\x1b[2K" + (line if done < total else ""))
        elif done == total or done * 10 // total > (done - 1) * 10 // total:
            self.stream.write(line + "\n")
        self.stream.flush()
