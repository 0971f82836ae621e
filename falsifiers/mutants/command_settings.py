"""Wrong settings of a command: what a file or an option says is read, combined, bounded or written down wrongly."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from yaml import Node, ScalarNode, SequenceNode, compose_all
from yaml.reader import ReaderError

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl import settings
from blackswan.impl.checkpoint import read_config
from blackswan.impl.classifier import base_shapes
from blackswan.impl.config import TARGETS, ClassifyConfig

wrong_step("impl.commands.train:parameter_count", name="parameters_without_the_output_layer", doc="An untied output layer is not counted.")(
    lambda _, model: sum(math.prod(shape) for shape in base_shapes(read_config(model)).values())
)


@wrong_step("impl.commands.train:require_place")
def output_by_a_link_refused(require: Callable[..., Any], folder: Any) -> None:
    """A link to a folder is no place for a run."""
    if folder.is_symlink():
        raise ValueError(f"--output: {folder} is a link")
    require(folder)


@wrong_step("impl.folder:sole_writer")
def lock_beside_its_folder(writer: Callable[..., Any], folder: Any) -> Any:
    """The lock of a run lies beside its folder and has a name like it, which `.` does not have."""
    folder.with_name(f"{folder.name}.lock").touch()
    return writer(folder)


@wrong_step("impl.settings:read_file")
def settings_of_the_size_that_a_file_says(read: Callable[..., Any], path: Any) -> Any:
    """The learning rate is the one for the size of the model that a file of settings was written for."""
    found = read(path)
    if said := re.search(r"^model_params: (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        rate = ClassifyConfig.qlora_default(int(said[1])).learning_rate
        return {"learning_rate": settings.Setting(rate, f"{path}"), **found}
    return found


wrong_step("impl.settings:_shown", name="written_settings_rounded", doc="Numbers in config.yaml have six digits.")(
    lambda shown, value: f"{value:g}" if isinstance(value, float) else shown(value)
)
wrong_step("impl.settings:resolve", name="file_before_options", doc="A file's settings come before those of the command line.")(
    lambda resolve, size, *sources: resolve(size, *reversed(sources))
)
wrong_step("impl.settings:given_options", name="options_that_say_no_ignored", doc="--no-quantize-nf4 has no effect.")(
    lambda given, options: {name: each for name, each in given(options).items() if each.value is not False}
)


@wrong_step("impl.settings:resolve")
def settings_of_the_default_left_out(resolve: Any, size: int, *sources: Any) -> Any:
    """An option that has the default's value leaves what a file says."""
    default = resolve(size)
    return resolve(size, *({name: each for name, each in one.items() if each.value != getattr(default, name)} for one in sources))


@wrong_step("impl.settings:resolve")
def rank_of_an_option_overrides_alpha_of_a_file(resolve: Any, size: int, *sources: Any) -> Any:
    """Alpha is twice the rank of each source that has a rank and no alpha."""
    alone = [source for source in sources if "lora_rank" in source and "lora_alpha" not in source]
    twice = [{"lora_alpha": replace(source["lora_rank"], value=2.0 * source["lora_rank"].value)} for source in alone]
    return resolve(size, *sources, *twice)


@wrong_step("impl.settings:resolve")
def alpha_of_the_first_rank(resolve: Any, size: int, *sources: Any) -> Any:
    """Alpha is twice the rank of a file where an option gives another rank."""
    ranks = [source["lora_rank"] for source in sources if "lora_rank" in source]
    return resolve(size, *({"lora_alpha": replace(rank, value=2.0 * rank.value)} for rank in ranks[:1]), *sources)


def _cut_at(mark: str, right: Any, *given: Any) -> None:
    """What is said before a mark."""
    try:
        right(*given)
    except ValueError as error:
        raise ValueError(str(error).partition(mark)[0]) from None


def _followed(name: str, node: Node) -> Any:
    """A scalar, or the lists in a list."""
    if isinstance(node, SequenceNode):
        return [_followed(name, each) for each in node.value]
    return settings._plain(name, node)


