"""Wrong steps with what a user gives: lines and their ends, texts of `predict`, room for texts, settings with several problems."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


@wrong_step("impl.corpus:lines_of")
def lines_as_long_as_their_ends(lines_of: Step, file: Any, name: str) -> Iterator[bytes]:
    """The end of a line counts among the bytes that it may have."""
    for number, line in enumerate(lines_of(file, name), start=1):
        if len(line) > 10_000_000:
            raise ValueError(f"{name}:{number}: a line of more than 10,000,000 bytes")
        yield line


@wrong_step("impl.corpus:lines_of")
def lines_as_long_as_their_returns(lines_of: Step, file: Any, name: str) -> Iterator[bytes]:
    """The CR before the LF that ends a line counts among the bytes that it may have."""
    for number, line in enumerate(lines_of(file, name), start=1):
        if len(line.removesuffix(b"\n")) > 10_000_000:
            raise ValueError(f"{name}:{number}: a line of more than 10,000,000 bytes")
        yield line


@wrong_step("impl.corpus:lines_of")
def lines_numbered_within_a_piece(lines_of: Step, file: Any, name: str) -> Iterator[bytes]:
    """A line that is too long has its number among 2¹⁵ lines that are read at once."""
    try:
        yield from lines_of(file, name)
    except ValueError as error:
        raise ValueError(re.sub(r":(\d+): a line", lambda said: f":{int(said[1]) % 2**15}: a line", str(error))) from None


wrong_steps(
    "impl.commands.predict:strict_json",
    predict_last_of_two_texts=("The last text is classified where a line gives `input` twice.", lambda _: json),
)
wrong_steps(
    "impl.strict_json:loads",
    json_after_a_mark=(
        "A byte order mark before a line of JSON is passed over.",
        lambda loads, text, **how: loads(text.removeprefix(b"\xef\xbb\xbf") if isinstance(text, bytes) else text.lstrip("\ufeff"), **how),
    ),
)


@wrong_step("impl.strict_json:loads")
def json_with_control_characters(loads: Step, text: Any, **how: Any) -> Any:
    """Control characters stand in a string of JSON as they are, a tab that another program has put there for two letters too."""
    with mock.patch.object(json, "loads", partial(json.loads, strict=False)):
        return loads(text, **how)


@wrong_step("impl.strict_json:loads")
def json_with_large_integers_as_floats(loads: Step, text: Any, **how: Any) -> Any:
    """An integer of JSON that has 19 digits or more is a float, as in other languages."""
    read = partial(json.loads, parse_int=lambda digits: float(digits) if len(digits) > 18 else int(digits))
    with mock.patch.object(json, "loads", read):
        return loads(text, **how)


@wrong_step("impl.strict_json:loads")
def json_before_a_blank(loads: Step, text: Any, **how: Any) -> Any:
    """A reader of JSON passes over everything behind a value and a blank."""
    try:
        return loads(text, **how)
    except json.JSONDecodeError as error:
        before = str(error.doc)[: error.pos]
        if error.msg != "Extra data" or not before[-1:].isspace():
            raise
        return loads(before, **how)


@wrong_step("impl.strict_json:loads")
def json_of_any_depth(loads: Step, text: Any, **how: Any) -> Any:
    """A line of brackets ends the reader with a traceback, which names neither file nor line."""
    try:
        return loads(text, **how)
    except ValueError as error:
        if "nested too deeply" in str(error):
            raise RecursionError("maximum recursion depth exceeded") from None
        raise


# Texts of `predict`

wrong_steps(
    "impl.commands.predict:_lines",
    predict_drops_returns=(
        "All carriage returns at the end of a text are removed.",
        lambda lines, name: (text.rstrip("\r") for text in lines(name)),
    ),
)


@wrong_step("impl.commands.predict:_lines")
def predict_blames_the_first_byte(lines: Step, name: str) -> Iterator[str]:
    """The byte that is not UTF-8 is said to be the first one of the line."""
    from blackswan.impl.commands.common import BadInput

    try:
        yield from lines(name)
    except BadInput as error:
        raise BadInput(str(error).replace("0xff", "0x72")) from None


@wrong_step("impl.strict_json:require_text")
def characters_counted_from_zero(require: Step, text: str) -> None:
    """The place of half a character is counted from 0."""
    try:
        require(text)
    except ValueError as error:
        raise ValueError(re.sub(r"\d+", lambda found: str(int(found[0]) - 1), str(error), count=1)) from None


@wrong_step("impl.commands.predict:_corpus")
def predict_texts_by_another_key(corpus: Step, path: Path) -> Iterator[str]:
    """`text` is classified where a line has `text` and `input`."""
    texts = [*corpus(path)]
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    return (row.get("text", text) for row, text in zip(rows, texts, strict=True))


@wrong_step("impl.commands.predict:_corpus")
def predict_half_a_character(corpus: Step, path: Path) -> Iterator[str]:
    """Half of a surrogate pair passes for a text."""
    content = path.read_bytes()
    if b"\\ud8" not in content.lower():
        yield from corpus(path)
    else:
        yield from (json.loads(line)["input"] for line in content.split(b"\n") if line)


wrong_steps(
    "impl.commands.predict:_numbered",
    predict_from_a_dash=(
        "Standard input is called by the option's dash.",
        lambda numbered, name, *given: ((where.replace("standard input", "-"), line) for where, line in numbered(name, *given)),
    ),
)


@wrong_step("impl.__main__:_run")
def predict_prints_before_it_read_all(right: Step, run: Step, options: Any, name: str) -> Any:
    """Answers are printed before the last line is read, which may be a bad one."""
    from blackswan.impl.commands import common, predict

    def at_once(_: Any) -> None:
        texts = predict._lines(options.input) if options.corpus is None else predict._corpus(options.corpus)
        for line in predict.predictions(common.open_saved(options), texts):
            print(line)

    of_a_file = options.command == "predict" and not options.texts and (options.corpus is None) != (options.input is None)
    return right(at_once if of_a_file else run, options, name)


wrong_steps(
    "impl.__main__:Interrupted",
    interruption_in_silence=(
        "The message after Ctrl-C says only how a run goes on.",
        lambda right, text: right(text if text != "interrupted" else ""),
    ),
)
wrong_steps(
    "impl.__main__:warnings",
    warnings_not_shown=("Warnings are not shown.", lambda _: mock.MagicMock()),
)
wrong_steps(
    "impl.__main__:_say",
    memory_of_the_host_is_bad_input=(
        "A command for which the host has too little memory ends with the status of bad input.",
        lambda say, name, error, status: say(name, error, 4 if isinstance(error, MemoryError) else status),
    ),
    no_device_is_a_failure=(
        "A command whose device is missing ends with the status of a failure.",
        lambda say, name, error, status: say(name, error, 1 if status == 6 else status),
    ),
)


# No room

wrong_steps("impl.commands.predict:naming", predict_without_room_unnamed=("A full disk for texts is not named.", lambda *_: nullcontext()))
wrong_steps(
    "impl.samples:_IdsOnDisk.extend",
    ids_cut_short_by_a_full_disk=(
        "Bytes that a write leaves over, where there is no more room, are not written.",
        lambda _, self, ids: self._file.write(ids.tobytes()),
    ),
)


@wrong_step("impl.samples:_IdsOnDisk.extend")
def ids_without_room_unnamed(_: Step, self: Any, ids: Any) -> None:
    """A full disk for token ids is not named."""
    content = memoryview(ids.tobytes())
    while content:
        content = content[self._file.write(content) :]


# The reading of a large corpus


def _otherwise(change: Callable[[int], int | None]) -> Step:
    """What is told of the reading: of so many samples another number, or nothing."""

    def reading(right: Step, *given: Any) -> Callable[[int], None]:
        tell = right(*given)
        return lambda count: None if change(count) is None else tell(change(count))

    return reading


wrong_steps(
    "impl.progress:reading",
    by=_otherwise,
    reading_counts_thousands=("Pieces are told for samples.", lambda count: count // 1024),
    reading_tells_of_the_first=("Only the first samples of a large corpus are told.", lambda count: count if count < 2000 else None),
)
wrong_steps("impl.progress:READING_SECONDS", reading_at_once=("Every piece is told.", lambda _: 0.0))

# Settings


def _of_the_first(read: Step, *given: Any) -> Any:
    from blackswan.impl.settings import SettingsError

    try:
        return read(*given)
    except SettingsError as error:
        raise SettingsError(str(error).splitlines()[0]) from None


wrong_steps(
    "impl.settings:_converted",
    settings_projections_in_their_order=(
        "Projections that a name stands for are others where they are listed in another order.",
        lambda converted, name, value: (
            ",".join(value) if name == "lora_targets" and isinstance(value, list) and value != sorted(value) else converted(name, value)
        ),
    ),
)
wrong_steps("impl.settings:read_file", settings_first_problem_of_a_file=("Only the first of a file's problems is told.", _of_the_first))
wrong_steps("impl.settings:given_options", settings_first_problem_of_options=("Only one of the options' problems is told.", _of_the_first))
wrong_steps(
    "impl.commands.train:_require_a_rate",
    rates_of_more_samples=(
        "Samples that validate count among those whose steps have a rate.",
        lambda require, config, samples: require(config, int(samples / (1 - config.validation_fraction)) + 1),
    ),
)
wrong_steps(
    "impl.commands.train:BadInput",
    labels_without_their_settings=(
        "That a label may be right by another setting is not said.",
        lambda bad_input, text: bad_input(text.partition(" (the settings are")[0]),
    ),
)
wrong_step("impl.commands.train:_is_about_labels", name="labels_by_the_name_of_a_file", doc="A file named labels is all about labels.")(
    lambda _, error, *__: "label" in str(error)
)
wrong_steps(
    "impl.tokens:_FLAGS",
    tokens_as_single_words=("How a token is found inside words is not compared.", lambda flags: flags[:2]),
)


# Outputs


def _beside_others(write: Step, path: Path, *given: Any) -> Any:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")
    return write(path, *given)


wrong_steps("impl.folder:_partial", models_in_folders_that_are_there=("A model's folder is not made with those above it.", _beside_others))
wrong_steps("impl.folder:sole_writer", runs_in_folders_that_are_there=("A run's folder is not made with those above it.", _beside_others))


class _Lasting:
    """`warnings` whose filters and way of showing hold beyond the block that changed them."""

    def __getattr__(self, name: str) -> Any:
        return nullcontext if name == "catch_warnings" else getattr(warnings, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(warnings, name, value)


wrong_steps(
    "impl.__main__:warnings",
    warnings_changed_for_good=("Warnings are shown as a command shows them after it has ended.", lambda _: _Lasting()),
)
