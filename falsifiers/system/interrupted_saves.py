"""Saves of an adapter that are killed, find no room or share a folder with others: a whole adapter is left, the old or the new one."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PREFIX,
    WEIGHTS,
    Model,
    generated,
)
from blackswan.falsifiers.system.adapters import saved
from blackswan.falsifiers.system.same import content, same, same_tensors
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.table import Array

LONG = "adapter".ljust(255, "s")
"""A name as long as file systems take."""
NAMES = ("adapter".ljust(131, "\u00e9"), LONG[:233], LONG[:234], LONG)
"""Names as long, one of letters of two bytes, and two of which the names of parts are about as long as that."""
STEPS = 14
"""The number of steps in the file system at each of which a save is killed; `impl` takes 12."""
OF_A_CHECKPOINT = (
    *(f"{WEIGHTS}.index.json", "model-00001-of-00001.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("pytorch_model-00001-of-00001.bin", "model.apr", "model.Q4_K_M.gguf"),
)
"""Names of files by which a folder holds a checkpoint, or what is left of one, whatever else is there."""
RENAMES = 4
"""So many more it may take where the system cannot exchange two names."""


@reads_files
def interrupted_save_leaves_a_whole_adapter(trial: Trial) -> Iterator[Comparison]:
    """A save over an adapter that is killed at any step leaves the old one or the new one; without room on disk it leaves the old one.
    Either of them is there again when the next save begins, though that fails, where two names cannot be exchanged; its name has a dot.

    Every file of the new adapter differs from the old one's.
    """
    rng = trial.rng("interruption")
    model = generated(rng, trial.seed, "float32")
    changed = {name: value + np.float32(1.0) for name, value in model.trainable.items()}
    settings = replace(model.settings, alpha=2 * model.settings.alpha, pooling="last" if model.settings.pooling == "mean" else "mean")
    with saved(trial, model) as folder:
        base, adapter, old = folder / "base", folder / "adapter", content(folder / "adapter")
        yield from _on_the_disk(trial.files.flushed_save(folder / "wanted", base, settings, changed), content(folder / "wanted"))
        yield from _others_are_left(trial, model, folder)
        wanted, size = content(folder / "wanted"), len(old[ADAPTER_WEIGHTS])
        for limit in (0, int(rng.integers(1, size))):
            said = trial.files.interrupted_save(adapter, base, settings, changed, limit=limit)
            yield _whole(f"files limited to {limit} of {size} bytes", content(adapter), [old])
            if not re.match(f"OSError: .*{re.escape(str(adapter))}", said):
                yield broken("error of a disk that takes no more", "names no folder", f"OSError: … {adapter}", said)
            hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
            yield from same("what a failed save leaves beside", [], hidden)
        for step in range(STEPS):
            trial.files.interrupted_save(adapter, base, settings, changed, step=step)
            yield _whole(f"killed at step {step}", content(adapter), [old, wanted])
        dotted = adapter.rename(folder / "adapter-v1.5")
        save = partial(trial.files.interrupted_save, dotted, base, settings, changed)
        for step in range(STEPS + RENAMES):
            save(step=step, exchange=0)
            save(limit=0)
            yield _whole(f"killed at step {step} without an exchange, and the next save failed", content(dotted), [old, wanted])


def _on_the_disk(flushed: list[str], files: Mapping[str, bytes]) -> list[Comparison]:
    """Every file of a new folder was flushed, and last the folder around it, which holds its name."""
    missing = sorted(files.keys() - {Path(name).name for name in flushed})
    return same("files that were not flushed", [], missing) + same("flushed at last", ".", flushed[-1] if flushed else "")


def _others_are_left(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """What another process still writes beside an adapter is left alone, and what one left half done goes, and nothing that has a name
    much like it; a folder that is no adapter is not written over."""
    half, other = folder / ".partial-again [1].abcdefgh", folder / "other"
    alike = [folder / name for name in ("my.partial-again [1].abcdefgh", "partial-again [1].a", "again [1].partial-a")]
    for each in (half, other, *alike[1:]):
        each.mkdir()
        (each / "file").write_text("x")
    alike[0].write_text("x")
    save = partial(trial.files.save_adapter, base=folder / "base", settings=model.settings, tensors=model.trainable)
    handle = os.open(half, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        save(folder / "again [1]")
        found = same("what another process writes", {"file": b"x"}, content(half))
    finally:
        os.close(handle)
    save(folder / "again [1]")
    found += same("what was left half done", {}, content(half))
    found += same("what has a name much like it", [], [each.name for each in alike if not each.exists()])
    found += _not_an_adapter(trial, model, folder)
    found += _in_the_place_of_others(trial, model, folder)
    return found + _through_a_link(trial, model, folder) + _without_exchange(trial, model, folder)


def _not_an_adapter(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """Tensors that are not all of the adaptation's, or more, or of other shapes, and an adaptation without targets are not saved."""
    place, name = folder / "again [1]", str(trial.rng("not an adapter").choice(sorted(model.trainable)))
    before, value = content(place), model.trainable[name]
    kinds: dict[str, tuple[Mapping[str, Array], str, str]] = {
        "one less": ({key: each for key, each in model.trainable.items() if key != name}, model.settings.targets, re.escape(name)),
        "one more": (model.trainable | {"score.surplus": value}, model.settings.targets, "surplus"),
        "one of another shape": (model.trainable | {name: value[None]}, model.settings.targets, f"{re.escape(name)}.*shape"),
        "turned": (model.trainable | {"score.weight": model.trainable["score.weight"].T}, model.settings.targets, "score.*shape"),
        "no targets": ({key: each for key, each in model.trainable.items() if key.startswith("score.")}, "", "no targets"),
    }
    found = []
    for kind, (tensors, targets, message) in kinds.items():
        save = partial(trial.files.save_adapter, place, folder / "base", replace(model.settings, targets=targets), tensors)
        found.append(trial.refuses(f"an adapter with {kind}", save, message, "ValueError"))
    return found + same("what a refused save leaves", before, content(place))