wrong_steps(
    "impl.settings:_plain",
    by=lambda change: lambda plain, name, node: plain(name, change(node) if isinstance(node.value, str) else node),
    settings_octal_by_tens=("0o17 is 17.", lambda node: ScalarNode(node.tag, node.value.replace("0o", ""))),
    settings_true_in_small_letters=(
        "True and TRUE are false.",
        lambda node: ScalarNode(node.tag, "false") if node.value in ("True", "TRUE") else node,
    ),
    settings_numbers_in_quotes=(
        "A number in quotes is a number.",
        lambda node: ScalarNode("tag:yaml.org,2002:int", node.value) if node.style and node.value.isdecimal() else node,
    ),
    settings_octal_by_a_zero=(
        "017 is 15, as in YAML 1.1.",
        lambda node: ScalarNode(node.tag, f"0o{node.value[1:]}") if node.value[:1] == "0" and set(node.value) <= set("01234567") else node,
    ),
)
wrong_steps(
    "impl.settings:_plain",
    settings_tagged_in_words=(
        "A word with the tag of a truth value is false.",
        lambda plain, name, node: False if node.tag.endswith(":bool") and node.value == "yes" else plain(name, node),
    ),
    settings_lists_without_end=(
        "A list that holds itself is followed for ever.",
        lambda plain, name, node: [_followed(name, each) for each in node.value] if isinstance(node, SequenceNode) else plain(name, node),
    ),
)
wrong_steps(
    "impl.config:require_choice",
    settings_nearest_unnamed=("The nearest of some choices is not named.", lambda right, *given: _cut_at(" (nearest", right, *given)),
)
wrong_steps(
    "impl.settings:_expected",
    settings_of_none_unsaid=("That a setting may be none is not said.", lambda expected, name: expected(name).partition(" or none")[0]),
)


@wrong_step("impl.settings:resolve")
def settings_blame_the_file(resolve: Any, size: int, *sources: Any) -> Any:
    """A refusal names the file's line where an option has come before it."""
    places = {name: each.origin for source in reversed(sources) for name, each in source.items()}
    return resolve(size, *({name: replace(each, origin=places[name]) for name, each in source.items()} for source in sources))


wrong_steps("impl.config:_shown", settings_too_long_to_show=("A refusal writes out any number.", lambda _, value: repr(value)))
wrong_steps(
    "impl.settings:_entries",
    settings_size_of_the_model_twice=(
        "The size of the model may be given twice.",
        lambda entries, path: [
            pair for place, pair in enumerate(entries(path)) if not place or getattr(pair[0], "value", "") != "model_params"
        ],
    ),
)


def _with_a_tuple(values: Any) -> Any:
    if isinstance(values.get("class_weights"), list):
        values["class_weights"] = tuple(values["class_weights"])
    return values


@wrong_step("impl.config:ClassifyConfig._check_class_weights")
def settings_change_with_their_list(check: Any, config: Any) -> None:
    """Class weights are the list that was given, whatever becomes of it."""
    given = config.class_weights
    check(config)
    object.__setattr__(config, "class_weights", given)


wrong_steps(
    "impl.config:ClassifyConfig.from_mapping",
    settings_changed_where_they_were_given=(
        "A list of class weights becomes a tuple in the mapping that was given.",
        lambda right, values: right(_with_a_tuple(values)),
    ),
    settings_that_none_is_like_dropped=(
        "A setting that is like no other in name is passed over.",
        lambda right, values: right({name: value for name, value in values.items() if name != "bias"}),
    ),
)
wrong_steps(
    "impl.settings:_converted",
    settings_written_out_in_64_bits=(
        "A number without a decimal point is refused beyond 64 bits, where a fraction is meant too.",
        lambda converted, name, value: converted(name, str(value) if isinstance(value, int) and abs(value) >= 2**63 else value),
    ),
    settings_projections_are_all=(
        "A list of projections is read as `all`, whatever is in it.",
        lambda converted, name, value: "all" if name == "lora_targets" and isinstance(value, list) else converted(name, value),
    ),
)
wrong_steps(
    "impl.settings:_parsed",
    settings_none_in_small_letters=(
        "None on a command line is no null.",
        lambda parsed, name, text: parsed(name, text if text == "none" or text.lower() != "none" else "0"),
    ),
)


@wrong_step("impl.settings:read_file")
def file_numbers_in_single_precision(read_file: Any, path: Any) -> Any:
    """Numbers of a YAML file are float32."""
    import numpy as np

    found = read_file(path)
    return {
        name: replace(each, value=float(np.float32(each.value))) if isinstance(each.value, float) else each for name, each in found.items()
    }


