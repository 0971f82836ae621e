"""One training step of QLoRA classification, ours beside its peers: the same random weights, batches and settings, a process each.

    python benchmarks/train_step.py --model qwen2.5-0.5b --output FILE.json

Every contender first gives the loss and the LoRA gradients of one batch, which are held to a float32 computation on the same dequantised
weights: an error more than twice that of plain transformers (FlashAttention's criterion, Dao et al. 2022, §E) disqualifies, and so does a
gradient that is missing, has another shape or is not finite. Plain transformers (`eager`) therefore runs even where --only leaves it out,
before the others; where it fails there is nothing to be held to, and nothing agrees. Ends with 1 where ours does not agree; a peer that
fails or disagrees is left out of the comparison. Ends with 6 on a host without a CUDA device.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import command, step_inputs
from benchmarks.contenders import CONTENDERS, PEERS, TRUTH
from benchmarks.step_inputs import MODELS

PROGRAM = Path(__file__).with_name("contenders.py")
GIB = 2.0**30
PLAIN = "eager"
"""Plain transformers: twice its errors are the most that a contender may have."""
ROUNDOFF = 2.0**-8
"""The unit roundoff of bfloat16."""


def main() -> int:
    """Runs every contender in a process of its own, writes the figures after each, prints the table; 1 where ours does not agree."""
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
        for name in _contenders(options):
            rows.append(_run(name, options, Path(folder)))
            _hold(rows, Path(folder))
            if options.output:  # at once: the next one may take minutes, and be interrupted
                options.output.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    return int(not all(row["agrees"] for row in rows if row["name"] not in PEERS))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {"model": options.model, "batch": options.batch, "seq": options.seq, "lengths": options.lengths, "nf4": not options.bf16}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time, memory and agreement of ours and the peers on one GPU.")
    step_inputs.add_options(parser)
    only = f"a contender to run, may be given again; {PLAIN}, which the others are held to, runs even where it is left out"
    parser.add_argument("--only", action="append", default=[], choices=CONTENDERS, help=only)
    parser.add_argument("--limit", type=command.positive_number, default=240.0, help="seconds a contender may take")
    parser.add_argument("--output", type=command.output)
    return parser.parse_args()


def _contenders(options: argparse.Namespace) -> list[str]:
    """Who runs, in order."""
    names = list(options.only or CONTENDERS)
    return names if PLAIN in names else [PLAIN, *names]


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


def _hold(rows: list[dict[str, Any]], folder: Path) -> None:
    """Gives every row its errors against the float32 computation, their ratio to plain transformers', and whether it agrees."""
    import torch

    truth = torch.load(folder / f"{TRUTH}.pt")
    for row in rows:
        path = folder / f"{row['name']}.pt"
        row.update(_errors(torch.load(path), truth) if path.exists() else {})
    plain = next((row for row in rows if row["name"] == PLAIN and "failed" not in row and _whole(row, truth)), None)
    for row in rows:
        if plain and plain["gradient_error"] and row.get("gradient_error") is not None:
            row["error_ratio"] = row["gradient_error"] / plain["gradient_error"]
        row["agrees"] = plain is not None and _whole(row, truth) and _within(row, plain, truth["loss"])


def _errors(found: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """How many of the gradients are there in their shapes, and the errors: of the loss, and relative that of those gradients.

    None is the error of what is not finite.
    """
    import torch

    given, wanted = found["gradients"], truth["gradients"]
    names = [name for name in wanted if name in given and given[name].shape == wanted[name].shape]
    none = torch.zeros((), dtype=torch.float64)  # of no gradients the error is 0 / 0, which as a tensor is no exception
    error = sum(((given[name].double() - wanted[name].double()).square().sum() for name in names), none)
    size = sum((wanted[name].double().square().sum() for name in names), none)
    gradient = float((error / size).sqrt()) if all(bool(value.isfinite().all()) for value in given.values()) else math.nan
    errors = {"loss_error": abs(found["loss"] - truth["loss"]), "gradient_error": gradient}
    return {"tensors": len(names)} | {name: value if math.isfinite(value) else None for name, value in errors.items()}


def _whole(row: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Whether a row has every gradient and finite errors."""
    finite = row.get("loss_error") is not None and row.get("gradient_error") is not None
    return finite and row["tensors"] == len(truth["gradients"])


def _within(row: dict[str, Any], plain: dict[str, Any], loss: float) -> bool:
    """Whether the errors are at most twice plain transformers'; that of its loss, one number, may be small by luck."""
    of_loss = max(plain["loss_error"], ROUNDOFF * abs(loss))
    return bool(row["gradient_error"] <= 2 * plain["gradient_error"] and row["loss_error"] <= 2 * of_loss)


def _floor(options: argparse.Namespace, truth: dict[str, Any]) -> float:
    """Milliseconds that the frozen products alone take at the measured matmul rate: 4 · linear parameters · tokens."""
    shape = MODELS[options.model]
    attention = (2 * shape["heads"] + 2 * shape["kv_heads"]) * shape["head_dim"] * shape["hidden"]
    linear = shape["layers"] * (attention + 3 * shape["hidden"] * shape["intermediate"])
    return float(4 * linear * truth["tokens"] / truth["tflops"] / 1e12 * 1e3)


def _print(report: dict[str, Any]) -> None:
    rows = report["rows"]
    peers = [row["ms"] for row in rows if row["name"] in PEERS and "ms" in row and row["agrees"]]
    held = "NF4" if report["nf4"] else "bfloat16"
    print(f"{report['model']}, batch {report['batch']} × {report['seq']} ({report['lengths']}), {held}, {report['device']}")
    print(f"torch {report['torch']}; bf16 matmul {report['matmul_tflops']:.0f} TFLOP/s, floor {report['floor_ms']:.1f} ms")
    print(f"{'contender':16} {'ms':>8} {'samples/s':>10} {'GiB':>7} {'share':>6} {'best peer / it':>15} "
          f"{'tensors':>8} {'loss error':>11} {'gradient error':>15} {'/ eager':>8}")  # fmt: skip
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:16} failed: {row['failed']}")
            continue
        ratio = "disagrees" if not row["agrees"] else f"{min(peers) / row['ms']:.2f}" if peers else "–"
        print(f"{row['name']:16} {row['ms']:8.1f} {1e3 * report['batch'] / row['ms']:10.0f} {row['peak'] / GIB:7.2f} "
              f"{report['floor_ms'] / row['ms']:6.2f} {ratio:>15} {row.get('tensors', '–'):>8} {_shown(row, 'loss_error', '.2e'):>11} "
              f"{_shown(row, 'gradient_error', '.2e'):>15} {_shown(row, 'error_ratio', '.2f'):>8}")  # fmt: skip
    if not any(row["agrees"] for row in rows):
        print("nothing agrees: plain transformers gave no whole and finite answer, so there is nothing to be held to")


def _shown(row: dict[str, Any], figure: str, form: str) -> str:
    return "–" if row.get(figure) is None else format(row[figure], form)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    command.start(main)
