"""Wrong merges, and wrong bases of adapters: one step of `impl` replaced while the subject runs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


wrong_steps(
    "impl.merge:lora_merge",
    merge_with_scale_one=("W + B A.", lambda merge, weight, a, b, _: merge(weight, a, b, a.shape[0]), "P24"),
    merge_with_scale_alpha=("W + alpha B A.", lambda merge, weight, a, b, alpha: merge(weight, a, b, alpha * a.shape[0]), "P23"),
    merge_left_out=("The merged checkpoint is the base.", lambda merge, weight, a, b, alpha: merge(weight, a, 0 * b, alpha)),
    merge_in_float32_of_float64=(
        "Weights in float64 are merged in float32.",
        lambda merge, *held: merge(*(value.float() for value in held[:3]), held[3]).to(held[0].dtype),
    ),
    merge_in_low_precision=(
        "Weight and factors merged in bfloat16.",
        lambda merge, *held: merge(*(value.bfloat16() for value in held[:3]), held[3]).to(held[0].dtype),
        "P28",
    ),
)


wrong_steps(
    "impl.merge:read_tensors",
    by=of_result,
    merge_head_bias_dropped=(
        "The weight of a merged checkpoint's head is loaded, and its bias is not.",
        lambda tensors: {name: 0 * tensor if "score.bias" in name else tensor for name, tensor in tensors.items()},
        "P4, P29",
    ),
)


wrong_step("impl.merge:said_beside", name="merge_reads_files_as_folders", doc="config.json is looked for beside an .apr file too.")(
    lambda _, source: json.loads((source / "config.json").read_text())
)


wrong_step("impl.merge:_config", name="merge_expects_a_folder", doc="A model of random weights, which has no folder, cannot be merged.")(
    lambda config, architecture, source: config(architecture, source or Path())
)


@wrong_step("impl.merge:_config")
def merged_config_contradicts_itself(config: Step, architecture: Any, source: Path) -> dict[str, Any]:
    """The merged config.json has the base's rotary parameters beside the architecture's own, which are spelled otherwise."""
    return {**config(architecture, source), **json.loads((source / "config.json").read_text())}


@wrong_step("impl.merge:_updated")
def merge_of_two_dtypes_refused(updated: Step, path: str, weight: Any, adapter: Any) -> Any:
    """An update whose factors are in two dtypes cannot be merged."""
    if len({tensor.dtype for name, tensor in adapter.trainable.items() if name.startswith(f"{path}.lora_")}) > 1:
        raise RuntimeError("expected m1 and m2 to have the same dtype")
    return updated(path, weight, adapter)


@wrong_step("impl.merge:_dequantized", "P27")
def merge_into_unquantised(_: Step, _path: str, stored: Any, *_others: Any) -> Any:
    """Trained on NF4, merged into the weight before quantisation."""
    return stored


@wrong_step("impl.merge:merge_adapter", "P27")
def merge_quantises_the_rest_not(merge: Step, checkpoint: Any, adapter: Any, **options: Any) -> Any:
    """Trained on NF4, projections without an update keep the weight before quantisation."""
    adapted = {name.replace("lora_A.", "") for name in adapter.trainable}
    merged = merge(checkpoint, adapter, **options)
    return {name: tensor if name in adapted else checkpoint.tensors[name] for name, tensor in merged.items()}


@wrong_step("impl.merge:merge_adapter")
def merge_quantises_what_is_stored(merge: Step, *given: Any, **options: Any) -> Any:
    """Trained in bfloat16 on NF4, merged into the NF4 codes of the checkpoint's float32 weights."""
    return merge(*given, **{**options, "quantized_as": None})


@wrong_step("impl.pipeline:ClassifyPipeline.__init__")
def base_from_where_the_process_is(init: Step, self: Any, *given: Any, source: Path | None = None, **named: Any) -> None:
    """A pipeline looks for its base from the folder that the process is in by then."""
    init(self, *given, source=source, **named)
    self.source = source


@wrong_step("impl.pipeline:ClassifyPipeline.merge")
def pipeline_merges_what_is_stored(merge: Step, self: Any, folder: Path) -> None:
    """The same in the pipeline and the command alone."""
    from blackswan.impl.merge import save_merged

    def stored(*given: Any, **options: Any) -> None:
        save_merged(*given, **{**options, "quantized_as": None})

    with mock.patch("blackswan.impl.pipeline.save_merged", stored):
        merge(self, folder)


