"""Settings of a run: defaults, under a YAML file, under command-line options; a problem names its file and line, or its option.

Options are generated from the fields of `ClassifyConfig`, so that a field cannot be left out.
"""

import argparse
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from blackswan.impl.config import (
    BACKENDS,
    BALANCED,
    DTYPES,
    LARGEST,
    PADDING_SIDES,
    POOLINGS,
    SCHEDULES,
    TARGETS,
    ClassifyConfig,
    target_modules,
)

HELP: Mapping[str, str] = {
    "num_classes": "number of classes",
    "lora_rank": "rank of the low-rank updates",
    "lora_alpha": "updates are scaled by alpha / rank; twice the rank unless given",
    "lora_targets": f"projections that get an update: {', '.join(TARGETS)}, or names with commas between",
    "learning_rate": "peak learning rate",
    "epochs": "passes over the training samples",
    "max_seq_len": "longest sample in tokens; the end of a longer one is cut off",
    "log_interval": "steps between two lines of progress",
    "batch_size": "samples in one forward and backward pass",
    "accumulation_steps": "passes for each optimiser step",
    "gradient_clip_norm": "largest global norm of the gradient; none: no clipping",
    "class_weights": "one weight a class, used as it is; balanced: N / (K n) of n training samples of the class, mean 1 over the samples; "
    "balanced_over_classes: as inverse to n, mean 1 over the classes; none: all alike",
    "quantize_nf4": "NF4 base weights",
    "double_quantize": "8 bits instead of 32 for the absmax of each block of 64 NF4 weights (QLoRA's double quantisation); "
    "saves 0.37 bits a weight, and steps are made by automatic differentiation",
    "warmup_fraction": "share of the steps in which the learning rate rises",
    "weight_decay": "decoupled weight decay",
    "schedule": "learning rate after the warm-up",
    "pooling": "what the head reads",
    "seed": "of the start values, of the order of samples and of the validation split",
    "multi_label": "several classes a sample (binary cross-entropy)",
    "validation_fraction": "share of the corpus kept for validation where no validation corpus is given; 0: none",
    "early_stop_patience": "epochs without a better validation loss after which training stops; none: never",
    "padding_side": "side on which shorter samples are padded",
    "dtype": "type of base weights and activations",
    "backend": "what makes the steps; auto: hand-written layers on a GPU with Triton, else automatic differentiation",
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "pooling": POOLINGS,
    "padding_side": PADDING_SIDES,
    "dtype": DTYPES,
    "backend": BACKENDS,
}
DERIVED = "model_params"  # of the hyperparameter rules; here the model itself says it
_PREFIX = "setting "
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_DEEPEST = 3
_LONGEST = 1000
"""Digits of a number: more than any setting has, and less than what Python reads as an integer."""


