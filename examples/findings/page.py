"""Asks the subjects that ship, runs every reproduction of this folder, and writes FINDINGS.md: `python examples/findings/page.py`.

With names (`page.py transformers:TRAINER`) only those subjects are asked anew, with `--kept` none; held.json has what the others came to.
"""

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELD, REPLAYS = HERE / "held.json", HERE / "replays"
STORED, LOSS = "intermediates=storage", "loss_dtype=storage"
SUBJECTS: dict[str, tuple[str, ...]] = {
    "torch": (STORED, LOSS, "reduction=weights", "eps=1e-6"),
    "torch:FOREACH": (),
    "torch:FUSED": (),
    "torch:COMPILED": (STORED,),
    "torch:OURS_COMPILED": (),
    "transformers": (STORED, LOSS, "lm_cross_entropy.loss_dtype=float32"),
    "transformers:EAGER": (STORED,),
    "transformers:MODEL": (),
    "transformers:MODEL_EAGER": (),
    "transformers:TRAINER": (),
    "transformers:TRAINER_ONE_BATCH": (),
    "peft": (STORED,),
    "peft:RSLORA": (STORED,),
    "bitsandbytes": (),
    "liger": (),
}
"""Each subject that `blackswan vet` is asked, with the conventions that are declared of it."""
OF_ITS_OWN = {
    "transformers:MODEL": "loss_dtype=storage",
    "transformers:MODEL_EAGER": "loss_dtype=storage",
    "transformers:TRAINER": "decay=weights",
    "transformers:TRAINER_ONE_BATCH": "decay=weights",
}
"""Conventions that a subject declares by itself."""
NO_REFUSAL, ROPE = ("torch_no_refusal",), ("transformers_rope_float32",)
ONE_BYTE, NARROW = ("bitsandbytes_one_byte",), ("bitsandbytes_narrow_rows",)
EVALUATED = ("bitsandbytes_eval_divisible", "bitsandbytes_eval_rounds_scales", "bitsandbytes_eval_cuts_gradient")
COMPILED = ("torch_compiled_transposed",)
EXPLAINED: dict[str, tuple[str, ...]] = {
    "KERNEL-RMSNORM": COMPILED,
    "OP-RMSNORM": COMPILED,
    "LOSS-CE-REFUSES-NAN": NO_REFUSAL,
    "LOSS-CE-REFUSES-ONE-CLASS": NO_REFUSAL,
    "LOSS-LM-REFUSES-EMPTY": NO_REFUSAL,
    "KERNEL-ROPE": ROPE,
    "KERNEL-ROPE-GRADIENT": ROPE,
    "OP-ROPE": ROPE,
    "OP-ROPE-GRADIENT": ROPE,
    "OP-ROPE-LLAMA3": ROPE,
    "OP-ROPE-LLAMA3-GRADIENT": ROPE,
    "TRN-RUN-STEPS": ("transformers_accumulation",),
    "TRN-VALIDATION-LOSS": ("transformers_epoch_loss",),
    "TRN-NON-FINITE": ("transformers_nan_goes_on",),
    "TRN-BASE-FROZEN": EVALUATED,
    "TRN-NF4-APPLIED": ("bitsandbytes_eval_divisible", *NARROW),
    "KERNEL-NF4-DEQUANTIZE": ONE_BYTE,
    "KERNEL-NF4-LINEAR": NARROW,
    "KERNEL-NF4-LINEAR-GRADIENT": ONE_BYTE,
    "NF4-DEQUANTIZE": (*NARROW, *ONE_BYTE),
    "NF4-DOUBLE-QUANTIZE": ("bitsandbytes_double_quantize_zero", "bitsandbytes_double_quantize_mean"),
    "NF4-LINEAR-GRADIENT": ONE_BYTE,
    "NF4-QUANTIZE": ("bitsandbytes_zero_tail_block", "bitsandbytes_tail_block_divides"),
    "NF4-ROUNDTRIP-BOUND": NARROW,
    "PREC-NF4-LINEAR": NARROW,
}
"""Claim that is falsified → the reproductions of what falsifies it."""
WHERE = {
    "bitsandbytes_double_quantize_mean": "functional.py:939 sums the scales in float32, and the mean depends on the order",
    "bitsandbytes_double_quantize_zero": "a group whose values are all 0 gets the code 0, which stands for −0.993, and not that of zero",
    "bitsandbytes_eval_cuts_gradient": "autograd/_functions.py:422 calls gemv_4bit, which has no backward pass, and goes on with it",
    "bitsandbytes_eval_divisible": "functional.py:1696 asserts that outputs come by 32; nn/modules.py:620 asks for no such thing",
    "bitsandbytes_eval_rounds_scales": "functional.py:1721 rounds the scales to bfloat16 and keeps no others; 1781 restores what is left",
    "bitsandbytes_narrow_rows": "backends/cpu/ops.py:211 calls a CPU kernel (AVX-512) that counts columns // block_size scales a row",
    "bitsandbytes_one_byte": "functional.py:1076 takes a weight of one byte for a transposed one",
    "bitsandbytes_tail_block_divides": "backends/default/ops.py:249 divides a short last block by its scale, 245 multiplies by 1 / scale",
    "bitsandbytes_zero_tail_block": "backends/default/ops.py:247 raises the scale of a short last block to 1e-38",
    "peft_merge_4bit_bias": "tuners/lora/bnb.py:405 adds the LoRA bias without the scaling",
    "peft_safe_merge_4bit_bias": "tuners/lora/bnb.py:406 asks for the truth of a tensor",
    "peft_unmerge_bfloat16": "tuners/lora/layer.py:1070 rounds the update to bfloat16 before line 1036 subtracts it",
    "torch_clip": "nn/utils/clip_grad.py:164 adds 1e-6 to the norm; `--declare eps=1e-6` says so",
    "torch_compiled_transposed": "_inductor/codegen/cpp.py:2273 adds up to 4,096 numbers one after the other where a row is not contiguous",
    "torch_confident_bfloat16": "log_softmax on the CPU rounds within; `--declare intermediates=storage` says so",
    "torch_loss_bfloat16": "the loss has the dtype of the logits; `--declare loss_dtype=storage` says so",
    "torch_no_refusal": "nothing is refused",
    "torch_weighted_mean": "the mean is over the class weights; `--declare reduction=weights` says so",
    "transformers_accumulation": "trainer.py:521 takes the model's `**kwargs` for num_items_in_batch; modeling_layers.py:190 drops it",
    "transformers_epoch_loss": "trainer.py:2254 divides the sum of the steps' means by their number, and the last one has fewer samples",
    "transformers_nan_goes_on": "trainer.py:1917 adds the mean of former losses for one that is not finite, and nothing else looks at it",
    "transformers_rms_norm_bfloat16": "modeling_qwen2.py:244 rounds twice; `--declare intermediates=storage` says so",
    "transformers_rope_float32": "modeling_qwen2.py:83 rounds the frequencies to float32, and line 89 multiplies them by the position",
}
"""Reproduction → the line of the installed package that is responsible, or the convention that the library follows."""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; 1 where a reproduction failed or has no place in WHERE, or a falsified claim is not analysed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"asked anew (default: all): {', '.join(SUBJECTS)}")
    parser.add_argument("--kept", action="store_true", help="ask none")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.subjects) - set(SUBJECTS)):
        parser.error(f"{unknown[0]}: expected one of {', '.join(SUBJECTS)}")
    found = json.loads(HELD.read_text(encoding="utf-8")) if HELD.exists() else {}
    for name in [] if given.kept else given.subjects or SUBJECTS:
        found[name] = asked(name)
        HELD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines, failed = reproductions()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    head = ["# Findings in published libraries", "", f"`python examples/findings/page.py` made this page on a CPU with {versions}.", ""]
    page = [*head, *table(found), *falsified(found), *lines]
    (HERE.parents[1] / "FINDINGS.md").write_text("\n".join(page), encoding="utf-8")
    return int(failed or bool(not_analysed(found)))