@wrong_step("impl.checksums:Checked.__getitem__")
def base_checksums_not_compared(_: Step, self: Any, name: str) -> Any:
    """An adapter goes onto any base of its architecture, whatever its weights."""
    from blackswan.impl.checksums import checksum

    tensor = self._tensors[name]
    self.found[name] = checksum(tensor)
    return tensor


@wrong_step("impl.checksums:checksum")
def checksums_by_threads(checksum: Step, tensor: Any) -> str:
    """The checksum of a large tensor is of as many parts as there are threads."""
    threads = torch.get_num_threads()
    if threads == 1 or tensor.nbytes < 2**20:
        return str(checksum(tensor))
    return "".join(checksum(part) for part in tensor.reshape(-1).chunk(threads))[:16]


@wrong_step("impl.checksums:Checked.__getitem__")
def base_checksums_of_small_tensors(read: Step, self: Any, name: str) -> Any:
    """Checksums of a base's large tensors are not compared."""
    from blackswan.impl.checksums import checksum

    tensor = self._tensors[name]
    if tensor.numel() < 2**16:
        return read(self, name)
    self.found[name] = checksum(tensor)
    return tensor


@wrong_step("impl.saved:_named_base")
def base_beside_the_adapter(named: Step, path: Path) -> Any:
    """A checkpoint beside the adapter that has the name of its base is taken for it."""
    found = named(path)
    beside = None if found is None else path.parent.parent / found.name
    return beside if beside is not None and (beside / "config.json").is_file() else found


@wrong_step("impl.checksums:Checked.__getitem__")
def base_checksums_of_the_first_reading(read: Step, self: Any, name: str) -> Any:
    """A tensor that was refused is given out when it is read again."""
    return self._tensors[name] if name in self.found else read(self, name)


@wrong_step("impl.checksums:Checked.__getitem__")
def base_checksums_of_the_unexpected(read: Step, self: Any, name: str) -> Any:
    """Checksums that were expected are lost when the adapter is saved again."""
    tensor = read(self, name)
    if name in self._expected:
        self.found.pop(name)
    return tensor


@wrong_step("impl.merge:_dequantized")
def merge_without_double_quantize(dequantized: Step, path: str, stored: Any, quantized_as: Any, _: bool) -> Any:
    """Trained on doubly quantised weights, merged into NF4 with float32 scales."""
    return dequantized(path, stored, quantized_as, False)


@wrong_step("impl.merge:load_merged")
def merged_checkpoint_quantised_again(load: Step, folder: Path) -> Any:
    """A merged checkpoint is quantised once more when it is loaded."""
    checkpoint, head = load(folder)
    return checkpoint, replace(head, adaptation=replace(head.adaptation, nf4=True))


@wrong_step("impl.pipeline:load_checkpoint")
def merged_refused_as_a_base(load: Step, folder: Path) -> Any:
    """No new adapter is trained on a merged model, which is a checkpoint like any other."""
    if (folder / "head.safetensors").is_file():
        raise ValueError(f"{folder} is a merged model; open it with from_merged")
    return load(folder)


@wrong_step("impl.checkpoint:load_checkpoint")
def export_of_what_a_link_leads_to(load: Step, folder: Path) -> Any:
    """The link of a model is followed before it is exported, to a file of another name, which is no .apr file."""
    return load(folder.resolve())


@wrong_step("impl.merge:merge_adapter")
def merged_twice_from_layer_ten_on(merge: Step, checkpoint: Any, adapter: Any, **named: Any) -> dict[str, torch.Tensor]:
    """Weights are merged layer by layer by the beginnings of their names, and those of layer 10 begin as layer 1's: they get their update
    twice."""
    merged: dict[str, torch.Tensor] = merge(checkpoint, adapter, **named)
    names = [name for name in merged if name.startswith("model.layers.10.")]
    again = replace(checkpoint, tensors={**checkpoint.tensors, **{name: merged[name] for name in names}})
    return {**merged, **{name: value for name, value in merge(again, adapter, **named).items() if name in names}}


wrong_step(
    "impl.merge:require_named", name="merge_of_any_tensors", doc="An adapter in memory whose tensors have other names merges nothing."
)(lambda *_: None)
