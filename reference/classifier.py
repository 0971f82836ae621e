"""A decoder with LoRA factors, NF4 base weights when asked, pooling and a linear head."""

from dataclasses import dataclass

import blackswan.reference.decoder as decoder
from blackswan.reference.decoder import ATTENTION_PROJECTIONS, MLP_PROJECTIONS, DecoderConfig, Project
from blackswan.reference.table import Composition, Scalars
from blackswan.reference.tape import Tape

NF4_BLOCK = 64
TARGETS = {"q_v": ("q_proj", "v_proj"), "all": ATTENTION_PROJECTIONS + MLP_PROJECTIONS}


def projections(targets: str) -> tuple[str, ...]:
    """The projections with LoRA factors: those of a name in TARGETS, or such as `q_proj+o_proj`; none for an empty text."""
    return TARGETS.get(targets) or tuple(filter(None, targets.split("+")))


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(DecoderConfig):
    """A decoder's configuration, with LoRA's rank, alpha and targets, the pooling mode, whether base weights are NF4,
    and whether their absmax are quantised in turn."""

    tied: bool = True
    classes: int
    rank: int
    alpha: float
    targets: str = "q_v"
    pooling: str
    nf4: bool = False
    double_quantize: bool = False

    def __post_init__(self) -> None:
        """ValueError for sizes and choices that no classifier has."""
        super().__post_init__()
        if self.double_quantize and not self.nf4:
            raise ValueError("double_quantize is on without nf4; there is no absmax to quantise")
        if unknown := set(projections(self.targets)).difference(TARGETS["all"]):
            names = f"{', '.join(TARGETS)}, or {', '.join(TARGETS['all'])} with + between them"
            raise ValueError(f"targets is {self.targets!r}, with {sorted(unknown)[0]!r}; expected {names}")

    def is_target(self, path: str) -> bool:
        """Whether the projection at that path has LoRA factors."""
        return path.rpartition(".")[2] in projections(self.targets)


def _trainable_shapes(config: ClassifierConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.layers):
        for path, (out_features, in_features) in config.projection_shapes().items():
            if config.is_target(path):
                shapes[f"model.layers.{layer}.{path}.lora_A.weight"] = (config.rank, in_features)
                shapes[f"model.layers.{layer}.{path}.lora_B.weight"] = (out_features, config.rank)
    return shapes | {"score.weight": (config.classes, config.hidden), "score.bias": (config.classes,)}


def trainable_names(scalars: Scalars) -> list[str]:
    """The trainable parameters in their fixed order: per layer and target A then B, then the head's weight and bias."""
    return list(_trainable_shapes(ClassifierConfig.from_scalars(scalars)))


def frozen_names(scalars: Scalars) -> list[str]:
    """The parameters that are neither trained nor, with NF4, quantised."""
    config = ClassifierConfig.from_scalars(scalars)
    quantised = {f"{path}.weight" for path in config.projection_shapes()} if config.nf4 else set()
    names = decoder.parameter_shapes({**scalars, "tied": config.tied})
    return [name for name in names if not any(name.endswith(suffix) for suffix in quantised)]


def parameter_shapes(scalars: Scalars) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every parameter, the decoder's first, then the trainable ones."""
    config = ClassifierConfig.from_scalars(scalars)
    return decoder.parameter_shapes({**scalars, "tied": config.tied}) | _trainable_shapes(config)


def base_weight(tape: Tape, config: ClassifierConfig, path: str) -> str:
    """The projection's weight, through NF4 and back when asked; from its codes, or as it is, where the tape has them already."""
    weight = f"{path}.weight"
    dequantized = f"{weight}.dequantized"
    if not config.nf4:
        return weight
    if dequantized in tape.values:
        return dequantized
    rows, columns = config.projection_shapes()[".".join(path.split(".")[-2:])]
    quantized = f"{weight}.nf4"
    codes, absmax = f"{quantized}.codes", f"{quantized}.absmax"
    if codes not in tape.values:
        tape.call(quantized, "nf4_quantize", weight=weight, block_size=NF4_BLOCK)
    if config.double_quantize:
        stored = {name: f"{weight}.absmax.nf4.{name}" for name in ("codes", "scales", "offset")}
        tape.call(f"{weight}.absmax.nf4", "nf4_double_quantize", absmax=absmax)
        absmax = tape.call(f"{weight}.absmax", "nf4_double_dequantize", **stored)
    return tape.call(dequantized, "nf4_dequantize", codes=codes, absmax=absmax, rows=rows, columns=columns, block_size=NF4_BLOCK)


def adapted_projection(tape: Tape, config: ClassifierConfig) -> Project:
    """Projections with LoRA at the targets, and the base weight through NF4 when asked."""

    def project(path: str, x: str) -> str:
        weight = base_weight(tape, config, path)
        bias = f"{path}.bias" if config.has_bias(path) else None
        if not config.is_target(path):
            return tape.call(path, "linear", x=x, weight=weight, bias=bias)
        factors = {"lora_a": f"{path}.lora_A.weight", "lora_b": f"{path}.lora_B.weight"}
        return tape.call(path, "lora_linear", x=x, weight=weight, bias=bias, **factors, alpha=config.alpha)

    return project


def head(tape: Tape, config: ClassifierConfig, hidden: str) -> str:
    """Pooling and the linear head: hidden states [batch, seq, hidden] → logits [batch, classes]."""
    pooled = tape.call("pool", "pool", x=hidden, mask="mask", mode=config.pooling)
    return tape.call("score", "linear", x=pooled, weight="score.weight", bias="score.bias")


def _forward(tape: Tape, scalars: Scalars) -> None:
    config = ClassifierConfig.from_scalars(scalars)
    decoder.require_parameters(tape, parameter_shapes(scalars))
    hidden = decoder.backbone(tape, config, adapted_projection(tape, config))
    tape.outputs = {"logits": head(tape, config, hidden)}


CLASSIFIER_FORWARD = Composition(_forward)


def loss_of(tape: Tape, logits: str) -> str:
    """The loss of logits [batch, classes] with the tape's `labels` and, where it has them, `class_weights`.

    Labels are classes [batch]; or 0 or 1 for each class [batch, classes], several a sample, and then the loss is the binary one.
    """
    if tape.values["labels"].ndim == 2:
        return tape.call("loss", "bce_with_logits", logits=logits, targets="labels")
    class_weights = "class_weights" if "class_weights" in tape.values else None
    return tape.call("loss", "weighted_cross_entropy", logits=logits, labels="labels", class_weights=class_weights)


def _loss(tape: Tape, scalars: Scalars) -> None:
    tape.compose("classifier_forward", CLASSIFIER_FORWARD, scalars)
    logits = tape.outputs["logits"]
    tape.outputs = {"loss": loss_of(tape, logits), "logits": logits}


CLASSIFIER_LOSS = Composition(_loss)
