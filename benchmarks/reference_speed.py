"""What the reference of whole classifiers costs: time and memory of its float64 forward and backward pass, beside those of transformers.

    python -m benchmarks.reference_speed [--layers 24] [--tokens 256] [--rounds 9] [--output FILE]

Both compute the gradients of LoRA on queries and values and of the head, in Qwen2.5-0.5B's shape cut to `--layers`, on one sample, each
in a process of its own. They take turns pass by pass, since how fast a machine is changes within seconds, and the ratio of their times is
the median of those of single rounds. Weights come from one file in bfloat16, mapped into memory; transformers has them in float64, as its
model needs them. Each has a first pass that is not timed. Memory is what the process holds at most in that first pass and in one after
the timed ones, above what it held before it opened the weights, file pages left out. All passes of a process
are in one block of `reference.memory.kept`: freed memory stays with it from pass to pass, as it does with transformers' by glibc's own
rules.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import command
from blackswan.falsifiers.numeric.whole_model import SHAPES

SHAPE: Mapping[str, Any] = {
    **SHAPES["qwen2.5-0.5b"],
    "eps": 1e-6,
    "tied": True,
    "classes": 8,
    "rank": 16,
    "alpha": 8.0,
    "pooling": "mean",
}
WHO = ("reference", "transformers")
TIME, MEMORY = 1.5, 0.5
"""The reference is to take at most so many times transformers' time and memory."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 where a target is missed."""
    options = _options(arguments)
    if options.worker:
        _answer(_work(options.worker, options.weights, options.layers, options.tokens, sys.stdin))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.npy"
        _write(weights, _scalars(options.layers))
        runs = _in_turns(weights, options)
    found = summary(runs, options.layers, options.tokens)
    print(_shown(found))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["time_ratio"] <= TIME and found["memory_ratio"] <= MEMORY else 1


def _answer(answers: Iterable[Any]) -> None:
    """Writes them on standard output, a line each; whatever else is written there goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="ascii") as output:
        os.dup2(2, 1)
        for said in answers:
            print(json.dumps(said), file=output, flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_speed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=command.positive, default=24, help="layers of the 24 (default: 24)")
    parser.add_argument("--tokens", type=command.positive, default=256, help="tokens of the sample (default: 256)")
    parser.add_argument("--rounds", type=command.positive, default=9, help="timed passes of each (default: 9)")
    parser.add_argument("--output", type=command.output, metavar="FILE", help="write the numbers as JSON")
    parser.add_argument("--worker", choices=WHO, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _scalars(layers: int) -> dict[str, Any]:
    return {**SHAPE, "layers": layers}


def _write(path: Path, scalars: Mapping[str, Any]) -> None:
    """All parameters one after the other, bfloat16 in 16 bits each: N(0, 0.02²), norms around one."""
    from blackswan.reference.classifier import parameter_shapes

    random = np.random.default_rng(0)
    with path.open("wb") as stream:
        for name, shape in parameter_shapes(scalars).items():
            values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02) + np.float32(name.endswith("norm.weight"))
            (values.view(np.uint32) >> 16).astype(np.uint16).tofile(stream)


def _mapped(path: Path, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in the file, by name, without reading them."""
    import ml_dtypes

    from blackswan.reference.classifier import parameter_shapes

    flat, offset, found = np.memmap(path, np.uint16, "r"), 0, {}
    for name, shape in parameter_shapes(scalars).items():
        size = int(np.prod(shape))
        found[name] = np.asarray(flat[offset : offset + size]).view(ml_dtypes.bfloat16).reshape(shape)
        offset += size
    return found