def asked(name: str) -> dict[str, Any]:
    """Asks `blackswan vet` of a subject: the numbers of verdicts, why claims were not asked, and the falsified ones with a replay."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdicts.jsonl"
        declared = [word for each in SUBJECTS[name] for word in ("--declare", each)]
        command = [sys.executable, "-m", "blackswan", "vet", name, *declared, "--verdicts", str(file)]
        ran = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603  # our own program
        if ran.returncode not in (0, 1, 5):
            raise SystemExit(f"{' '.join(command)} ended with status {ran.returncode}")
        records = [record for line in file.read_text(encoding="utf-8").splitlines() if (record := json.loads(line))["record"] == "verdict"]
        shutil.rmtree(_replays(name), ignore_errors=True)
        return {
            "states": Counter(record["state"] for record in records),
            "lacks": sorted({record["reason"] for record in records if record["state"] == "NOT_RUN"}),
            "falsified": [_failure(name, record) for record in records if record["state"] not in ("HELD", "NOT_RUN")],
        }


def _failure(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Claim, dtype, the worst number or what was wrong beside numbers; its case goes to the folder of replays."""
    worst = record["counterexample"]
    stored = Path(worst["replay"].rpartition(" ")[2])
    _replays(name).mkdir(parents=True, exist_ok=True)
    replay = _replays(name) / f"{record['claim']}-{record['dtype']}{stored.suffix}"
    shutil.copy(stored, replay)
    what = (
        worst["metric"]
        if worst["expected"] is None
        else f"{worst['tensor']}: expected {_short(worst['expected'])}, got {_short(worst['actual'])}"
    )
    return {
        "claim": record["claim"],
        "dtype": record["dtype"],
        "state": record["state"],
        "what": what,
        "replay": replay.relative_to(HERE).as_posix(),
    }