class _Loader(_BASE):  # type: ignore[misc]  # the C one where it was built
    """The core schema of YAML 1.2: `1e-5` is a number; `on`, `yes`, `1_000`, `1:30` and dates are text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  # PyYAML's own attribute


_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


class SettingsError(ValueError):
    """Settings that cannot be used; the message has a line for each problem."""


@dataclass(frozen=True)
class Setting:
    """A value, and the file and line or the option that gave it."""

    value: Any
    origin: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """One option for every field of ClassifyConfig, e.g. `--lora-rank N`; those that are given are read by `given_options`."""
    group = parser.add_argument_group("settings", "without an option or a --config file: the QLoRA settings for a model of that size")
    for field in dataclasses.fields(ClassifyConfig):
        destination, shown, option = _PREFIX + field.name, HELP[field.name].replace("%", "%%"), _option(field.name)
        if _kinds(field.name) == {bool}:
            group.add_argument(option, dest=destination, action=argparse.BooleanOptionalAction, default=None, help=shown)
        else:
            group.add_argument(option, dest=destination, metavar=_metavar(field.name), help=shown)


def given_options(options: argparse.Namespace) -> dict[str, Setting]:
    """The settings that stand on the command line. Raises a SettingsError that names the option."""
    found, problems = {}, []
    for name, text in ((key.removeprefix(_PREFIX), value) for key, value in vars(options).items() if key.startswith(_PREFIX)):
        if text is not None:
            try:
                found[name] = Setting(_converted(name, _parsed(name, text) if isinstance(text, str) else text), _option(name))
            except ValueError as error:
                problems.append(f"{_option(name)}: {error}")
    if problems:
        raise SettingsError("\n".join(problems))
    return found


def read_file(path: Path) -> dict[str, Setting]:
    """The settings in a YAML file. Raises a SettingsError with every problem's file, line and key, or with why there is no such file."""
    found: dict[str, Setting] = {}
    lines: dict[str, int] = {}
    problems = []
    for key, value in _entries(path):
        name, line = str(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping", key.start_mark.line + 1
        try:
            if name in lines:
                raise ValueError(f"{name} is given twice, first in line {lines[name]}")
            lines[name] = line
            if name != DERIVED:
                _require_known(name)
                found[name] = Setting(_converted(name, _plain(name, value)), f"{path}:{line}")
        except ValueError as error:
            problems.append(f"{path}:{line}: {error}")
    if problems:
        raise SettingsError("\n".join(problems))
    return found


def resolve(model_params: int, *sources: Mapping[str, Setting]) -> ClassifyConfig:
    """The QLoRA settings for a model of that size, changed by each source in turn. Raises a SettingsError that says which source errs."""
    given = {name: setting for source in sources for name, setting in source.items()}
    values = {name: setting.value for name, setting in given.items()}
    if "lora_rank" in values and "lora_alpha" not in values:  # the rule is alpha = 2 · rank, not a number
        values["lora_alpha"] = 2.0 * min(values["lora_rank"], LARGEST)  # a larger rank, which may be more than any float, is refused
    try:
        return dataclasses.replace(ClassifyConfig.qlora_default(model_params), **values)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        raise SettingsError(f"{given[name].origin}: {error}" if name in given else str(error)) from None


def written(config: ClassifyConfig, model_params: int) -> str:
    """A YAML file of all settings, which `read_file` and `python -m contracts check` read."""
    values = dataclasses.asdict(config) | {"lora_targets": list(target_modules(config.lora_targets)), DERIVED: model_params}
    if isinstance(config.class_weights, tuple):
        values["class_weights"] = list(config.class_weights)
    return "".join(f"{name}: {_shown(value)}\n" for name, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def _kinds(name: str) -> frozenset[Any]:
    """The types of a field, `tuple` for a tuple of numbers."""
    hint = typing.get_type_hints(ClassifyConfig)[name]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return frozenset(typing.get_origin(part) or part for part in parts)


def _metavar(name: str) -> str:
    if name in CHOICES:
        return "|".join(CHOICES[name])
    if name == "lora_targets":
        return "NAME[,NAME...]"
    kinds = _kinds(name)
    if tuple in kinds:
        return "balanced|balanced_over_classes|W1,W2,...|none"
    return ("N" if int in kinds else "X") + ("|none" if types.NoneType in kinds else "")


def _require_known(name: Any) -> None:
    names = [field.name for field in dataclasses.fields(ClassifyConfig)]
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        raise ValueError(f"no setting is named {name!r}; " + (f"the nearest is {near[0]!r}" if near else f"there are {', '.join(names)}"))


def _parsed(name: str, text: str) -> Any:
    """A command line's text as the value that YAML would have, with `none` for null and commas for a list."""
    kinds = _kinds(name)
    if kinds == {str}:
        return text
    if tuple in kinds and ("," in text):
        return [_scalar(name, part.strip()) for part in text.split(",")]
    return None if text.lower() == "none" else _scalar(name, text) if text else text  # nothing is no value, not even that for none


def _scalar(name: str, text: str) -> Any:
    return _plain(name, yaml.ScalarNode(f"{_TAG}{_kind(text)}", text))


def _kind(text: str) -> str:
    """What a text without quotes is in YAML: `null`, `bool`, `int`, `float` or `str`."""
    return str(_Loader("").resolve(yaml.ScalarNode, text, (True, False))).removeprefix(_TAG)


def _converted(name: str, value: Any) -> Any:
    """The value in the field's own type. Raises a ValueError that says what was expected."""
    kinds = _kinds(name)
    if name == "lora_targets" and isinstance(value, list):
        listed = set(map(str, value))
        value = next((group for group, members in TARGETS.items() if set(members) == listed), ",".join(map(str, value)))
    if tuple in kinds and isinstance(value, list) and all(_is_number(entry) for entry in value):
        return tuple(float(entry) for entry in value)
    if float in kinds and _is_number(value):
        return float(value)
    if type(value) in kinds:
        return value
    raise ValueError(f"{name} is {value!r}; expected {_expected(name)}")


def _expected(name: str) -> str:
    if name in CHOICES:
        return f"one of {', '.join(CHOICES[name])}"
    if name == "lora_targets":
        return f"{', '.join(TARGETS)}, or names of projections"
    words = {tuple: "a list of numbers", float: "a number", int: "an integer", bool: "true or false", str: " or ".join(BALANCED)}
    kinds = _kinds(name)
    expected = [word for kind, word in words.items() if kind in kinds]
    return " or ".join([*expected, "none (null in a file)"] if types.NoneType in kinds else expected)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; which ones are computed with, ClassifyConfig says."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300)


def _entries(path: Path) -> Iterable[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of the one mapping in a YAML file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        root = None if _too_deep(text) else yaml.compose(text, Loader=_Loader)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8 ({error})") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}; expected a YAML file of settings") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SettingsError(f"{path}:{mark.line + 1 if mark else 1}: is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path}: expected lines `key: value` with settings, e.g. `learning_rate: 2e-4`")
    nodes: Iterable[tuple[yaml.Node, yaml.Node]] = root.value
    return nodes


def _too_deep(text: str) -> bool:
    """Whether a text is nested more deeply than settings are: the composer is recursive, ten thousand brackets would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            return True
    return False


def _plain(name: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [_plain(name, item) for item in node.value]
    if not isinstance(node, yaml.ScalarNode):  # a list that holds itself, by an alias, has no end
        what = "a list of more than words and numbers" if isinstance(node, yaml.SequenceNode) else "a mapping"
        raise ValueError(f"{name} is {what}; expected {_expected(name)}")
    value, kind = node.value, node.tag.removeprefix(_TAG)
    if kind not in ("null", "bool", "int", "float"):
        return value
    if (own := _kind(value)) != kind and (own, kind) != ("int", "float"):
        raise ValueError(f"{name} is {value!r}, which is no {kind}; expected {_expected(name)}")
    if own == "int" and len(value) > _LONGEST:
        raise ValueError(f"{name} is a number of {len(value):,} digits; expected {_expected(name)}")
    if own == "int":
        return int(value, 0) if value.startswith(("0x", "0o")) else int(value)
    if own == "float":
        return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return None if own == "null" else value.lower() == "true"