def _in_turns(weights: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By side: the seconds of its passes, the most bytes, and the loss."""
    sizes = ["--layers", str(options.layers), "--tokens", str(options.tokens), "--weights", str(weights)]
    ours, theirs = (Worker(who, [sys.executable, "-m", "benchmarks.reference_speed", "--worker", who, *sizes]) for who in WHO)
    with ours, theirs:
        seconds: dict[str, list[float]] = {who: [] for who in WHO}
        for done in range(options.rounds):
            for worker in (ours, theirs):
                seconds[worker.who].append(worker.turn())
            said = ", ".join(f"{who} {seconds[who][-1]:.2f} s" for who in WHO)
            print(f"round {done + 1} of {options.rounds}: {said}", file=sys.stderr, flush=True)
        return {worker.who: {"seconds": seconds[worker.who], **worker.end()} for worker in (ours, theirs)}


class Worker:
    """A process of one side, from its first pass on; it makes another whenever it is its turn. It writes JSON, a line each."""

    def __init__(self, who: str, command_line: Sequence[str]) -> None:
        self.who, self._command = who, command_line

    def __enter__(self) -> "Worker":
        """Waits for the first pass."""
        try:
            # In a session of its own, so that it leaves Ctrl-C to this process, which then kills it.
            self._process = subprocess.Popen(  # noqa: S603  # this module itself
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._said()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """No process is left."""
        if not hasattr(self, "_process"):
            return
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # waits, and closes its pipes
            pass

    def turn(self) -> float:
        """Seconds of one more pass."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # how it ended is said below
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return float(self._said())

    def end(self) -> dict[str, Any]:
        """The most bytes and the loss, after a last pass."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        return dict(self._said())

    def _said(self) -> Any:
        """What it writes next; CannotRun where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise command.CannotRun(f"the process of {self.who} ended with status {status} before it had an answer", 1)
        try:
            return json.loads(line)
        except ValueError:
            raise command.CannotRun(f"the process of {self.who} wrote {line!r}, which is no answer", 1) from None


def _work(who: str, weights: Path, layers: int, tokens: int, turns: Iterable[str]) -> Iterator[Any]:
    """The loss after a first pass, the seconds of one for each turn, and at last the most bytes and the loss."""
    scalars = _scalars(layers)
    random = np.random.default_rng(1)
    inputs = {
        "input_ids": random.integers(0, scalars["vocab"], (1, tokens)),
        "mask": np.ones((1, tokens), bool),
        "labels": np.array([3]),
    }
    from blackswan.reference import memory

    build = {"reference": _reference, "transformers": _transformers}[who]
    imported = {"reference": "blackswan.reference.by_layer", "transformers": "transformers.models.qwen2"}[who]
    __import__(imported)
    peak = Peak()
    with memory.kept():
        with peak:
            step = build(_mapped(weights, scalars), inputs, scalars)
            loss = step()
        yield loss
        for _ in turns:
            start = time.perf_counter()
            loss = step()
            yield time.perf_counter() - start
        with peak:
            loss = step()
    yield {"bytes": peak.bytes, "loss": loss}


class Peak:
    """The most anonymous memory that the process holds inside its blocks beyond what it held when this was made; sampled each millisecond.

    Nothing is timed inside: the samples take a third as long as the pass itself.
    """

    def __init__(self) -> None:
        self.bytes, self._before = 0, _anonymous()

    def __enter__(self) -> "Peak":
        """Starts to sample."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the samples."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(1e-3):
            self.bytes = max(self.bytes, _anonymous() - self._before)


def _anonymous() -> int:
    """RssAnon of /proc/self/status, in bytes: what was allocated, without the pages of mapped files."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; memory is measured on Linux")


def _reference(parameters: Mapping[str, Any], inputs: Mapping[str, Any], scalars: Mapping[str, Any]) -> Callable[[], float]:
    from blackswan.reference.by_layer import ByLayer

    def step() -> float:
        return float(ByLayer(inputs, parameters, scalars).run()["loss"])

    return step


def _transformers(parameters: Mapping[str, Any], inputs: Mapping[str, Any], scalars: Mapping[str, Any]) -> Callable[[], float]:
    """A frozen Qwen2Model in float64 with LoRA layers on queries and values, and a head on the mean of its states."""
    import torch
    from torch import nn

    model, factors = _qwen2(parameters, scalars)
    given = {name: torch.tensor(value) for name, value in inputs.items()}
    head = nn.Parameter(_tensor(parameters["score.weight"])), nn.Parameter(_tensor(parameters["score.bias"]))

    def step() -> float:
        states = model(input_ids=given["input_ids"], attention_mask=given["mask"], use_cache=False).last_hidden_state
        loss = nn.functional.cross_entropy(nn.functional.linear(states.mean(dim=1), *head), given["labels"])
        torch.autograd.grad(loss, [*factors, *head])
        return float(loss.detach())

    return step


