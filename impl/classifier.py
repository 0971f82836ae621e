"""Sequence classifier: a frozen decoder with low-rank updates, pooling and a linear head."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blackswan.impl.config import ClassifyConfig, DecoderConfig, target_modules, targets_named
from blackswan.impl.decoder import Body, parameter_shapes, projection_shapes, require_tensors
from blackswan.impl.dispatch import call
from blackswan.impl.lora import factor_shapes, initial_factor
from blackswan.impl.nf4 import Nf4Weight
from blackswan.impl.projection import Projection
from blackswan.impl.tensors import Converted, Tensors, seeded


@dataclass(frozen=True)
class Adaptation:
    """What is added to a decoder: number of classes, rank, scale and targets of the updates, by their one name, pooling; NF4 base weights
    or not, and their absmax quantised as well or not."""

    classes: int
    rank: int
    alpha: float
    targets: str = "q_v"
    pooling: str = "mean"
    nf4: bool = False
    double_quantize: bool = False

    def __post_init__(self) -> None:
        """Names the targets by their one name."""
        object.__setattr__(self, "targets", targets_named(target_modules(self.targets)))

    @classmethod
    def of(cls, settings: ClassifyConfig) -> "Adaptation":
        """The adaptation that a run's settings ask for."""
        return cls(
            classes=settings.num_classes,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            targets=settings.lora_targets,
            pooling=settings.pooling,
            nf4=settings.quantize_nf4,
            double_quantize=settings.double_quantize,
        )


def trainable_shapes(config: DecoderConfig, adaptation: Adaptation) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trainable tensor in its fixed order: per layer, per target, A then B; then head weight, head bias."""
    shapes: dict[str, tuple[int, ...]] = {}
    adapted = target_modules(adaptation.targets)
    for index in range(config.layers):
        for name, shape in projection_shapes(config).items():
            if name.endswith(adapted):
                shapes |= factor_shapes(f"model.layers.{index}.{name}", shape, adaptation.rank)
    return shapes | {"score.weight": (adaptation.classes, config.hidden), "score.bias": (adaptation.classes,)}


def base_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the decoder's tensors that a classifier uses: all but the language-model head."""
    return {name: shape for name, shape in parameter_shapes(config).items() if name != "lm_head.weight"}


def initial_trainable(config: DecoderConfig, adaptation: Adaptation, seed: int) -> dict[str, Tensor]:
    """Float32 start values: LoRA A random, B zero; head Xavier-uniform (Glorot & Bengio 2010), its bias zero."""
    generator = seeded(seed)
    return {name: _initial(name, shape, generator) for name, shape in trainable_shapes(config, adaptation).items()}


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name == "score.bias":
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    if name != "score.weight":
        return initial_factor(name, shape, generator)
    bound = math.sqrt(6.0 / sum(shape))
    return (2.0 * torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") - 1.0) * bound


class Head(nn.Module):
    """Linear map from the pooled vector to the classes, trainable."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """X [batch, hidden] → [batch, classes]."""
        y: Tensor = call("score", "linear", x=x, weight=self.weight, bias=self.bias)
        return y


class Classifier(nn.Module):
    """A decoder's body with LoRA, pooling and a head.

    `base` holds the decoder's tensors (a language-model head among them is not used) and `trainable` those of `trainable_shapes`,
    wherever both come from: a checkpoint, `random_tensors`, `initial_trainable`. Base tensors live in `dtype`, trainable ones are
    float32 masters (float64 in float64). Base tensors are asked for one at a time, so that with NF4 those of a `LazyTensors` are never
    in memory together. Raises a ValueError where the tensors are not the architecture's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        adaptation: Adaptation,
        base: Tensors,
        trainable: Tensors,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        placed = Converted(base, dtype=dtype, device=device, without=("lm_head.weight",))
        require_tensors(base_shapes(config), placed, "decoder")
        require_tensors(trainable_shapes(config, adaptation), trainable, "adapter and head")
        self.config, self.adaptation = config, adaptation
        self.model = Body(config, placed, adaptation.nf4)
        if adaptation.double_quantize:
            for module in self.model.modules():
                if isinstance(module, Nf4Weight):
                    module.double_quantize()
        master = torch.float64 if dtype == torch.float64 else torch.float32
        masters = {name: tensor.to(device=device, dtype=master, copy=True) for name, tensor in trainable.items()}
        self._attach(masters)
        self.score = Head(masters["score.weight"], masters["score.bias"])

    def _attach(self, masters: Mapping[str, Tensor]) -> None:
        for module in self.modules():
            if isinstance(module, Projection) and f"{module.path}.lora_A.weight" in masters:
                module.attach(masters[f"{module.path}.lora_A.weight"], masters[f"{module.path}.lora_B.weight"], self.adaptation.alpha)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves, in the order of `trainable_shapes`. No other requires a gradient."""
        return {name: self.get_parameter(name) for name in trainable_shapes(self.config, self.adaptation)}

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """input_ids and mask [batch, seq] → logits [batch, classes]."""
        hidden = self.model(input_ids, mask)
        pooled = call("pool", "pool", x=hidden, mask=mask, mode=self.adaptation.pooling)
        logits: Tensor = self.score(pooled)
        return logits

    def loss(self, logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
        """Weighted cross-entropy of logits [batch, classes] with labels [batch], float32.

        With several labels a sample, 0 or 1 for each class in floating point [batch, classes]: the binary cross-entropy, which has no
        weights. Raises a ValueError for weights there.
        """
        loss: Tensor
        if not labels.is_floating_point():
            loss = call("loss", "weighted_cross_entropy", logits=logits, labels=labels, class_weights=class_weights)
            return loss
        if class_weights is not None:
            raise ValueError("class weights weight the cross-entropy of single labels; with several labels a sample leave them out")
        loss = call("loss", "bce_with_logits", logits=logits, targets=labels)
        return loss