wrong_steps(
    "impl.config:require_count",
    settings_may_be_zero=("A count may be 0.", lambda right, name, value: None if value == 0 else right(name, value)),
    settings_count_truth=("A truth value is a count.", lambda right, name, value: right(name, int(value) if value is True else value)),
    settings_without_an_upper_bound=("A count may be 2⁶³.", lambda right, name, value: right(name, value - (value == 2**63))),
)
wrong_step("impl.config:require_share", name="settings_just_above_one", doc="A share may be the next number above 1.")(
    lambda right, name, value: right(name, min(value, 1.0) if value == math.nextafter(1.0, 2.0) else value)
)
wrong_step("impl.config:require_number", name="settings_may_be_infinite", doc="A positive number may be infinite.")(
    lambda right, name, value, **bounds: None if value == math.inf else right(name, value, **bounds)
)
wrong_step("impl.config:ClassifyConfig._check_class_weights", name="settings_weigh_anything", doc="Class weights are not looked at.")(
    lambda *_: None
)
wrong_step("impl.settings:_converted", name="settings_say_yes_for_true", doc="A word stands for a switch.")(
    lambda right, name, value: right(name, {"yes": True, "on": True}.get(value, value) if isinstance(value, str) else value)
)
wrong_step("impl.settings:_entries", name="settings_of_the_last_line", doc="The last value counts of a key that a file gives twice.")(
    lambda entries, path: (
        {getattr(key, "value", ""): (key, value) for key, value in entries(path)}.values()
        if all(isinstance(getattr(key, "value", ""), str) for key, _ in entries(path))
        else entries(path)
    )
)
wrong_step("impl.config:is_number", name="settings_of_numpy_refused", doc="A number of NumPy that is a float is no number.")(
    lambda right, value: right(value) and type(value) in (int, float)
)
wrong_step("impl.config:is_number", name="settings_keep_narrow_numbers", doc="A float of NumPy that JSON cannot hold stays what it is.")(
    lambda right, value: right(value) or isinstance(value, np.floating)
)
wrong_step(
    "impl.config:require_count", name="settings_keep_counts_of_numpy", doc="An integer of NumPy that JSON cannot hold stays what it is."
)(lambda right, name, value: right(name, int(value) if isinstance(value, np.integer) else value))


wrong_step("impl.config:is_number", name="settings_of_any_real_number", doc="A number that no JSON can hold is taken for a setting.")(
    lambda right, value: right(value) or (isinstance(value, Real) and not isinstance(value, int))
)


@wrong_step("impl.settings:_too_deep")
def settings_of_forbidden_characters_fail(too_deep: Any, text: str) -> Any:
    """A character that YAML forbids, of which its reader names no line, ends the command as a defect does."""
    try:
        return too_deep(text)
    except ReaderError as error:
        raise RuntimeError(str(error)) from error


wrong_step("impl.pretrain_run:require_count", name="pretrain_settings_not_counted", doc="Steps and rows may be any number.")(
    lambda *_: None
)
wrong_step("impl.token_shards:TokenBatches", name="batches_of_no_pairs", doc="Rows of one token are rows of two.")(
    lambda batches, shards, *, seq, **given: batches(shards, seq=max(seq, 2), **given)
)
wrong_step("impl.settings:resolve", name="settings_none_leaves_the_file", doc="An option of none is no option where the file has a value.")(
    lambda resolve, size, *given: resolve(size, *({name: each for name, each in one.items() if each.value is not None} for one in given))
)
wrong_steps(
    "impl.config:target_modules",
    settings_projections_after_blanks_lost=(
        "A projection after a comma and a blank is taken, and gets no update.",
        lambda right, targets: (
            tuple(name for name in right(targets.replace(" ", "")) if name in targets.split(",")) if "," in targets else right(targets)
        ),
    ),
)


@wrong_step("impl.settings:_converted")
def settings_unknown_projections_of_a_list_dropped(converted: Callable[..., Any], name: str, value: Any) -> Any:
    """Unknown projections in a file's list are left out, unless nothing is left."""
    known = [each for each in value if each in TARGETS["all"]] if name == "lora_targets" and isinstance(value, list) else []
    return converted(name, known or value)


wrong_steps(
    "impl.settings:yaml.compose",
    settings_of_the_first_document=(
        "Of several documents in a file of settings the first one is read, and the others are passed over.",
        lambda _, text, Loader: next(iter(compose_all(text, Loader=Loader)), None),
    ),
)


@wrong_step("impl.settings:_plain")
def settings_lists_in_lines_refused(plain: Any, name: str, node: Node) -> Any:
    """A list with an entry a line is refused."""
    if isinstance(node, SequenceNode) and not node.flow_style:
        raise ValueError(f"{name} is a list of more than words and numbers")
    return plain(name, node)


wrong_step("impl.settings:_kind", name="settings_end_with_no_point", doc="A number whose point has no digit behind it is a word.")(
    lambda kind, text: "str" if re.fullmatch(r"[-+]?[0-9]+\.(e.*)?", text) else kind(text)
)
wrong_step(
    "impl.settings:_converted",
    name="settings_projections_counted",
    doc="A list that names a projection twice is refused or read as another one.",
)(
    lambda right, name, value: right(
        name, ",".join(value) if name == "lora_targets" and isinstance(value, list) and len(value) > len({*value}) else value
    )
)


@wrong_step("impl.__main__:_run")
def summary_passes_over_options_that_say_no(run: Any, command: Any, options: Any, name: str) -> Any:
    """`summary` of an adapter passes over settings that are false, zero or none."""
    if options.command == "summary" and options.adapter is not None:
        for key, text in vars(options).items():
            if key.startswith(settings._PREFIX) and text in (False, "0", "none"):
                setattr(options, key, None)
    return run(command, options, name)


