"""One training step of QLoRA classification, ours beside its peers: the same random weights, batches and settings, a process each.

    python benchmarks/train_step.py --model qwen2.5-0.5b --output FILE.json

Every contender first gives the loss and the LoRA gradients of one batch, which are held to a float32 computation on the same dequantised
weights: an error more than twice that of plain transformers (FlashAttention's criterion, Dao et al. 2022, §E) disqualifies.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from falsifiers.shapes import SHAPES

TOY = {
    "family": "qwen2", "vocab": 512, "hidden": 128, "intermediate": 256, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32,
    "theta": 1e6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"toy": TOY, **SHAPES}
CLASSES, RANK, ALPHA, RATE = 5, 16, 32.0, 2e-4
PEERS = ("eager", "liger", "compile", "reduce-overhead")
CONTENDERS = ("ours", "ours-torch", *PEERS)
GIB = 2.0**30


def main() -> int:
    """Runs every contender in a process of its own, prints the table and writes the figures; 6 without a CUDA device."""
    options = _options()
    if options.contender:
        _contend(options)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and this host has none", file=sys.stderr)
        return 6
    with tempfile.TemporaryDirectory() as folder:
        rows = [_run(name, options, Path(folder)) for name in ("truth", *(options.only or CONTENDERS))]
        truth, *rows = rows
        _errors(rows, Path(folder))
    floor = _floor(options, truth)
    report = {"model": options.model, "batch": options.batch, "seq": options.seq, "lengths": options.lengths, "nf4": not options.bf16}
    report |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matmul_tflops": truth["tflops"],
        "floor_ms": floor,
        "rows": rows,
    }
    _print(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time, memory and agreement of ours and the peers on one GPU.")
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-0.5b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--lengths", choices=("full", "mixed"), default="full", help="all samples as long as --seq, or a realistic mix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true", help="base weights in bfloat16 instead of NF4")
    parser.add_argument("--only", action="append", default=[], choices=CONTENDERS)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a contender may take")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One contender's figures, or why there are none."""
    print(f"{name} …", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--contender", name, "--folder", str(folder), "--model", options.model]
    command += [f"--batch={options.batch}", f"--seq={options.seq}", f"--lengths={options.lengths}", f"--steps={options.steps}"]
    command += ["--bf16"] if options.bf16 else []
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)  # noqa: S603  our own file
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

    truth = torch.load(folder / "truth.pt")
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


# What runs in a process of its own.


def _contend(options: argparse.Namespace) -> None:
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    batches = _batches(options)
    if options.contender == "truth":
        step, found = None, _truth(options, batches[0])
    elif options.contender.startswith("ours"):
        step, found = _ours(options, batches[0])
    else:
        step, found = _peer(options, batches[0])
    torch.save(found, options.folder / f"{options.contender}.pt")
    if step is None:
        print(json.dumps({"tflops": _matmul_rate(), "tokens": sum(int(batch["mask"].sum()) for batch in batches) / len(batches)}))
        return
    print(json.dumps(_timed(step, batches, options.steps)))


