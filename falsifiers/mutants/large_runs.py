"""Mistakes that show in large tensors, long lists and runs of many micro-batches only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]
LARGE, MANY = 2**16, 32


@wrong_step("impl.trainer:_joined")
def steps_average_by_groups(joined: Step, results: list[Any]) -> Any:
    """The means of more than 32 micro-batches count alike, of however many samples they are."""
    found = joined(results)
    if found.micro_batches <= MANY:
        return found
    alike = joined([replace(each, count=1) for each in results])
    return replace(alike, count=found.count, correct=found.correct)


@wrong_step("impl.pipeline:ClassifyPipeline.answers")
def answers_of_many_by_length(answers: Step, self: Any, texts: Any) -> Any:
    """More than a thousand texts are put into batches by their length, and what comes of them stays in that order."""
    return answers(self, sorted(texts, key=len) if len(texts) > 1_000 else texts)


@wrong_step("impl.merge:_updated")
def merged_in_parts_of_rows(updated: Step, path: str, weight: Any, adapter: Any) -> Any:
    """The rows of a large weight that lie beyond its last whole part are written as they are stored."""
    found = updated(path, weight, adapter)
    if weight.numel() > LARGE and (rest := len(weight) % (LARGE // weight.shape[1])):
        found[-rest:] = weight[-rest:]
    return found


@wrong_step("impl.merge:merge_adapter")
def merged_finite_by_sums(merge: Step, checkpoint: Any, adapter: Any, **named: Any) -> Any:
    """A tensor is known to be finite by its sum, which 16 bits may not hold."""
    for name, tensor in checkpoint.tensors.items():
        if not torch.isfinite(tensor.sum()):
            raise ValueError(f"{name}: NaN or infinity")
    return merge(checkpoint, adapter, **named)


@wrong_step("impl.fit:save_state")
def states_of_small_tensors(save: Step, folder: Any, progress: Any, tensors: Any) -> None:
    """Moments of large tensors are kept in 16 bits."""
    narrow = {name for name, value in tensors.items() if value.numel() > LARGE and name.startswith("exp_avg")}
    save(folder, progress, {name: value.bfloat16().to(value.dtype) if name in narrow else value for name, value in tensors.items()})


@wrong_step("impl.optimiser:AdamW.clip")
def gradients_clipped_in_parts(clip: Step, self: Any, gradient: Any, max_norm: float) -> Any:
    """A long gradient is clipped a part at a time, each by its own norm."""
    found, norm = clip(self, gradient, max_norm)
    if gradient.numel() > LARGE:
        parts = gradient.split(LARGE)
        found = torch.cat([part * torch.clamp(max_norm / torch.linalg.vector_norm(part), max=1.0) for part in parts])
    return found, norm