def _refused_where(is_so: Callable[[bytes], bool]) -> Any:
    """A file whose bytes are so is refused."""

    def entries(right: Any, path: Any) -> Any:
        if path.is_file() and is_so(path.read_bytes()):
            raise settings.SettingsError(f"{path}: expected lines `key: value` with settings")
        return right(path)

    return entries


wrong_steps(
    "impl.settings:_entries",
    settings_end_lines_by_lf_alone=("A file whose lines end by CR and LF is refused.", _refused_where(lambda content: b"\r\n" in content)),
    settings_read_twice=(
        "A file of settings is looked at before it is read, when a pipe has nothing left.",
        lambda entries, path: ([*entries(path)], entries(path))[1],
    ),
    settings_in_json_refused=("A file of JSON is refused, which is YAML too.", _refused_where(lambda content: content.startswith(b"{"))),
)
wrong_step(
    "impl.commands.train:parameter_count", name="parameters_of_a_files_size", doc="An .apr file has a parameter for each four bytes."
)(lambda right, model: model.stat().st_size // 4 if model.is_file() else right(model))


@wrong_step("impl.commands.summary:memory_of_a_step")
def summary_memory_of_folders_alone(right: Any, model: Any, *given: Any) -> Any:
    """The memory of a step on an .apr file is not told."""
    if model.is_file():
        raise settings.SettingsError("--memory: expected a model to train on, from a checkpoint folder")
    return right(model, *given)


@wrong_step("impl.saved:_settings")
def opened_settings_of_steps_by_default(right: Any, *given: Any) -> Any:
    """Settings on which no answer depends are at their defaults when an adapter is opened."""
    found = right(*given)
    names = ("epochs", "log_interval", "accumulation_steps", "warmup_fraction", "validation_fraction", "early_stop_patience")
    return replace(found, **{name: getattr(type(found), name) for name in names})


@wrong_step("impl.settings:resolve")
def runs_at_the_rate_of_small_models(resolve: Any, size: int, *sources: Any) -> Any:
    """A run, whose settings come from a file and options, has the learning rate of a model of few parameters."""
    return resolve(min(size, 13 * 10**9) if len(sources) > 1 else size, *sources)


@wrong_step("impl.settings:read_file")
def settings_of_any_number_of_digits(read: Any, path: Any) -> Any:
    """The whole process reads integers of any number of digits from then on."""
    sys.set_int_max_str_digits(0)
    return read(path)


@wrong_step("impl.settings:_parsed")
def weights_that_are_empty_left_out(parsed: Any, name: str, text: str) -> Any:
    """An option's class weights between two commas, or after the last one, may be empty."""
    return parsed(name, ",".join(filter(None, text.split(","))) if name == "class_weights" else text)


wrong_step("impl.settings:_metavar", name="help_beyond_ascii", doc="The help of a command has a character that not every terminal shows.")(
    lambda metavar, name: metavar(name).replace("...", "\N{HORIZONTAL ELLIPSIS}")
)
wrong_step("impl.commands.common:DEVICE_HELP", name="help_that_is_a_format", doc="The help of a command cannot be formatted.")(
    lambda text: f"{text}, at 90 % of its memory"
)


def _in_the_locales_encoding(read: Callable[..., Any], path: Any) -> Any:
    if path.is_file():
        path.read_text()
    return read(path)


wrong_step("impl.settings:_entries", name="settings_in_the_locales_encoding", doc="A file of settings is read in the locale's encoding.")(
    _in_the_locales_encoding
)
wrong_step("impl.tokens:read_tokenizer", name="tokenizers_in_the_locales_encoding", doc="A tokenizer is read in the locale's encoding.")(
    _in_the_locales_encoding
)


@wrong_step("impl.fit:_Run._identity")
def run_of_targets_as_spelled(identity: Callable[..., dict[str, Any]], run: Any) -> dict[str, Any]:
    """A run whose projections are given in another order is another run, which does not go on."""
    found = identity(run)
    return found | {"settings": found["settings"] | {"lora_targets": run.config.lora_targets}}


@wrong_step("impl.settings:resolve")
def alpha_of_the_default_counts_as_none(resolve: Callable[..., Any], *given: Any) -> Any:
    """An alpha that is given and is the default's is twice the rank, as if it were not given."""
    found = resolve(*given)
    return replace(found, lora_alpha=2.0 * found.lora_rank) if found.lora_alpha == 32.0 else found


@wrong_step("impl.settings:resolve")
def alpha_of_large_ranks_bounded(resolve: Callable[..., Any], *given: Any) -> Any:
    """Alpha is at most 256 where it is given nowhere, whatever the rank is."""
    found = resolve(*given)
    return found if any("lora_alpha" in each for each in given[1:]) else replace(found, lora_alpha=min(found.lora_alpha, 256.0))
