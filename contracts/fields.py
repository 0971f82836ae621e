"""The variables of hyperparameter rules: configuration fields, data statistics, and quantities derived from both.

Rules are written in CEL, which has neither coercion nor ceil, max or powers: every number is a double there, and what needs more than the
four operations of arithmetic is derived here. A field that is not given is null, and so is everything that is derived from it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from blackswan.contracts.problems import unknown
from blackswan.contracts.schema import shown

TARGET_BATCH = 16
MINORITY_UPDATES = 100


@dataclass(frozen=True)
class Field:
    """A configuration field or statistic: int, real, bool, text, texts or reals; numbers from `least` on; null where `optional`."""

    type: str
    least: float = -math.inf
    optional: bool = False
    recommendable: bool = True


CONFIG: Mapping[str, Field] = {
    "num_classes": Field("int"),
    "lora_rank": Field("int"),
    "lora_alpha": Field("real"),
    "learning_rate": Field("real"),
    "epochs": Field("int"),
    "max_seq_len": Field("int"),
    "log_interval": Field("int"),
    "batch_size": Field("int"),
    "accumulation_steps": Field("int"),
    "gradient_clip_norm": Field("real", optional=True),
    "class_weights": Field("reals", optional=True),
    "quantize_nf4": Field("bool"),
    "warmup_fraction": Field("real"),
    "weight_decay": Field("real"),
    "lora_targets": Field("texts"),
    "pooling": Field("text"),
    "schedule": Field("text"),
    "seed": Field("int"),
    "multi_label": Field("bool"),
    "validation_fraction": Field("real"),
    "early_stop_patience": Field("int", optional=True),
    "padding_side": Field("text"),
    "dtype": Field("text"),
    "engine": Field("text"),
    "model_params": Field("int", least=1, recommendable=False),
}
STATISTICS: Mapping[str, Field] = {
    "p99_length": Field("real", least=1, recommendable=False),
    "imbalance_ratio": Field("real", least=1, recommendable=False),
    "minority_count": Field("int", least=0, recommendable=False),
}
FIELDS: Mapping[str, Field] = {**CONFIG, **STATISTICS}


@dataclass(frozen=True)
class Derived:
    """A quantity computed from fields; null where one of them is, or where `compute` gives none."""

    needs: tuple[str, ...]
    compute: Callable[..., float | None]


def _power_of_two(length: float) -> int:
    return 1 << (math.ceil(length) - 1).bit_length()


def _required_epochs(minority_count: int, batch_size: int, accumulation_steps: int) -> int | None:
    """max(2, ceil(100 / (minority count / effective batch))), in integers; none for an empty class, which no epoch can heal."""
    if minority_count == 0:
        return None
    return max(2, math.ceil(Fraction(MINORITY_UPDATES * batch_size * accumulation_steps, minority_count)))


def _batch_divisor_of_16(batch_size: int) -> int | None:
    """The largest divisor of 16 that is at most the batch size."""
    return max((divisor for divisor in (1, 2, 4, 8, 16) if divisor <= batch_size), default=None)


DERIVED: Mapping[str, Derived] = {
    "effective_batch": Derived(("batch_size", "accumulation_steps"), lambda batch, steps: batch * steps),
    "batch_divisor_of_16": Derived(("batch_size",), _batch_divisor_of_16),
    "p99_power_of_two": Derived(("p99_length",), _power_of_two),
    "required_epochs": Derived(("minority_count", "batch_size", "accumulation_steps"), _required_epochs),
    "model_billions": Derived(("model_params",), lambda parameters: parameters / 1e9),
    "class_weights_count": Derived(("class_weights",), len),
    "class_weights_sum": Derived(("class_weights",), math.fsum),
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
    """The value in the field's own type. ConfigError: unknown field, wrong type, below the least possible value, NaN."""
    if field not in fields:
        raise ConfigError(field, unknown("field", field, fields))
    spec = fields[field]
    if value is None:
        if spec.optional:
            return None
        raise ConfigError(field, f"is null; expected {_EXPECTED[spec.type]} (leave the field out where it is not known)")
    converted = _CONVERT[spec.type](value)
    if converted is None:
        raise ConfigError(field, f"is {shown(value)}; expected {_EXPECTED[spec.type]}")
    if spec.type in ("int", "real") and converted < spec.least:
        raise ConfigError(field, f"is {shown(value)}; expected at least {spec.least:g}")
    return converted


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        return None


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(value) if number is not None and math.isfinite(number) and number == int(value) else None


def _list(value: Any, convert: Callable[[Any], Any]) -> list[Any] | None:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return None
    converted = [convert(item) for item in value]
    return None if None in converted else converted


_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "int": _integer,
    "real": _number,
    "bool": lambda value: value if isinstance(value, bool) else None,
    "text": lambda value: value if isinstance(value, str) else None,
    "texts": lambda value: _list(value, lambda item: item if isinstance(item, str) else None),
    "reals": lambda value: _list(value, _number),
}
_EXPECTED = {
    "int": "an integer",
    "real": "a number",
    "bool": "true or false",
    "text": "text",
    "texts": "a list of texts",
    "reals": "a list of numbers",
}
SAMPLES: Mapping[str, Any] = {"int": 1, "real": 1.0, "bool": True, "text": "", "texts": [], "reals": []}


def variables(config: Mapping[str, Any], statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Every variable that a rule may name, in its own type; null where nothing is known. ConfigError on values of a wrong kind."""
    values: dict[str, Any] = dict.fromkeys(VARIABLES)
    values.update({name: checked(name, value, fields=CONFIG) for name, value in config.items()})
    values.update({name: checked(name, value, fields=STATISTICS) for name, value in statistics.items()})
    for name, derived in DERIVED.items():
        needs = [values[need] for need in derived.needs]
        values[name] = None if None in needs else derived.compute(*needs)
    values[CLIPPING] = values["gradient_clip_norm"] is not None if "gradient_clip_norm" in config else None
    return values


def as_double(value: Any) -> Any:
    """A variable as CEL gets it: numbers as doubles."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Field values as (configuration, statistics)."""
    config = {name: value for name, value in values.items() if name not in STATISTICS}
    return config, {name: value for name, value in values.items() if name in STATISTICS}
