"""Runs every reproduction of this folder and writes FINDINGS.md of what each printed: `python examples/findings/page.py`."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
WHERE = {
    "bitsandbytes_double_quantize_zero": "a group whose values are all 0 gets the code 0, which stands for −0.993, and not that of zero",
    "bitsandbytes_narrow_rows": "backends/cpu/ops.py:211 calls a CPU kernel (AVX-512) that counts columns // block_size scales a row",
    "bitsandbytes_one_byte": "functional.py:1076 takes a weight of one byte for a transposed one",
    "bitsandbytes_tail_block_divides": "backends/default/ops.py:249 divides a short last block by its scale, 245 multiplies by 1 / scale",
    "bitsandbytes_zero_tail_block": "backends/default/ops.py:247 raises the scale of a short last block to 1e-38",
    "peft_merge_4bit_bias": "tuners/lora/bnb.py:405 adds the LoRA bias without the scaling",
    "peft_safe_merge_4bit_bias": "tuners/lora/bnb.py:406 asks for the truth of a tensor",
    "peft_unmerge_bfloat16": "tuners/lora/layer.py:1070 rounds the update to bfloat16 before line 1036 subtracts it",
    "torch_clip": "nn/utils/clip_grad.py:164 adds 1e-6 to the norm; `--declare eps=1e-6` says so",
    "torch_confident_bfloat16": "log_softmax on the CPU rounds within; `--declare intermediates=storage` says so",
    "torch_loss_bfloat16": "the loss has the dtype of the logits; `--declare loss_dtype=storage` says so",
    "torch_no_refusal": "nothing is refused",
    "torch_weighted_mean": "the mean is over the class weights; `--declare reduction=weights` says so",
    "transformers_accumulation": "trainer.py:521 takes the model's `**kwargs` for num_items_in_batch; modeling_layers.py:190 drops it",
    "transformers_rms_norm_bfloat16": "modeling_qwen2.py:244 rounds twice; `--declare intermediates=storage` says so",
}
"""Reproduction → the line of the installed package that is responsible, or the convention that the library follows."""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


def main() -> int:
    """Writes the page; 1 where a reproduction failed, or has no place in WHERE."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = ["# Findings in published libraries", "", f"`python examples/findings/page.py` made this page on a CPU with {versions}.", ""]
    lines += ["Most were found by `blackswan vet NAME`. Each is shown here without Blackswan.", ""]
    failed = False
    for script in sorted(HERE.glob("*_*.py")):
        print(script.name, file=sys.stderr)
        ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)  # noqa: S603  # our own scripts
        said = [line for line in ran.stdout.splitlines() if "expected" in line]
        failed = failed or ran.returncode != 0 or not said or script.stem not in WHERE
        title = (ast.get_docstring(ast.parse(script.read_text())) or "").replace("\n", " ")
        lines += [f"## [{script.stem}](examples/findings/{script.name})", "", title, ""]
        lines += [f"Where: {WHERE.get(script.stem, 'not analysed')}.", "", "```", *said, "```", ""]
    (HERE.parents[1] / "FINDINGS.md").write_text("\n".join(lines), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
