"""The variables of hyperparameter rules: configuration fields, data statistics, and quantities derived from both.

Rules are written in CEL, which has neither coercion nor ceil, max or powers: every number is a double there, and what needs more than the
four operations of arithmetic is derived here. A field that is not given is null, and so is everything that is derived from it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blackswan.contracts.problems import unknown
from blackswan.contracts.schema import shown

MINORITY_UPDATES = 100
LARGEST_INT = 2**63 - 1
LARGEST_REAL = 1e30
LARGEST_STATISTIC = 1e15
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS: Mapping[str, tuple[str, ...]] = {"q_v": ("q_proj", "v_proj"), "all": PROJECTIONS}
BALANCED = ("balanced", "balanced_over_classes")
_MANY_DRAWS = 100_000


@dataclass(frozen=True)
class Field:
    """A configuration field or statistic: int, real, bool, text, targets or weights; null where `optional`.

    A number lies from `least` to `most`, a text is one of `of`. What a rule reports as an error needs no limit here, for a rule says more.
    """

    type: str
    least: float = -math.inf
    most: float = math.inf
    of: tuple[str, ...] = ()
    optional: bool = False
    recommendable: bool = True


def _int(least: int = -LARGEST_INT, **more: Any) -> Field:
    return Field("int", least, LARGEST_INT, **more)


def _real(least: float = -LARGEST_REAL, most: float = LARGEST_REAL, **more: Any) -> Field:
    return Field("real", least, most, **more)


CONFIG: Mapping[str, Field] = {
    "num_classes": _int(least=2),
    "lora_rank": _int(),
    "lora_alpha": _real(),
    "learning_rate": _real(),
    "epochs": _int(),
    "max_seq_len": _int(),
    "log_interval": _int(least=1),
    "batch_size": _int(),
    "accumulation_steps": _int(),
    "gradient_clip_norm": _real(optional=True),
    "class_weights": Field("weights", optional=True),
    "quantize_nf4": Field("bool"),
    "double_quantize": Field("bool"),
    "warmup_fraction": _real(),
    "weight_decay": _real(),
    "lora_targets": Field("targets"),
    "pooling": Field("text", of=("mean", "last", "first")),
    "schedule": Field("text", of=("constant", "linear", "cosine")),
    "seed": _int(least=0),
    "multi_label": Field("bool"),
    "validation_fraction": _real(least=0.0, most=math.nextafter(1.0, 0.0)),
    "early_stop_patience": _int(least=1, optional=True),
    "padding_side": Field("text", of=("right", "left")),
    "dtype": Field("text", of=("float32", "bfloat16")),
    "backend": Field("text", of=("auto", "torch", "fused")),
    "model_params": _int(least=1, recommendable=False),
}
STATISTICS: Mapping[str, Field] = {
    "p99_length": _real(least=1, most=LARGEST_STATISTIC, recommendable=False),
    "imbalance_ratio": Field("real", least=1, recommendable=False),
    "minority_count": Field("int", 0, LARGEST_STATISTIC, recommendable=False),
    "sample_count": Field("int", 1, LARGEST_STATISTIC, recommendable=False),
}
FIELDS: Mapping[str, Field] = {**CONFIG, **STATISTICS}


@dataclass(frozen=True)
class Derived:
    """A quantity computed from fields; null where one of `needs` is, or where `compute` gives none. `uses` may be null."""

    needs: tuple[str, ...]
    compute: Callable[..., float | None]
    uses: tuple[str, ...] = ()


def _power_of_two(length: float) -> int:
    return 1 << (math.ceil(length) - 1).bit_length()


def _updates_an_epoch(samples: int, minority: int, batch: int) -> float:
    """Expected steps of an epoch whose batch holds a sample of the minority: (N/b) (1 − C(N−m, b) / C(N, b)), batches being drawn without
    replacement. Very large batches are taken as drawn with replacement, which counts no more steps."""
    batch = min(batch, samples)
    if batch + minority > samples:
        return samples / batch
    draws, others = sorted((batch, minority))
    if draws > _MANY_DRAWS:
        missed = draws * math.log1p(-others / samples)
    else:
        missed = math.fsum(math.log1p(-others / (samples - draw)) for draw in range(draws))
    return samples / batch * -math.expm1(missed)


def _required_epochs(samples: int, minority: int, batch_size: int, accumulation_steps: int) -> int | None:
    """max(2, ceil(100 / updates an epoch)); none for an empty class, which no epoch can heal, and without a batch."""
    if min(minority, batch_size, accumulation_steps) < 1:
        return None
    updates = _updates_an_epoch(samples, minority, batch_size * accumulation_steps)
    return max(2, math.ceil(MINORITY_UPDATES / updates - 1e-9))  # what rounding adds is no epoch


def _qlora_batch(model_params: int | None) -> int:
    """Table 9 of QLoRA: 16 up to 13B and where the size is not known, 32 for 33B, 64 for 65B; between these two, that of the nearer."""
    if model_params is None or model_params <= 13e9:
        return 16
    return 32 if model_params <= 49e9 else 64


def _qlora_batch_size(batch_size: int, model_params: int | None) -> int | None:
    """The largest power of two that is at most the batch size and at most QLoRA's effective batch."""
    return None if batch_size < 1 else 1 << (min(batch_size, _qlora_batch(model_params)).bit_length() - 1)


