"""Puts bitsandbytes' own `quantize_4bit` in the place of ours, and asks the claim on it: `python examples/bitsandbytes_nf4.py`."""

from bitsandbytes.functional import quantize_4bit
from torch import Tensor

from blackswan import contracts
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.terminal import story
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.impl import dispatch


def quantize(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Weight [rows, columns] → codes [(rows · columns + 1) // 2] and the absmax of each block, by bitsandbytes."""
    codes, state = quantize_4bit(weight.reshape(1, -1), blocksize=block_size, quant_type="nf4")
    return codes.flatten(), state.absmax


if __name__ == "__main__":
    claims = {claim.id: claim for contract in contracts.load() for claim in contract.claims}
    with dispatch.replaced({"nf4_quantize": quantize}):
        print(story(falsify(claims["NF4-QUANTIZE"], "float32", Implementation("cpu"), Options())))
