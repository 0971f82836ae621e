"""Large arrays that repeat the few rows of a case. They are made on the subject's device, and a few of their rows come back."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from blackswan.contracts.model import Signature
from blackswan.falsifiers.subjects.protocol import COTANGENT, Lacks

Tensors = dict[str, Tensor]
Compute = Callable[[Tensors], Tensors]
"""What is computed of tensors by name: outputs by name, or gradients."""
COPIES = {"outputs": 4, "gradients": 7}
"""The least number of tensors of the largest size that are on the device at once: inputs, results, intermediate ones, copies in float32."""


@dataclass(frozen=True)
class Repeated:
    """The rows of an operation's inputs are repeated to `count` in all, a multiple of their number; `rows` of the results are read.

    `of` is a key of COPIES: what is computed.
    """

    signature: Signature
    count: int
    rows: Sequence[int]
    of: str = "outputs"

    def around(self, compute: Compute) -> Compute:
        """The function that repeats the rows, computes, and reads `rows` of the results. Lacks where the device has too little memory."""

        def computed(given: Tensors) -> Tensors:
            with self.room(given):
                return self.read(compute(self.repeat(given)))

        return computed

    def wrt(self, inputs: Collection[str]) -> list[str]:
        """The inputs with respect to which there are gradients row by row."""
        return [name for name in self.signature.gradients if name in inputs and name in self.signature.by_row(self.signature.inputs)]

    def cotangent_dtype(self, output: str, storage: torch.dtype) -> torch.dtype:
        """That of the output: a copy in float32 would not fit."""
        return storage if self.signature.outputs[output].dtype == "storage" else torch.float32

    def repeat(self, given: Tensors) -> Tensors:
        """The tensors, those with rows repeated."""
        names = self._with_rows()
        return {
            name: value.repeat(self.count // len(value), *[1] * (value.dim() - 1)) if name in names else value
            for name, value in given.items()
        }

    def read(self, answer: Tensors) -> Tensors:
        """Copies of `rows` of each tensor that has rows; those without any are left out."""
        names = self._with_rows()
        return {name: torch.stack([value[row] for row in self.rows]) for name, value in answer.items() if name in names}

    @contextmanager
    def room(self, given: Tensors) -> Iterator[None]:
        """Lacks where a GPU has less free memory than is needed at least, or runs out of it. torch's cache is emptied before and after."""
        device = next(iter(given.values())).device
        if device.type != "cuda":
            yield
            return
        torch.cuda.empty_cache()
        free, needed = torch.cuda.mem_get_info(device)[0], COPIES[self.of] * self._largest(given)
        if free < needed:
            raise Lacks(f"{self._told()} need {needed / 2**30:.0f} GiB at least, and {device} has {free / 2**30:.0f} GiB free")
        try:
            yield
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]
            raise Lacks(f"{self._told()} need more than the {free / 2**30:.0f} GiB that were free on {device}: {said}") from None
        finally:
            torch.cuda.empty_cache()

    def _with_rows(self) -> set[str]:
        outputs = self.signature.by_row(self.signature.outputs)
        return self.signature.by_row(self.signature.inputs) | outputs | {f"{COTANGENT}{name}" for name in outputs}

    def _largest(self, given: Tensors) -> int:
        """Bytes of the largest tensor that is repeated."""
        names = self._with_rows()
        return self.count * max(value[0].numel() * value.element_size() for name, value in given.items() if name in names)

    def _told(self) -> str:
        return f"the {self.of} of {self.signature.name} for {self.count:,} rows"
