"""Adapters, merged checkpoints and saved checkpoints, as `impl` writes and reads them."""

import copy
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from blackswan.falsifiers.subjects.conversion import to_numpy, to_torch
from blackswan.falsifiers.subjects.doors.files import AdapterSettings, LoadedAdapter, PreparedHead
from blackswan.falsifiers.subjects.impl import Door, disks
from blackswan.falsifiers.subjects.impl.kill_points import flushes
from blackswan.falsifiers.subjects.shared import default_dtype
from blackswan.impl import adapter, apr_write, checkpoint, merge, tokens
from blackswan.impl.classifier import Adaptation, Classifier
from blackswan.impl.tensors import Converted, Tensors
from blackswan.reference.table import Array

NAMED: dict[str, dict[Any, Any]] = {"id2label": {0: "safe", 1: "unsafe"}, "label2id": {"safe": 0, "unsafe": 1}}
"""Names of two labels, as a configuration of a transformers model has them."""
WRITES = {
    *("tempfile.mkdtemp", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"),
    *("shutil.rmtree", "shutil.copyfile", "ctypes.dlsym"),
}
"""Audited events by which a process changes files, beside opening one to write; two folders change places through ctypes."""
LATE, KILLED = 30, 9


class Files(Door):
    """Adapters and checkpoints in folders; `base` is the folder of the checkpoint that an adapter belongs to."""

    def save_adapter(
        self,
        folder: Path,
        base: Path,
        settings: AdapterSettings,
        tensors: Mapping[str, Array],
        exchange: int | None = None,
        renames: int | None = None,
        extra: Mapping[Any, Any] | None = None,
        checksums: Mapping[str, str] | None = None,
    ) -> None:
        """Saves LoRA factors and head from the device, as the parameters of a module in training, as they lie in memory, equal ones in one
        place of it, with `extra` and the base's checksums in mappings that are no dicts, over an adapter that is there; on a system that
        refuses to exchange two names by that error, or for 0 has no call for it, and on a disk that fails to rename after so many times."""
        placed = _equal_ones_once({name: to_torch(value).to(self._device) for name, value in tensors.items()})
        held = {name: torch.nn.Parameter(value, requires_grad=value.is_floating_point()) for name, value in placed.items()}
        with (
            nullcontext() if exchange is None else disks.exchanging(exchange),
            nullcontext() if renames is None else disks.renaming(renames),
        ):
            _save(folder, base, settings, held, extra, checksums)

    def interrupted_save(
        self,
        folder: Path,
        base: Path,
        settings: AdapterSettings,
        tensors: Mapping[str, Array],
        *,
        step: int | None = None,
        limit: int | None = None,
        exchange: int | None = None,
    ) -> str:
        """The same in a process that is killed at that step in the file system, or that cannot write files of more bytes than `limit`;
        the error that ends it, if one does. `exchange` is that of `save_adapter`."""
        held = {name: torch.tensor(value) for name, value in tensors.items()}
        here, there = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            status, said = 1, ""
            try:
                signal.alarm(LATE)
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                if step is not None:
                    _kill_at(step)
                with nullcontext() if exchange is None else disks.exchanging(exchange):
                    _save(folder, base, settings, held)
                status = 0
            except BaseException as error:  # whatever it is, the process that asked is to see it
                said = f"{type(error).__name__}: {error}"
            finally:
                _end(there, said, status)
        there.close()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            raise TimeoutError(f"the save was still running after {LATE} s")
        try:
            return str(here.recv())
        except EOFError:  # it was killed
            return ""

    def load_adapter(self, folder: Path, base: Path, default: str = "cpu") -> LoadedAdapter:
        """An adapter as it arrives under that default device of torch's, of which `meta` has no numbers. It was loaded before, by somebody
        who has written into its tensors and beside them."""
        with torch.device(default):
            earlier = adapter.load_adapter(folder, checkpoint.read_config(base))
            for tensor in earlier.trainable.values():
                tensor.zero_()
            earlier.extra["note"] = "of the earlier one"
            found = adapter.load_adapter(folder, checkpoint.read_config(base))
        settings = {name: getattr(found.adaptation, name) for name in AdapterSettings.__dataclass_fields__}
        settings["targets"] = settings["targets"].replace(",", "+")
        return LoadedAdapter(AdapterSettings(**settings), _arrays(found.trainable), found.extra)

    def flushed_save(self, folder: Path, base: Path, settings: AdapterSettings, tensors: Mapping[str, Array]) -> list[str]:
        """Saves them from the host; what was flushed to the disk meanwhile, in its order, by paths from the folder around.

        There is no folder for temporary files then.
        """
        seen: list[str] = []
        with flushes(folder.parent, seen.append), mock.patch.object(tempfile, "tempdir", str(folder.with_name("no such folder"))):
            _save(folder, base, settings, {name: torch.tensor(value) for name, value in tensors.items()})
        return [event.removeprefix("flush ") for event in seen]

    def prepared_head(self, folder: Path, hidden: int, dtype: str = "float32") -> PreparedHead:
        """The head that a sequence classifier of transformers' in that dtype is given for an adapter, or for a merged model."""
        score = torch.nn.Linear(hidden, 2, bias=False, dtype=getattr(torch, dtype), device=self._device)
        drawn = torch.get_rng_state()
        model, config = _prepared(folder, score)
        drew = not torch.equal(drawn, torch.get_rng_state())
        weight, bias = (to_numpy(model.get_parameter(f"score.{name}").detach()) for name in ("weight", "bias"))
        renamed = config.num_labels == 2 and {key: getattr(config, key) for key in NAMED} != NAMED
        outputs = getattr(model.get_submodule("score"), "out_features", len(weight))
        return PreparedHead(weight, bias, config.num_labels, getattr(model, "num_labels", 2), outputs, renamed, drew)

    def prepared_places(self, folder: Path, hidden: int) -> list[str]:
        """Returns where such a head's weight and bias are in a frozen model on no device (meta), with `frozen` where they are so too."""
        model, _ = _prepared(folder, torch.nn.Linear(hidden, 2, bias=False, device="meta").requires_grad_(False))
        given = [model.get_parameter(f"score.{name}") for name in ("weight", "bias")]
        return [f"{each.device}{'' if each.requires_grad else ', frozen'}" for each in given]

    def prepared_without_a_head(self, folder: Path, hidden: int, kind: str) -> None:
        """Gives such a head to a model that has no `score`, or one that is no linear layer."""
        _prepared(folder, torch.nn.LayerNorm(hidden) if kind == "no linear" else None)

    def read_over(self, path: Path) -> Mapping[str, Array]:
        """The tensors of a checkpoint, of which somebody has asked for each just before, and has written into it."""
        opened, found = checkpoint.load_checkpoint(path).tensors, dict[str, Array]()
        for name in opened:
            opened[name].zero_()
            found[name] = to_numpy(opened[name])
        return found

    def names_alone(self, folder: Path, names: Sequence[str]) -> list[bool]:
        """Whether a checkpoint has tensors of those names, once its files are gone, of which none is to be read."""
        with tempfile.TemporaryDirectory() as parent:
            opened = checkpoint.load_checkpoint(Path(shutil.copytree(folder, Path(parent) / "copy")))
        return [name in opened.tensors for name in names]

    def converted(self, folder: Path, without: Sequence[str], *dtypes: str) -> dict[str, Array]:
        """A checkpoint's tensors after they were asked for in one dtype after the other, and each time without the next of those names."""
        tensors: Tensors = checkpoint.load_checkpoint(folder).tensors
        for name, dtype in zip(without, dtypes, strict=True):
            tensors = Converted(tensors, dtype=getattr(torch, dtype), device="cpu", without=[name])
        return {name: to_numpy(value) for name, value in tensors.items()}

    def adapter_logits(self, folder: Path, base: Path, input_ids: Array, mask: Array) -> Array:
        """The logits [samples, classes] in float32 of the checkpoint with the adapter, both loaded from their folders."""
        loaded = checkpoint.load_checkpoint(base)
        return self._logits(loaded, adapter.load_adapter(folder, loaded.config), input_ids, mask)

    def merge(
        self,
        folder: Path,
        base: Path,
        merged: Path,
        trained_in: str | None = None,
        meanwhile: Callable[[], object] | None = None,
        default: str = "float32",
        tensors: Mapping[str, Array] | None = None,
    ) -> None:
        """Merges an adapter, trained in that dtype where it is not the checkpoint's own, into its checkpoint, as the folder `merged`;
        `meanwhile` is called once the writing has begun. Without either the checkpoint is in memory, its matrices column by column.
        `default` is torch's default dtype meanwhile. `tensors` stand in the place of the adapter's, as of one that was made in memory."""
        options = {"quantized_as": getattr(torch, trained_in)} if trained_in else {}
        loaded = checkpoint.load_checkpoint(base)
        if trained_in is None and meanwhile is None:
            loaded = checkpoint.Checkpoint(loaded.config, _by_columns(loaded.tensors))
        found = adapter.load_adapter(folder, loaded.config)
        if tensors is not None:
            found = replace(found, trainable={name: to_torch(value) for name, value in tensors.items()})
        with disks.once_begun(meanwhile) if meanwhile else nullcontext(), default_dtype(default):
            merge.save_merged(merged, loaded, found, source=base, **options)

    def merged_logits(self, folder: Path, input_ids: Array, mask: Array) -> Array:
        """The logits [samples, classes] in float32 of a merged checkpoint and its head, loaded from their folder."""
        return self._logits(*merge.load_merged(folder), input_ids, mask)

    def copy_checkpoint(self, base: Path, folder: Path) -> Mapping[str, Array]:
        """Loads a checkpoint, saves it from the device as another folder, matrices column by column in memory, and gives the tensors that
        are loaded from there."""
        loaded = checkpoint.load_checkpoint(base)
        there = {name: tensor.to(self._device) for name, tensor in loaded.tensors.items()}
        checkpoint.save_checkpoint(folder, loaded.config, _by_columns(there))
        return _arrays(checkpoint.load_checkpoint(folder).tensors)

    def load_decoder(self, folder: Path, at_most: int | None = None) -> Mapping[str, Array]:
        """The parameters of a checkpoint's decoder as they are on the device, in the dtype of the files; from a system that gives so many
        bytes of a file at most at a call, as Linux gives 2 GiB."""
        with disks.reading(at_most) if at_most else nullcontext():
            dtype = next(iter(checkpoint.load_checkpoint(folder).tensors.values())).dtype
            return _arrays(dict(checkpoint.load_decoder(folder, dtype=dtype, device=self._device).named_parameters()))

    def read_checkpoint(
        self,
        path: Path,
        memory: int | None = None,
        meanwhile: Callable[[], object] | None = None,
        default: str = "float32",
        place: str = "cpu",
        late: Path | None = None,
        early: Path | None = None,
    ) -> Mapping[str, Array]:
        """The tensors of a checkpoint; `meanwhile` is called between its opening and their reading, both with that default dtype and
        device; where `late` is a file, as that is opened for the last of them, and where `early` is one, once it was read first."""
        if memory is None:
            with default_dtype(default), torch.device(place):
                with disks.when_first_closed(early, meanwhile) if meanwhile and early else nullcontext():
                    opened = checkpoint.load_checkpoint(path)
                if meanwhile is not None and late is early is None:
                    meanwhile()
                with disks.at_the_last_opening(late, opened.tensors, meanwhile) if meanwhile and late else nullcontext():
                    return _arrays(opened.tensors)
        _within(memory, lambda: dict(checkpoint.load_checkpoint(path).tensors))
        return {}

    def export(
        self,
        model: Path,
        output: Path,
        dtype: str | None = None,
        renames: int | None = None,
        at_most: int | None = None,
        default: str = "cpu",
        tensors: Mapping[str, Array] | None = None,
    ) -> None:
        """A checkpoint as an .apr file, or its architecture with those tensors from memory; on a disk that fails to rename after so many
        times, from a system that takes so many bytes of a file at most at a call, as Linux takes 2 GiB, and under that default device of
        torch's, of which `meta` has no numbers."""
        loaded = checkpoint.load_checkpoint(model)
        if tensors is not None:
            loaded = checkpoint.Checkpoint(loaded.config, {name: to_torch(value) for name, value in tensors.items()})
        writes = nullcontext() if at_most is None else disks.writing(at_most)
        with nullcontext() if renames is None else disks.renaming(renames), writes, torch.device(default):
            apr_write.export_apr(loaded, model, output, dtype)

    def load_tokenizer(self, folder: Path) -> int:
        """The number of ids of a checkpoint's tokenizer."""
        return tokens.load_tokenizer(folder, 16).vocab

    def _logits(self, base: checkpoint.Checkpoint, found: adapter.Adapter, input_ids: Array, mask: Array) -> Array:
        classifier = Classifier(base.config, found.adaptation, base.tensors, found.trainable, dtype=torch.float32, device=self._device)
        with torch.no_grad():
            return to_numpy(classifier(*(torch.tensor(value, device=self._device) for value in (input_ids, mask))))

    def trained_dtypes(self, folder: Path, base: Path, dtype: str) -> list[str]:
        """The dtypes in which a classifier in `dtype` trains what an adapter has, on its base."""
        loaded = checkpoint.load_checkpoint(base)
        found = adapter.load_adapter(folder, loaded.config)
        placed = {"dtype": getattr(torch, dtype), "device": self._device}
        trained = Classifier(loaded.config, found.adaptation, loaded.tensors, found.trainable, **placed).trainable_parameters()
        return sorted({str(value.dtype).removeprefix("torch.") for value in trained.values()})


def _prepared(folder: Path, score: torch.nn.Module | None) -> tuple[torch.nn.Module, SimpleNamespace]:
    model, config = torch.nn.Module(), SimpleNamespace(num_labels=2, **copy.deepcopy(NAMED))
    if score is not None:
        model.score = score
    object.__setattr__(model, "config", config)  # transformers' is no module either
    adapter.prepare_sequence_classifier(model, folder)
    return model, config


def _save(
    folder: Path,
    base: Path,
    settings: AdapterSettings,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[Any, Any] | None = None,
    checksums: Mapping[str, str] | None = None,
) -> None:
    adaptation = Adaptation(**asdict(settings) | {"targets": settings.targets.replace("+", ",")})
    further, of_base = (MappingProxyType(each) for each in (extra or {"max_seq_len": 64}, checksums or {}))
    adapter.save_adapter(folder, checkpoint.read_config(base), adaptation, tensors, base=base, extra=further, base_checksums=of_base)


def _within(memory: int, ask: Callable[[], object]) -> None:
    """Asks in a process that may take so many bytes more than it has; what it raises is raised here."""
    here, there = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        raised: BaseException | None = None
        try:
            signal.alarm(LATE)
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
            ask()
        except BaseException as error:  # whatever it is, the process that asked is to see it
            raised = error
        finally:
            _end(there, None if raised is None else (type(raised).__name__, str(raised)))
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = ("ProcessError", f"the process ended without an answer, or was still reading after {LATE} s")
    os.waitpid(child, 0)
    if found is not None:
        raise (ValueError(found[1]) if found[0] == "ValueError" else RuntimeError(": ".join(found)))


def _end(there: Connection, answer: object, status: int = 0) -> NoReturn:
    """Ends a forked child after its answer. A child that has no memory for that ends too: it would go on as a copy of its parent."""
    try:
        there.send(answer)
    finally:
        os._exit(status)


def _kill_at(step: int) -> None:
    """Ends this process, as a kill does, where it would change files for the time after the first `step` times."""
    left = step

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in WRITES or (event == "open" and len(arguments) > 1 and arguments[1] not in (None, "r", "rb")):
            left -= 1
            if left < 0:
                os._exit(KILLED)

    sys.addaudithook(hook)


def _by_columns(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, equal ones in one memory, their matrices column by column."""
    once = _equal_ones_once(tensors)
    return {name: tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor for name, tensor in once.items()}


def _equal_ones_once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, those of the same numbers as one tensor, as an initial value is that was made once."""
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        alike = (one for one in found.values() if one.dtype == tensor.dtype and torch.equal(one, tensor))
        found[name] = next(alike, tensor)
    return found


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}
