"""Architecture of a decoder, and the settings of a fine-tuning run."""

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
TARGETS = {
    "q_v": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
FULL = "full"
"""Of all parameters, as `lora_targets`: other trainers offer it, and it is refused with the reason."""
POOLINGS = ("mean", "last", "first")
SCHEDULES = ("constant", "linear", "cosine")
BACKENDS = ("auto", "torch", "fused")
PADDING_SIDES = ("right", "left")
DTYPES = ("float32", "bfloat16")
BALANCED = ("balanced", "balanced_over_classes")
"""Class weights from the training samples, inverse to their number a class, with a mean of 1 over the samples or over the classes."""
LARGEST = 2**63 - 1
"""Of what a setting counts, and of seeds: what torch takes."""


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 scales the rotary frequencies, for a longer context than the `original_positions` of its pre-training.

    A pair that turns at most `low_freq_factor` times in those has its frequency divided by `factor`, one that turns at least
    `high_freq_factor` times keeps it, and between them there is a linear mixture. Raises a ValueError that begins with the field's name.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_number(name, getattr(self, name), above=0.0)
        if self.factor < 1:
            raise ValueError(f"factor is {self.factor!r}: expected a number from 1, by which low frequencies are divided")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor is {self.high_freq_factor!r}: expected more than low_freq_factor, {self.low_freq_factor!r}")
        require_count("original_positions", self.original_positions)


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a Llama, Qwen2 or Qwen3 decoder. Raises a ValueError for sizes that do not fit together."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    tied: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        """Checks the sizes."""
        require_choice("family", self.family, FAMILIES)
        for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            require_count(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary position embedding turns pairs")
        if not (0 < self.eps < 1 and self.theta > 0 and math.isfinite(self.theta)):
            raise ValueError(f"eps {self.eps} and theta {self.theta}: expected 0 < eps < 1 and a positive finite theta")

    @property
    def rotary(self) -> dict[str, float]:
        """The scalars of `rope`."""
        return {"theta": self.theta, **({} if self.rope_scaling is None else dataclasses.asdict(self.rope_scaling))}

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias (Qwen2)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.family == "qwen3"


@dataclass(frozen=True)
class ClassifyConfig:
    """Settings of a classification run. Raises a ValueError that names the field, its value and what was expected.

    A micro-batch holds `batch_size` samples, an optimiser step `batch_size * accumulation_steps`; the last step of an epoch takes what is
    left. `class_weights` are numbers, one a class, used as they are, or one of `BALANCED`. `validation_fraction` is used where no
    validation corpus is given; 0 leaves validation out. `early_stop_patience` is a number of epochs without a lower validation loss.
    `double_quantize` stores the absmax of NF4 weights in 8 bits, 4.127 bits a weight for 4.5 (Dettmers et al. 2023, §3).
    `dtype` is that of base weights and activations, `backend` what makes the steps (`impl.fused.step.backend_of`).
    """

    num_classes: int = 5
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_targets: str = "q_v"
    learning_rate: float = 2e-4
    epochs: int = 3
    max_seq_len: int = 512
    log_interval: int = 100
    batch_size: int = 16
    accumulation_steps: int = 1
    gradient_clip_norm: float | None = 1.0
    class_weights: tuple[float, ...] | str | None = None
    quantize_nf4: bool = False
    double_quantize: bool = False
    warmup_fraction: float = 0.06
    weight_decay: float = 0.01
    schedule: str = "linear"
    pooling: str = "mean"
    seed: int = 0
    multi_label: bool = False
    validation_fraction: float = 0.1
    early_stop_patience: int | None = None
    padding_side: str = "right"
    dtype: str = "float32"
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Checks the settings."""
        for name in ("num_classes", "lora_rank", "epochs", "max_seq_len", "log_interval", "batch_size", "accumulation_steps"):
            require_count(name, getattr(self, name))
        if self.num_classes < 2:
            raise ValueError(f"num_classes is {self.num_classes}: classification needs at least 2")
        for name in ("lora_alpha", "learning_rate"):
            require_number(name, getattr(self, name), above=0.0)
        if self.gradient_clip_norm is not None:
            require_number("gradient_clip_norm", self.gradient_clip_norm, above=0.0)
        for name in ("warmup_fraction", "weight_decay"):
            require_share(name, getattr(self, name))
        if not (is_number(self.validation_fraction) and 0 <= self.validation_fraction < 1):
            raise ValueError(f"validation_fraction is {_shown(self.validation_fraction)}: expected a number from 0 to below 1")
        if self.early_stop_patience is not None:
            require_count("early_stop_patience", self.early_stop_patience)
        for name in ("quantize_nf4", "double_quantize", "multi_label"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {_shown(getattr(self, name))}: expected true or false")
        if self.double_quantize and not self.quantize_nf4:
            raise ValueError(
                "double_quantize is True without quantize_nf4: it quantises the absmax of NF4 weights; ask for both or neither"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed <= LARGEST:
            raise ValueError(f"seed is {_shown(self.seed)}: expected an integer from 0 to {LARGEST}")
        if not (isinstance(self.lora_targets, str) and target_modules(self.lora_targets)):
            raise ValueError(
                f"lora_targets is {_shown(self.lora_targets)}: expected {', '.join(TARGETS)} or names of projections with commas"
            )
        require_choice("schedule", self.schedule, SCHEDULES)
        require_choice("pooling", self.pooling, POOLINGS)
        require_choice("padding_side", self.padding_side, PADDING_SIDES)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("backend", self.backend, BACKENDS)
        self._check_class_weights()

    def _check_class_weights(self) -> None:
        weights = self.class_weights
        if weights is None:
            return
        if self.multi_label:
            raise ValueError(
                f"class_weights is {weights!r} with multi_label: they weight the cross-entropy of single labels; leave them out"
            )
        if isinstance(weights, str):
            require_choice("class_weights", weights, BALANCED)
            return
        numbers = isinstance(weights, tuple | list) and all(is_number(w) and math.isfinite(w) and w > 0 for w in weights)
        if not numbers or len(weights) != self.num_classes:
            raise ValueError(f"class_weights is {_shown(weights)}: expected {self.num_classes} positive numbers, one a class")
        object.__setattr__(self, "class_weights", tuple(weights))  # whoever gave a list may change it

    @classmethod
    def qlora_default(cls, model_params: float) -> "ClassifyConfig":
        """The settings of QLoRA for a model of that many parameters (Dettmers et al. 2023, Table 9).

        Without double quantisation, which that paper used: see `double_quantize`.
        """
        require_number("model_params", model_params, above=0.0)
        return cls(
            num_classes=2,
            lora_rank=16,
            lora_alpha=32.0,
            learning_rate=2e-4 if model_params <= 13e9 else 1e-4,
            epochs=3,
            max_seq_len=256,
            batch_size=16,
            accumulation_steps=1,
            gradient_clip_norm=1.0,
            quantize_nf4=True,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "ClassifyConfig":
        """The settings with the given names, the others at their defaults. Raises a ValueError for an unknown name."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                raise ValueError(
                    f"no setting is named {key!r}; " + (f"the nearest is {near[0]!r}" if near else f"there are {', '.join(names)}")
                )
        weights = values.get("class_weights")
        return cls(**{**values, **({"class_weights": tuple(weights)} if isinstance(weights, list) else {})})


def target_modules(targets: str) -> tuple[str, ...]:
    """The projections that a name of `TARGETS`, or names of projections with commas between, stand for; none for the empty text.

    Raises a ValueError for an unknown name, and with the reason for `FULL`.
    """
    if targets in TARGETS or not targets:
        return TARGETS.get(targets, ())
    if targets == FULL:
        raise ValueError(
            f"lora_targets is {FULL!r}: a classifier's base weights are not trained here. They stay as they are, bit for bit, so that "
            f"NF4 can hold them and an adapter fits every copy of its base; expected {', '.join(TARGETS)} or names of projections"
        )
    names = targets.split(",")
    for name in names:
        if name not in TARGETS["all"]:
            near = difflib.get_close_matches(name, (*TARGETS["all"], *TARGETS), n=1)
            hint = f" (nearest: {near[0]})" if near else ""
            expected = f"{', '.join(TARGETS)}, or names with commas between of {', '.join(TARGETS['all'])}"
            raise ValueError(f"lora_targets is {targets!r}: expected {expected}{hint}")
    return tuple(name for name in TARGETS["all"] if name in names)


def targets_named(modules: Collection[str]) -> str:
    """The name in `TARGETS` of a set of projections, or their names with commas between, in the order of a block."""
    named = [key for key, every in TARGETS.items() if set(every) == set(modules)]
    return named[0] if named else ",".join(name for name in TARGETS["all"] if name in modules)


def is_number(value: Any) -> bool:
    """Whether a value is a number and no truth value.

    An integer may be larger than every float: such a one is no number that anything is computed with.
    """
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST)


def require_count(name: str, value: Any) -> None:
    """Raises a ValueError for all but an integer from 1 to `LARGEST`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {_shown(value)}: expected a positive integer")
    if value > LARGEST:
        raise ValueError(f"{name} is {_shown(value)}: expected {LARGEST} at most")


def require_number(name: str, value: Any, above: float, most: float = 1e30) -> None:
    """Raises a ValueError for all but a number above `above` and up to `most`."""
    if not (is_number(value) and above < value <= most):
        raise ValueError(f"{name} is {_shown(value)}: expected a number above {above:g} and up to {most:g}")


def require_share(name: str, value: Any) -> None:
    """Raises a ValueError for all but a number from 0 to 1."""
    if not (is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name} is {_shown(value)}: expected a number from 0 to 1")


def _shown(value: Any) -> str:
    """Python writes no integer of more than 4,300 digits, nor a list of such."""
    if isinstance(value, int) and value.bit_length() >= 1000:
        return f"an integer of {value.bit_length()} bits"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list | tuple) else repr(value)


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises a ValueError for a value that is none of the choices, with the nearest one."""
    if value not in choices:
        near = difflib.get_close_matches(str(value) if isinstance(value, str) else "", choices, n=1)
        raise ValueError(f"{name} is {_shown(value)}: expected one of {', '.join(choices)}" + (f" (nearest: {near[0]})" if near else ""))