def _replays(name: str) -> Path:
    return REPLAYS / name.replace(":", "-")


def _short(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def not_analysed(found: Mapping[str, Any]) -> list[str]:
    """The falsified claims that no reproduction explains."""
    return [failure["claim"] for each in found.values() for failure in each["falsified"] if failure["claim"] not in EXPLAINED]


def table(found: Mapping[str, Any]) -> list[str]:
    """A line a subject: numbers of verdicts, and what is declared of it."""
    lines = ["A verdict is of a claim in a dtype. Each subject is asked with the conventions that it follows, which are declared.", ""]
    lines += ["`blackswan vet NAME --declare … --replay FILE` asks a case again that falsified a claim.", ""]
    lines += ["| `blackswan vet` | held | falsified | not run | `--declare` |", "|---|---|---|---|---|"]
    for name, declared in SUBJECTS.items():
        states, unsteady = found[name]["states"], len(found[name]["falsified"]) - found[name]["states"].get("FALSIFIED", 0)
        count = f"{states.get('FALSIFIED', 0)}" + (f", {unsteady} flaky" if unsteady else "")
        own = [f"`{OF_ITS_OWN[name]}` by itself"] if name in OF_ITS_OWN else []
        conventions = ", ".join([*(f"`{each}`" for each in declared), *own]) or "—"
        lines.append(f"| `{name}` | {states.get('HELD', 0)} | {count} | {states.get('NOT_RUN', 0)} | {conventions} |")
    return [*lines, ""]


def falsified(found: Mapping[str, Any]) -> list[str]:
    """Lists each subject's falsified claims with their findings and replays, and the reasons why claims were not asked."""
    lines: list[str] = []
    for name in SUBJECTS:
        if failures := found[name]["falsified"]:
            lines += [f"### Falsified of `{name}`", "", "| claim | | finding | replay |", "|---|---|---|---|"]
            lines += [_row(failure) for failure in failures]
            lines += [""]
        if lacks := found[name]["lacks"]:
            lines += [f"`{name}` was not asked where:", "", *(f"- {reason}" for reason in lacks), ""]
    return lines


def _row(failure: Mapping[str, str]) -> str:
    findings = ", ".join(f"[{each}](#{each})" for each in EXPLAINED.get(failure["claim"], ())) or "not analysed"
    replay = f"[{failure['dtype']}](examples/findings/{failure['replay']})"
    flaky = "" if failure["state"] == "FALSIFIED" else f" ({failure['state'].lower()})"
    return f"| {failure['claim']} in {failure['dtype']}{flaky} | {failure['what'].replace('|', '/')} | {findings} | {replay} |"


def reproductions() -> tuple[list[str], bool]:
    """Runs each reproduction: gives its lines of the page, and whether one of them failed."""
    lines = ["## Reproductions", "", "Each finding is shown here without Blackswan.", ""]
    failed = False
    for script in _scripts():
        print(script.name, file=sys.stderr)
        ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)  # noqa: S603  # our own scripts
        said = [line for line in ran.stdout.splitlines() if "expected" in line]
        failed = failed or ran.returncode != 0 or not said or script.stem not in WHERE
        title = (ast.get_docstring(ast.parse(script.read_text())) or "").replace("\n", " ")
        lines += [f'<a id="{script.stem}"></a>', f"### [{script.stem}](examples/findings/{script.name})", "", title, ""]
        lines += [f"Where: {WHERE.get(script.stem, 'not analysed')}.", "", "```", *said, "```", ""]
    return lines, failed


def _scripts() -> Iterable[Path]:
    return sorted(HERE.glob("*_*.py"))


if __name__ == "__main__":
    sys.exit(main())
