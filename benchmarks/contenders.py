"""One contender of benchmarks/train_step.py, in a process of its own: prints its figures as JSON, keeps loss and gradients in a folder."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":  # before what takes seconds to import
    from benchmarks.command import importing

    importing()

from benchmarks import command
from benchmarks.step_inputs import (
    ALPHA,
    CLASSES,
    MODELS,
    RANK,
    RATE,
    adaptation_of,
    add_options,
    batches_of,
    config_of,
    factors_of,
    tensors_of,
)
from blackswan.impl.architecture import to_huggingface

COMPILED = ("compile", "reduce-overhead")
PEERS = ("eager", "liger", *COMPILED)
CONTENDERS = ("ours", "ours-torch", *PEERS)
TRUTH = "truth"
"""The float32 computation that the others are held to; it is not timed."""


def main() -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contender", choices=(TRUTH, *CONTENDERS))
    parser.add_argument("folder", type=Path)
    add_options(parser)
    options = parser.parse_args()
    command.require_cuda()
    print(json.dumps(_figures(options)))
    return 0


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    batches = batches_of(options)
    if options.contender in COMPILED:
        batches = [padded(batch, options.seq) for batch in batches]
    if options.contender == TRUTH:
        step, found = None, _truth(options, batches[0])
    elif options.contender.startswith("ours"):
        step, found = _ours(options, batches[0])
    else:
        step, found = _peer(options, batches[0])
    torch.save(found, options.folder / f"{options.contender}.pt")
    if step is None:
        from benchmarks.timing import matmul_rate

        return {"tflops": matmul_rate() / 1e12, "tokens": sum(int(batch["mask"].sum()) for batch in batches) / len(batches)}
    return _timed(step, batches, options.steps)


def padded(batch: dict[str, Any], longest: int) -> dict[str, Any]:
    """The batch with every sample as long as `longest`, what is added on the right masked out."""
    from torch.nn.functional import pad

    added = (0, longest - batch["input_ids"].shape[1])
    return batch | {"input_ids": pad(batch["input_ids"], added, value=0), "mask": pad(batch["mask"], added, value=False)}


def _timed(step: Any, batches: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Median milliseconds of a step, the device's peak memory, and the memory that it took from the device while it was timed."""
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


def _truth(options: argparse.Namespace, batch: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients in float32 on the weights as NF4 or bfloat16 hold them, two samples at a time."""
    import torch

    from blackswan.impl.classifier import Adaptation, Classifier
    from blackswan.impl.operations.nf4 import nf4_dequantize, nf4_quantize
    from blackswan.impl.trainer import Batch, Trainer

    tensors = {}
    for name, value in tensors_of(options).items():
        held = value.float()
        if "_proj.weight" in name and not options.bf16:
            held = nf4_dequantize(*nf4_quantize(value, 64), *value.shape, 64, dtype=torch.bfloat16).float()
        tensors[name] = held
    adaptation = Adaptation(CLASSES, RANK, ALPHA, "q_v", "last", False)
    classifier = Classifier(config_of(options), adaptation, tensors, factors_of(options), dtype=torch.float32, device="cuda")
    del tensors
    trainer = Trainer(classifier, total_steps=None, micro_batch=2, learning_rate=RATE)
    loss = trainer.accumulate(Batch(batch["input_ids"], batch["mask"], batch["labels"])).loss
    gradients = trainer.optimiser.split(trainer.gradient_vector())
    return {"loss": loss, "gradients": {name: value.cpu() for name, value in gradients.items() if "lora_" in name}}


def _ours(options: argparse.Namespace, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    from blackswan.impl.classifier import Classifier
    from blackswan.impl.trainer import Batch, Trainer

    device = {"dtype": torch.bfloat16, "device": "cuda"}
    classifier = Classifier(config_of(options), adaptation_of(options), tensors_of(options), factors_of(options), **device)
    settings: dict[str, Any] = {"total_steps": None, "micro_batch": options.batch, "learning_rate": RATE}
    if options.contender == "ours-torch":
        trainer = Trainer(classifier, **settings)
    else:
        from blackswan.impl.fused.step import FusedTrainer

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
    """transformers + PEFT + bitsandbytes as a user puts them together; float32 factors under bfloat16 autocast, fused AdamW, clipping.

    A mix of lengths comes padded to each batch's longest sample, to a compiled peer padded to --seq: one static graph serves all batches.
    """
    import torch

    model = _peer_model(options)
    _forget_building()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, fused=True)
    if options.contender in COMPILED:
        # Batches of several lengths would each be compiled by itself, until the compiler gives up.
        model = torch.compile(model, mode="reduce-overhead" if options.contender == "reduce-overhead" else None, dynamic=False)

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

    shape, prefix = config_of(options), {"qwen2": "Qwen2", "qwen3": "Qwen3"}[MODELS[options.model]["family"]]
    settings = {key: value for key, value in to_huggingface(shape).items() if key not in ("architectures", "model_type")}
    config = getattr(transformers, f"{prefix}Config")(**settings, num_labels=CLASSES, pad_token_id=0, use_cache=False)
    if options.contender == "liger":
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(config.model_type)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForSequenceClassification")(config).bfloat16()
    tensors = tensors_of(options)
    model = _filled(model, tensors, options)
    lora = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=int(ALPHA), target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(model, lora)
    given = factors_of(options)
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
    command.start(main)
