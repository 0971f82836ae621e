"""What a training step through the hand-written layers spends its time on, each part beside the least that it could take on this GPU.

    python -m benchmarks.step_parts --model qwen3-4b [--output FILE.json]

A part's time is what it adds to the step: work that runs beside a product counts as the product's. Its kernels' own time, which the
device's other work may make longer, stands beside it. The least that a part could take is what it has to read and write once, over the rate
of a large copy, or its floating-point operations over the rate of one large product, whichever is more; both rates are measured here, and
so is the power that the device draws. Ends with 6 on a host without a CUDA device, with 1
where Triton is missing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import command, step_inputs
from benchmarks.step_timeline import (
    ATTENTION,
    DEQUANTISE,
    LORA,
    NORMS,
    PARTS,
    PRODUCTS,
    ROTATION,
    SWIGLU,
    WIDE,
    kernels_of,
    part_of,
    purposes,
    shared_out,
)
from benchmarks.timing import copy_rate, matmul_rate, now
from blackswan.impl import validation
from blackswan.impl.fused.side import captured_stream
from blackswan.impl.fused.step import FusedTrainer, why_not
from blackswan.impl.trainer import Batch

WARM_UP, WATCHED_SECONDS = 5, 3.0
ASKED = "power.draw.instant,clocks.sm,power.limit"


class _Trainer(FusedTrainer):
    """Steps that are captured, or not."""

    captured = True

    def _replayed(self, kind: str, packed: Any, compute: Callable[[Any], Any]) -> Any:
        if self.captured:
            return super()._replayed(kind, packed, compute)
        stream = captured_stream(self._masters.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), validation.unchecked(), torch.no_grad():
            found = compute(packed)
        torch.cuda.current_stream().wait_stream(stream)
        return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The step's time, shared out among its parts, with their least times, and the power that it draws."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as in benchmarks/train_step.py
    trainer, batch = _trainer(options), Batch(**step_inputs.batches_of(options)[0])

    def step() -> None:
        trainer.train_batch(batch)

    for _ in range(WARM_UP):
        step()
    taken, power = _times(step, options.steps), _watched(step)
    captured = _trace(step, options.steps)
    trainer.captured = False
    with _named_products(trainer):
        step()
        known = purposes(_trace(step, 1))
    kernels = [(kernel, part_of(kernel, known)) for kernel in kernels_of(captured)]
    shares = shared_out([(kernel.start, kernel.start + kernel.length, part) for kernel, part in kernels])
    own = {part: sum(kernel.length for kernel, whose in kernels if whose == part) for part in PARTS}
    rates = {"matmul": matmul_rate(), "copy": copy_rate()}
    return {
        "ms": statistics.median(taken),
        "rates": rates,
        "power": power,
        "parts": {part: time / 1e3 / options.steps for part, time in shares.items()},
        "kernels": {part: time / 1e3 / options.steps for part, time in own.items()},
        "least": {part: 1e3 * seconds for part, seconds in least_seconds(options, int(batch.mask.sum()), rates).items()},
    }


def _trainer(options: argparse.Namespace) -> _Trainer:
    from blackswan.impl.classifier import Classifier

    given = (step_inputs.adaptation_of(options), step_inputs.tensors_of(options), step_inputs.factors_of(options))
    classifier = Classifier(step_inputs.config_of(options), *given, dtype=torch.bfloat16, device="cuda")
    return _Trainer(classifier, longest=options.seq, total_steps=None, micro_batch=options.batch, learning_rate=step_inputs.RATE)


@contextmanager
def _named_products(trainer: _Trainer) -> Iterator[None]:
    products = trainer.model.shared.products
    own = products.mm

    def named(*arguments: Any) -> Any:
        with torch.profiler.record_function(WIDE):
            return own(*arguments)

    products.mm = named  # type: ignore[method-assign]
    try:
        yield
    finally:
        products.mm = own  # type: ignore[method-assign]


def _trace(step: Callable[[], None], steps: int) -> list[dict[str, Any]]:
    """The events of so many steps; torch reads them from a file only."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return found