def _tensor(value: Any) -> Any:
    import torch

    return torch.tensor(value.view(np.int16)).view(torch.bfloat16).double()


def _qwen2(parameters: Mapping[str, Any], scalars: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The model and its LoRA factors."""
    import torch
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=scalars["vocab"],
        hidden_size=scalars["hidden"],
        intermediate_size=scalars["intermediate"],
        num_hidden_layers=scalars["layers"],
        num_attention_heads=scalars["heads"],
        num_key_value_heads=scalars["kv_heads"],
        rms_norm_eps=scalars["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": scalars["theta"]},
    )
    with torch.device("meta"):
        model = transformers.Qwen2Model(config)
    base = {
        name.removeprefix("model."): _tensor(value) for name, value in parameters.items() if "lora_" not in name and "score" not in name
    }
    model.load_state_dict(base, strict=True, assign=True)
    model.rotary_emb = type(model.rotary_emb)(config)
    model.requires_grad_(False)
    factors: list[Any] = []
    for layer in model.layers:
        for name in ("q_proj", "v_proj"):
            path = f"model.layers.{layer.self_attn.layer_idx}.self_attn.{name}"
            a, b = (torch.nn.Parameter(_tensor(parameters[f"{path}.lora_{factor}.weight"])) for factor in "AB")
            factors += [a, b]
            setattr(layer.self_attn, name, _lora(getattr(layer.self_attn, name), a, b, scalars["alpha"] / scalars["rank"]))
    return model, factors


def _lora(base: Any, a: Any, b: Any, scale: float) -> Any:
    from torch import nn

    class Adapted(nn.Module):  # type: ignore[misc,unused-ignore]  # where torch is not seen, its classes are Any
        """y = base(x) + scale · x Aᵀ Bᵀ."""

        def forward(self, x: Any) -> Any:
            return base(x) + scale * nn.functional.linear(nn.functional.linear(x, a), b)

    return Adapted()


def summary(runs: Mapping[str, Mapping[str, Any]], layers: int, tokens: int) -> dict[str, Any]:
    """Medians of the seconds, of their ratios in one round, the bytes and their ratio; ValueError where the two losses differ."""
    seconds = {who: statistics.median(runs[who]["seconds"]) for who in WHO}
    memory, losses = ({who: runs[who][what] for who in WHO} for what in ("bytes", "loss"))
    in_turns = [first / second for first, second in zip(*(runs[who]["seconds"] for who in WHO), strict=True)]
    # transformers keeps its norms and rotary tables in float32, whatever the dtype of the model
    if not abs(losses["reference"] - losses["transformers"]) <= 1e-5 * abs(losses["transformers"]):
        raise ValueError(f"the losses differ, {losses}: the two do not compute the same, and their times say nothing")
    ratios = {"time_ratio": statistics.median(in_turns), "memory_ratio": memory[WHO[0]] / memory[WHO[1]]}
    ratios |= {"time_ratio_least": min(in_turns), "time_ratio_most": max(in_turns)}
    return {"layers": layers, "of_layers": 24, "tokens": tokens, "seconds": seconds, "bytes": memory, "losses": losses, **ratios}


def _shown(found: Mapping[str, Any]) -> str:
    whole = "all 24 layers" if found["layers"] == 24 else f"{found['layers']} of the 24 layers"
    lines = [f"Qwen2.5-0.5B's shape, {whole}, {found['tokens']} tokens, float64, forward and backward"]
    lines += [f"  {who:13} {found['seconds'][who]:8.2f} s {found['bytes'][who] / 2**30:8.2f} GiB" for who in WHO]
    lines.append(f"  ratio         {found['time_ratio']:8.2f}   {found['memory_ratio']:8.2f}       (at most {TIME} and {MEMORY})")
    lines.append(f"  of one round  {found['time_ratio_least']:8.2f} to {found['time_ratio_most']:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    command.start(main)
