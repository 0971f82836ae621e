"""A frozen linear map of a decoder layer: a plain weight or an NF4 one, with a low-rank update where one is attached."""

from collections.abc import Mapping

from torch import Tensor, nn

from blackswan.impl.dispatch import call
from blackswan.impl.lora import LoraFactor
from blackswan.impl.nf4 import Nf4Weight


class Projection(nn.Module):
    """y = x Wᵀ + b, plus the update of `attach`. `path` is the Hugging Face name, which the call and the parameters go by."""

    def __init__(self, path: str, weight: Tensor, bias: Tensor | None, nf4: bool) -> None:
        super().__init__()
        self.path = path
        self.out_features, self.in_features = weight.shape
        self.alpha = 0.0
        self.weight = None if nf4 else frozen(weight)
        self.quantized = Nf4Weight(path, weight) if nf4 else None
        self.bias = None if bias is None else frozen(bias)
        self.lora_A: LoraFactor | None = None
        self.lora_B: LoraFactor | None = None

    @classmethod
    def take(cls, path: str, tensors: Mapping[str, Tensor], nf4: bool) -> "Projection":
        """The projection named `path`, from the model's tensors."""
        return cls(path, tensors[f"{path}.weight"], tensors.get(f"{path}.bias"), nf4)

    def attach(self, lora_a: Tensor, lora_b: Tensor, alpha: float) -> None:
        """Adds the update (alpha/rank) · B A with trainable A [rank, in] and B [out, rank]."""
        self.lora_A, self.lora_B, self.alpha = LoraFactor(lora_a), LoraFactor(lora_b), alpha

    def forward(self, x: Tensor) -> Tensor:
        """X [..., in] → [..., out]."""
        y: Tensor
        if self.lora_A is not None and self.lora_B is not None:
            weight = self.weight if self.quantized is None else self.quantized.dequantized(x.dtype)
            factors = {"lora_a": self.lora_A.weight, "lora_b": self.lora_B.weight}
            y = call(self.path, "lora_linear", x=x, weight=weight, bias=self.bias, **factors, alpha=self.alpha)
        elif self.quantized is not None:
            shape = {"in_features": self.in_features, "out_features": self.out_features, "block_size": self.quantized.block_size}
            scales = self.quantized.scales()
            with self.quantized.restoring(scales):
                y = call(self.path, "nf4_linear", x=x, codes=self.quantized.codes, absmax=scales, **shape, bias=self.bias)
        else:
            y = call(self.path, "linear", x=x, weight=self.weight, bias=self.bias)
        return y


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that the optimiser does not move."""
    return nn.Parameter(tensor, requires_grad=False)