def _times(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each step, to its end on the device."""
    found, device = [], torch.device("cuda")
    for _ in range(steps):
        start = now(device)
        step()
        found.append(1e3 * (now(device) - start))
    return found


def _watched(step: Callable[[], None]) -> dict[str, float] | None:
    """Watts, MHz and the limit in watts, medians over some seconds of steps; None where the driver's command does not tell."""
    identity = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    asked = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", f"--id={identity}"]
    told: list[list[float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            try:
                line = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S603  the driver's own
                told.append([float(value) for value in line.split(",")])
            except (OSError, ValueError, subprocess.SubprocessError):
                return

    watcher, end = threading.Thread(target=watch), time.perf_counter() + WATCHED_SECONDS
    watcher.start()
    try:
        while time.perf_counter() < end:
            step()
    finally:
        done.set()
        watcher.join()
    late = told[len(told) // 2 :]  # when the device has settled
    return dict(zip(("watts", "megahertz", "limit"), map(statistics.median, zip(*late, strict=True)), strict=True)) if late else None


def least_seconds(options: argparse.Namespace, tokens: int, rates: dict[str, float]) -> dict[str, float]:
    """Of each part with work of its own; LoRA on queries and values, every value of two bytes but NF4's.

    The first block's input needs no gradient, so neither does its first product. After the last block's attention one token of each
    sample goes on, which counts as none.
    """
    shape = step_inputs.MODELS[options.model]
    layers, hidden, wide, width = shape["layers"], shape["hidden"], shape["intermediate"], shape["head_dim"]
    q, kv = shape["heads"] * width, shape["kv_heads"] * width
    joined, behind, down = (q + 2 * kv) * hidden, (q + 3 * wide) * hidden, wide * hidden
    values = {
        # Forward and backward; the backward pass turns queries and keys anew.
        ATTENTION: layers * (2 * q + 2 * kv + 4 * q + 4 * kv),
        SWIGLU: (layers - 1) * (3 + 5) * wide,
        # Two of each kind a block, adding the residual; and once more the first, which the gradients of A read.
        NORMS: (layers - 1) * (2 * 4 + 2 * 4 + 2) * hidden,
        ROTATION: layers * (2 + 2 + (3 if shape["family"] == "qwen3" else 2)) * (q + kv),
        # x Aᵀ, what is added to y, the gradients by B and by A, what is added to dx.
        LORA: layers * (hidden + 2 * (q + kv) + 2 * (q + kv) + hidden + 2 * hidden),
    }
    found = {part: 2 * tokens * count / rates["copy"] for part, count in values.items()}
    # Five products of half the scores in the backward pass, two in the forward one.
    scores = layers * (2 + 5) * options.batch * q * options.seq**2
    found[ATTENTION] = max(found[ATTENTION], scores / rates["matmul"])
    found[PRODUCTS] = 2 * tokens * (layers * 2 * joined - joined + (layers - 1) * 2 * behind) / rates["matmul"]
    if not options.bf16:  # each weight for each of its products; the last one's two follow one upon the other
        found[DEQUANTISE] = (layers * 2 * (joined + behind) - joined - down) * (0.5 + 4 / 64 + 2) / rates["copy"]
    return {part: found[part] for part in PARTS if part in found}


def main() -> int:
    """The table on standard output; 6 without a CUDA device."""
    options = _options()
    if options.lengths != "full":
        raise command.CannotRun("--lengths mixed: the least times are those of full sequences; leave it out")
    command.require_cuda()
    if reason := why_not(torch.bfloat16, torch.device("cuda")):
        raise command.CannotRun(reason, 1)
    given = {name: value for name, value in vars(options).items() if name != "output"}
    report = given | {"device": torch.cuda.get_device_name(), "torch": torch.__version__} | measured(options)
    _print(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    step_inputs.add_options(parser)
    parser.add_argument("--output", type=command.output)
    return parser.parse_args()


def _print(report: dict[str, Any]) -> None:
    rates, parts, power = report["rates"], report["parts"], report["power"]
    held = "bfloat16" if report["bf16"] else "NF4"
    print(f"{report['model']}, batch {report['batch']} × {report['seq']}, {held}; {report['device']}, torch {report['torch']}")
    print(f"a step {report['ms']:.1f} ms; products {rates['matmul'] / 1e12:.0f} TFLOP/s, copies {rates['copy'] / 1e12:.2f} TB/s", end="")
    print(f"; {power['watts']:.0f} of {power['limit']:.0f} W at {power['megahertz']:.0f} MHz" if power else "")
    print(f"{'part':32} {'ms':>7} {'of step':>8} {'kernels’ own ms':>16} {'least ms':>9}")
    total = sum(parts.values())
    for part, spent in parts.items():
        least = report["least"].get(part)
        own = f"{report['kernels'][part]:16.2f}" if part in report["kernels"] else f"{'':16}"
        bar = "█" * round(40 * spent / total)
        print(f"{part:32} {spent:7.2f} {spent / total:8.1%} {own} {f'{least:9.2f}' if least else '':>9}  {bar}")
    print(f"{'together (profiled)':32} {total:7.2f} {'':8} {'':16} {sum(report['least'].values()):9.2f}")


if __name__ == "__main__":
    command.start(main)