def _timed(step: Any, batches: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Median milliseconds of a step, the device's peak memory, and the memory that it took from the device while it was timed."""
    import time

    import torch

    for index in range(2 * len(batches) if len(batches) > 1 else 5):
        step(batches[index % len(batches)])
    torch.cuda.synchronize()
    segments, times = torch.cuda.memory_stats()["segment.all.allocated"], []
    for index in range(steps):
        start = time.perf_counter()
        step(batches[index % len(batches)])
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    # Since the model was built: what a graph holds is allocated while it is captured.
    peak = torch.cuda.max_memory_allocated()
    grown = torch.cuda.memory_stats()["segment.all.allocated"] - segments
    memory = {"peak": peak, "reserved": torch.cuda.max_memory_reserved(), "new_segments": grown}
    return {"ms": statistics.median(times), "fastest": min(times), "slowest": max(times), **memory}


def _matmul_rate() -> float:
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * 8192**3 / (statistics.median(times[3:]) * 1e-3) / 1e12


def _batches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One batch of full sequences, or eight of a log-normal mix of lengths (median a quarter of the longest), tokens on the right."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape, vocab = (options.batch, options.seq), MODELS[options.model]["vocab"]
    found = []
    for _ in range(1 if options.lengths == "full" else 8):
        lengths = torch.full((options.batch,), options.seq)
        if options.lengths == "mixed":
            drawn = torch.exp(torch.randn(options.batch, generator=generator) * 0.7) * options.seq / 4
            lengths = drawn.round().long().clamp(1, options.seq)
        mask = torch.arange(options.seq) < lengths[:, None]
        ids = torch.randint(1, vocab, shape, generator=generator).masked_fill(~mask, 0)
        longest = int(lengths.max())  # a batch is padded to its longest sample, as a collator does
        labels = torch.randint(0, CLASSES, (options.batch,), generator=generator)
        found.append({"input_ids": ids[:, :longest].cuda(), "mask": mask[:, :longest].cuda(), "labels": labels.cuda()})
    return found


def _config(options: argparse.Namespace) -> Any:
    from impl.config import DecoderConfig

    return DecoderConfig(**MODELS[options.model], eps=1e-6, tied=True, max_positions=32768)


def _tensors(options: argparse.Namespace) -> dict[str, Any]:
    """The same bfloat16 weights for everybody; biases and norms are not trivial."""
    import torch

    from impl.decoder import parameter_shapes

    generator = torch.Generator("cuda").manual_seed(2)
    tensors = {}
    for name, shape in parameter_shapes(_config(options)).items():
        noise = torch.randn(shape, generator=generator, device="cuda")
        around = 1.0 if len(shape) == 1 and name.endswith("norm.weight") else 0.0
        tensors[name] = (around + (0.02 if len(shape) > 1 else 0.1) * noise).bfloat16()
    return tensors


def _factors(options: argparse.Namespace) -> dict[str, Any]:
    """The same LoRA factors and head for everybody, B not zero, the head's bias zero (transformers' heads have none)."""
    import torch

    from impl.classifier import trainable_shapes

    generator = torch.Generator("cuda").manual_seed(3)
    shapes = trainable_shapes(_config(options), _adaptation(options))
    made = {name: 0.02 * torch.randn(shape, generator=generator, device="cuda") for name, shape in shapes.items()}
    return made | {"score.bias": torch.zeros_like(made["score.bias"])}


def _adaptation(options: argparse.Namespace) -> Any:
    from impl.classifier import Adaptation

    return Adaptation(CLASSES, RANK, ALPHA, "q_v", "last", not options.bf16)


def _truth(options: argparse.Namespace, batch: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients in float32 on the weights as NF4 or bfloat16 hold them, four samples at a time."""
    import torch

    from impl.classifier import Adaptation, Classifier
    from impl.operations.nf4 import nf4_dequantize, nf4_quantize
    from impl.trainer import Batch, Trainer

    tensors = {}
    for name, value in _tensors(options).items():
        held = value.float()
        if "_proj.weight" in name and not options.bf16:
            held = nf4_dequantize(*nf4_quantize(value, 64), *value.shape, 64, dtype=torch.bfloat16).float()
        tensors[name] = held
    adaptation = Adaptation(CLASSES, RANK, ALPHA, "q_v", "last", False)
    classifier = Classifier(_config(options), adaptation, tensors, _factors(options), dtype=torch.float32, device="cuda")
    del tensors
    trainer = Trainer(classifier, total_steps=None, micro_batch=2, learning_rate=RATE)
    loss = trainer.accumulate(Batch(batch["input_ids"], batch["mask"], batch["labels"])).loss
    gradients = trainer.optimiser.split(trainer.gradient_vector())
    return {"loss": loss, "gradients": {name: value.cpu() for name, value in gradients.items() if "lora_" in name}}


def _ours(options: argparse.Namespace, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    from impl.classifier import Classifier
    from impl.trainer import Batch, Trainer

    device = {"dtype": torch.bfloat16, "device": "cuda"}
    classifier = Classifier(_config(options), _adaptation(options), _tensors(options), _factors(options), **device)
    settings: dict[str, Any] = {"total_steps": None, "micro_batch": options.batch, "learning_rate": RATE}
    if options.contender == "ours-torch":
        trainer = Trainer(classifier, **settings)
    else:
        from impl.fused.step import FusedTrainer

        trainer = FusedTrainer(classifier, longest=options.seq, **settings)
    _forget_building()
    loss = trainer.accumulate(Batch(batch["input_ids"], batch["mask"], batch["labels"])).loss
    gradients = {name: value.cpu() for name, value in trainer.optimiser.split(trainer.gradient_vector()).items() if "lora_" in name}
    trainer.discard()
    return (
        lambda batch: trainer.train_batch(Batch(batch["input_ids"], batch["mask"], batch["labels"])),
        {"loss": loss, "gradients": gradients},
    )


def _forget_building() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _peer(options: argparse.Namespace, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """transformers + PEFT + bitsandbytes as a user puts them together; float32 factors under bfloat16 autocast, fused AdamW, clipping."""
    import torch

    model = _peer_model(options)
    _forget_building()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, fused=True)
    if options.contender in ("compile", "reduce-overhead"):
        # Of a mix of lengths each would be compiled by itself, until the compiler gives up.
        dynamic = False if options.lengths == "full" else None
        model = torch.compile(model, mode="reduce-overhead" if options.contender == "reduce-overhead" else None, dynamic=dynamic)

    def loss_of(batch: dict[str, Any]) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            # transformers looks at a whole mask of ones and waits for the device; a user of full sequences leaves it out.
            mask = None if options.lengths == "full" else batch["mask"]
            return model(input_ids=batch["input_ids"], attention_mask=mask, labels=batch["labels"]).loss

    loss = loss_of(batch)
    loss.backward()
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" in name}
    gradients = {_our_name(name): parameter.grad.float().cpu() for name, parameter in names.items()}
    optimiser.zero_grad(set_to_none=True)

    def step(batch: dict[str, Any]) -> float:
        if options.contender == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return float(loss)

    return step, {"loss": float(loss), "gradients": gradients}


def _our_name(name: str) -> str:
    plain = name.replace("_orig_mod.", "").replace("base_model.model.", "").replace(".default", "")
    return plain if plain.startswith("model.") else f"model.{plain}"


def _peer_model(options: argparse.Namespace) -> Any:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    shape, prefix = _config(options), {"qwen2": "Qwen2", "qwen3": "Qwen3"}[MODELS[options.model]["family"]]
    settings = {key: value for key, value in shape.to_huggingface().items() if key not in ("architectures", "model_type")}
    config = getattr(transformers, f"{prefix}Config")(**settings, num_labels=CLASSES, pad_token_id=0, use_cache=False)
    if options.contender == "liger":
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(config.model_type)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForSequenceClassification")(config).bfloat16()
    tensors = _tensors(options)
    model = _filled(model, tensors, options)
    lora = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=int(ALPHA), target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(model, lora)
    given = _factors(options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(given[_our_name(name)])
            elif "modules_to_save" in name:
                parameter.copy_(given["score.weight"])
    return model.train()


def _filled(model: Any, tensors: dict[str, Any], options: argparse.Namespace) -> Any:
    """The weights in their places, projections in NF4 modules; buffers that the meta device did not compute are made anew."""
    import bitsandbytes
    import torch

    for name, value in tensors.items():
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if leaf == "weight" and "_proj" in name and not options.bf16:
            bias = tensors.get(name.removesuffix("weight") + "bias")
            linear = bitsandbytes.nn.Linear4bit(
                value.shape[1], value.shape[0], bias=bias is not None, compute_dtype=torch.bfloat16, quant_type="nf4",
                compress_statistics=False, device="meta",
            )  # fmt: skip
            linear.weight = bitsandbytes.nn.Params4bit(value.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=False)
            if bias is not None:
                linear.bias = torch.nn.Parameter(bias, requires_grad=False)
            holder, _, last = name.removesuffix(".weight").rpartition(".")
            setattr(model.get_submodule(holder), last, linear.cuda())
        elif not (leaf == "bias" and "_proj" in name and not options.bf16):
            setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
    model.score.weight = torch.nn.Parameter(torch.zeros_like(model.score.weight, device="cuda"))
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary.cuda()
    return model


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
