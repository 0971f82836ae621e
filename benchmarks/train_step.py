"""One training step of QLoRA classification, ours beside its peers: the same random weights, batches and settings, a process each.

    python benchmarks/train_step.py --model qwen2.5-0.5b --output FILE.json

Every contender first gives the loss and the LoRA gradients of one batch, which are held to a float32 computation on the same dequantised
weights: an error more than twice that of plain transformers (FlashAttention's criterion, Dao et al. 2022, §E) disqualifies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":  # before what takes seconds to import
    from benchmarks.command import importing

    importing()

from benchmarks import command, step_inputs
from benchmarks.contenders import CONTENDERS, PEERS, TRUTH
from benchmarks.step_inputs import MODELS

PROGRAM = Path(__file__).with_name("contenders.py")
GIB = 2.0**30


def main() -> int:
    """Runs every contender in a process of its own, writes the figures after each, prints the table; 6 without a CUDA device."""
    options = _options()
    command.require_cuda()
    import torch

    with tempfile.TemporaryDirectory() as folder:
        truth = _run(TRUTH, options, Path(folder))
        if "failed" in truth:
            raise command.CannotRun(f"the float32 computation, which all are held to, failed: {truth['failed']}", 1)
        rows: list[dict[str, Any]] = []
        report = _settings(options) | {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "matmul_tflops": truth["tflops"],
            "floor_ms": _floor(options, truth),
            "rows": rows,
        }
        for name in options.only or CONTENDERS:
            rows.append(_run(name, options, Path(folder)))
            _errors(rows, Path(folder))
            if options.output:  # at once: the next one may take minutes, and be interrupted
                options.output.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {"model": options.model, "batch": options.batch, "seq": options.seq, "lengths": options.lengths, "nf4": not options.bf16}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time, memory and agreement of ours and the peers on one GPU.")
    step_inputs.add_options(parser)
    parser.add_argument("--only", action="append", default=[], choices=CONTENDERS)
    parser.add_argument("--limit", type=command.positive_number, default=240.0, help="seconds a contender may take")
    parser.add_argument("--output", type=command.output)
    return parser.parse_args()


def _run(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One contender's figures, or why there are none."""
    print(f"{name} …", file=sys.stderr, flush=True)
    asked = [sys.executable, str(PROGRAM), name, str(folder), *step_inputs.arguments(options)]
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, timeout=options.limit, check=False)  # noqa: S603  our own file
    except subprocess.TimeoutExpired:
        return {"name": name, "failed": f"not done after {options.limit:g} s"}
    if ran.returncode:
        last = [line for line in ran.stderr.strip().splitlines() if line.strip()][-3:]
        return {"name": name, "failed": " | ".join(last)[-600:]}
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return {"name": name, **found}


def _errors(rows: list[dict[str, Any]], folder: Path) -> None:
    """Relative error of loss and LoRA gradients against the float32 computation, and its ratio to plain transformers'."""
    import torch

    truth = torch.load(folder / f"{TRUTH}.pt")
    for row in rows:
        path = folder / f"{row['name']}.pt"
        if not path.exists():
            continue
        found = torch.load(path)
        names = [name for name in truth["gradients"] if name in found["gradients"]]
        row["tensors"], row["loss_error"] = len(names), abs(found["loss"] - truth["loss"])
        wanted, given = ([one["gradients"][name].double() for name in names] for one in (truth, found))
        error = sum(float((g - w).square().sum()) for g, w in zip(given, wanted, strict=True))
        row["gradient_error"] = (error / sum(float(w.square().sum()) for w in wanted)) ** 0.5
    plain = next((row.get("gradient_error") for row in rows if row["name"] == "eager"), None)
    for row in rows:
        if plain and "gradient_error" in row:
            row["error_ratio"] = row["gradient_error"] / plain
            row["agrees"] = row["error_ratio"] <= 2.0


def _floor(options: argparse.Namespace, truth: dict[str, Any]) -> float:
    """Milliseconds that the frozen products alone take at the measured matmul rate: 4 · linear parameters · tokens."""
    shape = MODELS[options.model]
    attention = (2 * shape["heads"] + 2 * shape["kv_heads"]) * shape["head_dim"] * shape["hidden"]
    linear = shape["layers"] * (attention + 3 * shape["hidden"] * shape["intermediate"])
    return float(4 * linear * truth["tokens"] / truth["tflops"] / 1e12 * 1e3)


def _print(report: dict[str, Any]) -> None:
    rows = report["rows"]
    peers = [row["ms"] for row in rows if row["name"] in PEERS and "ms" in row and row.get("agrees", True)]
    held = "NF4" if report["nf4"] else "bfloat16"
    print(f"{report['model']}, batch {report['batch']} × {report['seq']} ({report['lengths']}), {held}, {report['device']}")
    print(f"torch {report['torch']}; bf16 matmul {report['matmul_tflops']:.0f} TFLOP/s, floor {report['floor_ms']:.1f} ms")
    print(
        f"{'contender':16} {'ms':>8} {'samples/s':>10} {'GiB':>7} {'share':>6} {'best peer / it':>15} {'gradient error':>15} {'/ eager':>8}"
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:16} failed: {row['failed']}")
            continue
        ratio = f"{min(peers) / row['ms']:.2f}" if peers else "–"
        error = f"{row.get('gradient_error', float('nan')):.2e} {row.get('error_ratio', float('nan')):8.2f}"
        print(f"{row['name']:16} {row['ms']:8.1f} {1e3 * report['batch'] / row['ms']:10.0f} {row['peak'] / GIB:7.2f} "
              f"{report['floor_ms'] / row['ms']:6.2f} {ratio:>15} {error:>24}")  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    command.start(main)
