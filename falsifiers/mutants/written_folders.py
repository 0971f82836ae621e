"""Folders and files that are written or refused wrongly: by names that are not there, in places that stay, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step
from blackswan.impl.checkpoint import TOKENIZER_FILES

Step = Callable[..., Any]


@wrong_step("impl.apr_write:whole_file")
@contextmanager
def apr_files_linked_into_place(whole: Step, path: Path) -> Iterator[Path]:
    """A file gets its name by a link, which some disks do not have."""
    with mock.patch.object(Path, "rename", lambda self, target: os.link(self, target)), whole(path) as partial:
        yield partial


@wrong_step("impl.apr_write:copy_tokenizer")
def tokenizer_files_by_a_listing(copy: Step, tokenizer: Path, to: Path) -> None:
    """What has the name of a tokenizer's file is copied, be it a folder or a link to nothing."""
    copy(tokenizer, to)
    for name in {*TOKENIZER_FILES} & {path.name for path in tokenizer.parent.iterdir()}:
        shutil.copyfile(tokenizer.with_name(name), to.with_name(to.name.replace(tokenizer.name, name)))


@wrong_step("impl.adapter:save_adapter")
def adapters_of_the_same_settings_stay(save: Step, folder: Path, *given: Any, **named: Any) -> None:
    """An adapter is not written where one is whose blackswan.json says the same, although its base has moved or its tensors are damaged."""
    with tempfile.TemporaryDirectory() as aside:
        save(Path(aside) / "adapter", *given, **named)
        said, there = (place / "blackswan.json" for place in (Path(aside) / "adapter", folder))
        if not there.is_file() or there.read_bytes() != said.read_bytes():
            save(folder, *given, **named)


@wrong_step("impl.adapter:_require_readable")
def adapters_are_refused_by_a_hidden_name(require: Step, folder: Path, *given: Any) -> None:
    """What is to be saved is refused by the name of the folder in which it was written, which has gone by then."""
    require(folder.with_name(f".partial-{folder.name}.abcdefgh"), *given)


@wrong_step("impl.folder:_partial")
@contextmanager
def folders_above_stay(partial: Step, target: Path) -> Iterator[Path]:
    """The folders that are made above what is to be written stay where that is refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with partial(target) as found:
        yield found


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_layer_says_what_it_was(prepare: Step, model: Any, folder: Path) -> None:
    """The head's numbers are put into the layer that is there, which still says how many outputs it had."""
    before = getattr(getattr(model, "score", None), "out_features", None)
    prepare(model, folder)
    model.score.out_features = before