def _in_the_place_of_others(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """An adapter takes the place of an adapter alone, PEFT's own among them; a merged model that is whole takes nobody's."""
    (empty := folder / "empty").mkdir()
    (folder / "a file").write_text("x")
    trial.files.merge(folder / "again [1]", folder / "base", folder / "merged")
    save = partial(trial.files.save_adapter, base=folder / "base", settings=model.settings, tensors=model.trainable)
    merge, found = partial(trial.files.merge, folder / "again [1]", folder / "base"), []
    peft = model.write_peft(folder / "peft")
    mixed = Path(shutil.copytree(folder / "base", folder / "mixed"))
    shutil.copytree(peft, mixed, dirs_exist_ok=True)
    others = [folder / "other", empty, folder / "a file", folder / "base", folder / "merged", mixed]
    for name in OF_A_CHECKPOINT:
        others.append(Path(shutil.copytree(mixed, folder / f"of {name}")))
        (others[-1] / WEIGHTS).rename(others[-1] / name)
    for place in (*others, peft, folder / "again [1]"):
        before = _bytes_of(place)
        for name, write in (("a merged model", merge), ("an adapter", save)):
            if name == "an adapter" and place.name in ("peft", "again [1]"):
                continue
            message = re.escape(place.name)
            found.append(trial.refuses(f"{name} over {place.name}", partial(write, place), message, "FileExistsError"))
            found += same(f"{place.name}, after {name} was refused", before, _bytes_of(place))
    save(peft)
    found += same("files in the place of PEFT's adapter", sorted(content(folder / "again [1]")), sorted(content(peft)))
    found += _over_itself(trial, model, folder)
    return found + _in_the_place_of_what_came(trial, merge, folder / "meanwhile")


def _over_itself(trial: Trial, model: Model, folder: Path) -> Iterator[Comparison]:
    """An adapter that is saved once more in its place is whole again where one of its files was damaged, and names another base of it."""
    place, moved = folder / "again [1]", Path(shutil.copytree(folder / "base", folder / "moved"))
    save, whole = partial(trial.files.save_adapter, place, settings=model.settings, tensors=model.trainable), content(place)
    for name, stored in whole.items():
        (place / name).write_bytes(stored[::-1])
        save(folder / "base")
        yield from same(f"files of an adapter that is saved over its damaged {name}", whole, content(place))
    save(moved)
    said = json.loads((place / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    yield from same("base of an adapter that is saved once more", str(moved), said)
    save(folder / "base")


def _in_the_place_of_what_came(trial: Trial, merge: Callable[..., None], place: Path) -> list[Comparison]:
    """What gets a merged model's name while that is written, a folder, a file or a link to nothing, stays; nothing else is beside it."""
    (elsewhere := place / "elsewhere").mkdir(parents=True)
    (elsewhere / "file").write_text("x")
    comes: dict[str, Callable[[Path], object]] = {
        "a folder": lambda path: shutil.copytree(elsewhere, path),
        "a file": lambda path: path.write_text("y"),
        "a link": lambda path: path.symlink_to("nothing"),
    }
    found: list[Comparison] = []
    for name, come in comes.items():
        ask = partial(merge, place / name, meanwhile=partial(come, place / name))
        found.append(trial.refuses(f"a merged model where {name} has come meanwhile", ask, name, "FileExistsError"))
    stay = {"a folder": {"file": b"x"}, "a file": b"y", "a link": b"nothing", "elsewhere": {"file": b"x"}}
    return found + same("what came while a model was merged", stay, {each.name: _bytes_of(each) for each in sorted(place.iterdir())})


def _bytes_of(place: Path) -> Mapping[str, bytes] | bytes:
    if place.is_symlink():
        return os.fsencode(place.readlink())
    return content(place) if place.is_dir() else place.read_bytes()


def _through_a_link(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """A save over a link to an adapter replaces that adapter, and the link stays."""
    place = folder / "elsewhere"
    place.mkdir()
    (place / "link").symlink_to("../again [1]")
    changed = {name: -value for name, value in model.trainable.items()}
    trial.files.save_adapter(place / "link", folder / "base", model.settings, changed)
    found = same_tensors({PREFIX + name: value for name, value in changed.items()}, load_file(folder / "again [1]" / ADAPTER_WEIGHTS))
    beside = [(each.name, each.is_symlink()) for each in place.iterdir()]
    return found + same("names beside a link, and whether it is one", [("link", True)], beside)


def _without_exchange(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """A save leaves the new adapter where the system cannot exchange two names, the old one where that fails, and nothing beside it.

    Its name is as long as names can be, or nearly so.
    """
    place, found = folder / "renamed", []
    for times, (name, code) in enumerate(zip(NAMES, (0, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP), strict=True), start=2):
        save = partial(trial.files.save_adapter, place / name, folder / "base", model.settings)
        save(model.trainable)
        tensors = {key: times * value for key, value in model.trainable.items()}
        save(tensors, exchange=code)
        stored = load_file(place / name / ADAPTER_WEIGHTS)
        found += same_tensors({PREFIX + key: value for key, value in tensors.items()}, stored)
    found += same("names beside new adapters", sorted(NAMES), sorted(each.name for each in place.iterdir()))
    for failure in ({"exchange": errno.EACCES}, {"exchange": 0, "renames": 0}, {"exchange": 0, "renames": 1}):
        found.append(trial.refuses(f"a name that is not given {failure}", partial(save, model.trainable, **failure), "adapter", "OSError"))
        found += same(f"adapter in its place {failure}", True, (place / LONG / ADAPTER_WEIGHTS).is_file())
        found += same_tensors(stored, load_file(place / LONG / ADAPTER_WEIGHTS)) if found[-1].held else []
    return found + same("names beside an adapter", sorted(NAMES), sorted(each.name for each in place.iterdir()))


def _whole(name: str, found: dict[str, bytes], accepted: list[dict[str, bytes]]) -> Comparison:
    if found in accepted:
        return Comparison(name, True, 0.0, "exact")
    expected, actual = ({file: len(value) for file, value in files.items()} for files in (accepted[0], found))
    return broken(name, "half an adapter", str(expected), str(actual))