DERIVED: Mapping[str, Derived] = {
    "effective_batch": Derived(("batch_size", "accumulation_steps"), lambda batch, steps: batch * steps),
    "qlora_batch": Derived((), _qlora_batch, uses=("model_params",)),
    "qlora_batch_size": Derived(("batch_size",), _qlora_batch_size, uses=("model_params",)),
    "p99_power_of_two": Derived(("p99_length",), _power_of_two),
    "required_epochs": Derived(("sample_count", "minority_count", "batch_size", "accumulation_steps"), _required_epochs),
    "model_billions": Derived(("model_params",), lambda parameters: parameters / 1e9),
    "class_weights_count": Derived(("class_weights",), lambda weights: None if isinstance(weights, str) else len(weights)),
}
# Null says both "not given" and "off"; this one tells them apart.
CLIPPING = "clipping_on"
VARIABLES: tuple[str, ...] = (*FIELDS, *DERIVED, CLIPPING)
FUNCTIONS = ("size", "double", "int", "uint", "string", "startsWith", "endsWith", "contains", "matches", "type", "dyn")


class ConfigError(ValueError):
    """A configuration or statistics that cannot be judged: unknown field or wrong type. `field` names the field."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


def checked(field: str, value: Any, *, fields: Mapping[str, Field] = FIELDS) -> Any:
    """The value in the field's own type. ConfigError: unknown field, wrong type, outside the field's limits or choices, NaN."""
    if field not in fields:
        raise ConfigError(field, unknown("field", field, fields))
    spec = fields[field]
    if value is None:
        if spec.optional:
            return None
        raise ConfigError(field, f"is null; expected {_EXPECTED[spec.type]} (leave the field out where it is not known)")
    try:
        converted = _CONVERT[spec.type](value)
    except ValueError as error:
        raise ConfigError(field, str(error)) from None
    if converted is None:
        raise ConfigError(field, f"is {shown(value)}; expected {_EXPECTED[spec.type]}")
    if spec.of and converted not in spec.of:
        raise ConfigError(field, unknown("choice", converted, spec.of))
    if spec.type in ("int", "real"):
        _require_within(field, spec, value)
    return converted


def _require_within(field: str, spec: Field, value: float) -> None:
    if isinstance(value, float) and math.isinf(value) and math.isfinite(spec.most):
        raise ConfigError(field, f"is {shown(value)}; expected a finite number")
    if value < spec.least:
        raise ConfigError(field, f"is {shown(value)}; expected at least {_bound(spec.least)}")
    if value > spec.most:
        bound = "below 1" if math.ceil(spec.most) == 1 else f"at most {_bound(spec.most)}"
        raise ConfigError(field, f"is {shown(value)}; expected {bound}")


def _bound(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def from_double(field: str, value: Any) -> Any:
    """A double that a rule computed, as an integer where the field has integers."""
    whole = isinstance(value, float) and value.is_integer() and field in FIELDS and FIELDS[field].type == "int"
    return int(value) if whole else value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        return None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _targets(value: Any) -> list[str] | None:
    """Names of projections, from a list of them, a text with commas between, or a name of `TARGETS`."""
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        return None
    names = value.split(",") if isinstance(value, str) else list(value)
    if len(names) == 1 and str(names[0]) in TARGETS:
        return list(TARGETS[names[0]])
    for name in names:
        if name not in PROJECTIONS:
            raise ValueError(unknown("projection", name, (*PROJECTIONS, *TARGETS)))
    return names or None


def _weights(value: Any) -> str | list[float] | None:
    """One of `BALANCED`, or finite positive numbers."""
    if isinstance(value, str):
        return value if value in BALANCED else None
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        return None
    numbers = [_number(item) for item in value]
    return None if any(number is None or not 0 < number < math.inf for number in numbers) else numbers  # type: ignore[return-value]


_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "int": _integer,
    "real": _number,
    "bool": lambda value: value if isinstance(value, bool) else None,
    "text": lambda value: value if isinstance(value, str) else None,
    "targets": _targets,
    "weights": _weights,
}
_EXPECTED = {
    "int": "an integer",
    "real": "a number",
    "bool": "true or false",
    "text": "text",
    "targets": f"{', '.join(TARGETS)} or names of projections",
    "weights": f"{', '.join(BALANCED)} or a positive number for each class",
}
SAMPLES: Mapping[str, Any] = {"int": 1, "real": 1.0, "bool": True, "text": "", "targets": [], "weights": []}


def variables(config: Mapping[str, Any], statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Every variable that a rule may name, in its own type; null where nothing is known. ConfigError on values of a wrong kind."""
    values: dict[str, Any] = dict.fromkeys(VARIABLES)
    values.update({name: checked(name, value, fields=CONFIG) for name, value in config.items()})
    values.update({name: checked(name, value, fields=STATISTICS) for name, value in statistics.items()})
    if None not in (counts := (values["minority_count"], values["sample_count"])) and counts[0] > counts[1]:
        raise ConfigError("minority_count", f"is {counts[0]}; expected no more than sample_count, {counts[1]}")
    for name, derived in DERIVED.items():
        needs = [values[need] for need in derived.needs]
        values[name] = None if None in needs else derived.compute(*needs, *(values[use] for use in derived.uses))
    values[CLIPPING] = values["gradient_clip_norm"] is not None if "gradient_clip_norm" in config else None
    return values


def fields_of(names: Iterable[str], optional: bool = False) -> set[str]:
    """The fields that variables of rules are computed from, and with `optional` also those that may be null."""
    found: set[str] = set()
    for name in names:
        derived = DERIVED.get(name, Derived(("gradient_clip_norm",) if name == CLIPPING else (name,), lambda: None))
        found.update(derived.needs, derived.uses if optional else ())
    return found & FIELDS.keys()


def as_double(value: Any) -> Any:
    """A variable as CEL gets it: numbers as doubles."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Field values as (configuration, statistics)."""
    config = {name: value for name, value in values.items() if name not in STATISTICS}
    return config, {name: value for name, value in values.items() if name in STATISTICS}
