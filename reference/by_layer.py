"""A whole classifier, forward and backward, with the weights of at most one block at a time in the compute dtype.

The forward pass keeps the tape of each block without its weights, and the backward pass makes them again, block after block: of a model,
they are what takes the memory and costs little to make (the trade of Chen et al. 2016, arXiv:1604.06174, who make activations again).
Weights of projections that are stored in less than float64, other than for NF4, are widened when a product reads them, each over the last
one: it is then still in the cache.
The operations, and the tape that differentiates them, are those of `classifier_loss`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import blackswan.reference.decoder as decoder
import blackswan.reference.memory as memory
from blackswan.reference.classifier import (
    ClassifierConfig,
    adapted_projection,
    base_weight,
    head,
    loss_of,
    parameter_shapes,
    trainable_names,
)
from blackswan.reference.operations import TABLE
from blackswan.reference.table import Array, Operation, Scalars, Table
from blackswan.reference.tape import Tape

EMBEDDING = "model.embed_tokens"
NORM = "model.norm"
_NF4 = (".nf4.codes", ".nf4.absmax")
_READERS = ("linear", "lora_linear")


def widened(stored: Array) -> Array:
    """The values in float64."""
    wide: Array = stored.astype(np.float64)
    return wide


class _Buffer:
    """Memory for one weight in float64, which the next one is written over.

    Pages of a new array come from the system one by one, which for a weight takes longer than to widen it.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(0)

    def widened(self, stored: Array) -> Array:
        """As `widened`; the result lives until the next is asked for."""
        if stored.size > self._numbers.size:
            self._numbers = np.empty(stored.size)
        wide = self._numbers[: stored.size].reshape(stored.shape)
        np.copyto(wide, stored)
        return wide

    def reader(self, entry: Operation) -> Operation:
        """The operation, for a `weight` that is still as it is stored; it must not keep or return it."""
        return _Reader(entry.forward, entry.backward, entry.outputs, entry=entry, buffer=self)

    def readers(self, table: Table) -> Table:
        """The table with what reads the weights of projections."""
        return {**table, **{name: self.reader(entry) for name in _READERS if isinstance(entry := table.get(name), Operation)}}


@dataclass(frozen=True)
class _Reader(Operation):
    entry: Operation = field(kw_only=True)
    buffer: _Buffer = field(kw_only=True)

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        return self.entry.run(self._wide(arguments))

    def gradients(self, cotangents: Collection[Array], arguments: Mapping[str, Any], needs: Collection[str]) -> dict[str, Array]:
        return self.entry.gradients(cotangents, self._wide(arguments), needs)

    def _wide(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        weight = arguments.get("weight")
        if weight is None or weight.dtype == np.float64:
            return arguments
        return {**arguments, "weight": self.buffer.widened(weight)}


@dataclass(frozen=True)
class ByLayer:
    """A classifier's loss and the gradients of what it trains.

    `inputs`: input_ids and mask [batch, seq], labels, class_weights where there are any. `parameters`, by Hugging Face name, are asked
    for when they are needed and let go after it; they may be in any dtype, and `hold` gives them in the one to compute in. With NF4 a
    projection has `<name>.weight.nf4.codes` and `.absmax` in place of its weight, or its weight, which is then quantised each time.
    `table_of` gives the operations of a part of the model (the path of the embedding, of a block, or of the final norm for what follows
    the blocks). The backward pass asks for a block's again and makes its NF4 weights anew, with the first calls of that table as in the
    forward pass; so a table whose rounding is random has to draw from the same seed each time.
    """

    inputs: Mapping[str, Array]
    parameters: Mapping[str, Array]
    scalars: Scalars
    table_of: Callable[[str], Table] = lambda _: TABLE
    hold: Callable[[Array], Array] = widened
    trained: Collection[str] | None = None
    """The parameters whose gradients are given; by default LoRA's factors and the head."""
    causal: bool = False
    """Whether the head predicts the next token, and is the embedding where that is tied; `inputs` need no labels then."""

    @cached_property
    def _trained(self) -> frozenset[str]:
        return frozenset(trainable_names(self.scalars) if self.trained is None else self.trained)

    @cached_property
    def config(self) -> ClassifierConfig:
        """The configuration among the scalars."""
        return ClassifierConfig.from_scalars(self.scalars)

    @cached_property
    def _late(self) -> frozenset[str]:
        """The weights that are widened only when they are read."""
        if self.hold is not widened or self.config.nf4:
            return frozenset()
        paths = (f"model.layers.{index}.{path}" for index in range(self.config.layers) for path in self.config.projection_shapes())
        return frozenset(f"{path}.weight" for path in paths)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.scalars)

    def run(self) -> dict[str, Array]:
        """Outputs by name: `hidden/<path>` [batch, seq, hidden] of the embedding, of each block and of the final norm; `logits`
        [batch, classes], or [batch, seq, vocab] of the next token, `loss` [], and `gradient/<name>` of every trainable parameter.

        Several runs in one block of `memory.kept` are faster. ValueError for a parameter that is missing or has another shape.
        """
        with memory.kept():
            return self._run()

    def _run(self) -> dict[str, Array]:
        states, blocks, buffer = [self.embedded()], [], _Buffer()
        for index in range(self.config.layers):
            blocks.append(self._without_weights(index, states[-1], buffer))
            states.append(blocks[-1].result()["y"])
        top = self.top(states[-1])
        names = [EMBEDDING, *(f"model.layers.{index}" for index in range(self.config.layers)), NORM]
        outputs = {f"hidden/{name}": state for name, state in zip(names, [*states, top.values[NORM]], strict=True)}
        outputs |= top.result()
        return outputs | {f"gradient/{name}": value for name, value in self._gradients(blocks, top, buffer).items()}

    def embedded(self) -> Array:
        """The embedding of the tokens; only the rows that occur are widened."""
        tape, _ = self._embedding()
        return tape.result()["y"]

    def _embedding(self) -> tuple[Tape, Array]:
        """The tape of the embedding of the rows that occur, and which these are."""
        weight = self._stored(f"{EMBEDDING}.weight")
        rows, ids = np.unique(self.inputs["input_ids"], return_inverse=True)
        if rows[0] < 0 or rows[-1] >= len(weight):
            raise ValueError(f"input_ids hold {rows[0]} to {rows[-1]}; expected 0 to {len(weight) - 1}")
        occurring = {"input_ids": ids.reshape(self.inputs["input_ids"].shape), f"{EMBEDDING}.weight": self.hold(weight[rows])}
        tape = Tape(self.table_of(EMBEDDING), occurring)
        tape.outputs = {"y": decoder.embed(tape)}
        return tape, rows

    def block(self, index: int, x: Array) -> Tape:
        """The tape of a block from its input; the output is `y`."""
        return self._through(self._weights(index, _Buffer()), index, x)

    def top(self, x: Array) -> Tape:
        """The tape of what follows the last block; the outputs are `logits` and `loss`."""
        if self.causal:
            return self._next_token(x)
        given = {name: value for name, value in self.inputs.items() if name != "input_ids"}
        tape = Tape(self.table_of(NORM), {"x": x} | given | self._below(f"{NORM}.") | self._below("score."))
        logits = head(tape, self.config, decoder.final_norm(tape, self.config, "x"))
        tape.outputs = {"logits": logits, "loss": loss_of(tape, logits)}
        return tape

    def _next_token(self, x: Array) -> Tape:
        """The tape of the final norm, the language-model head and its loss."""
        weight = f"{EMBEDDING}.weight" if self.config.tied else "lm_head.weight"
        given = {"x": x, weight: self.hold(self._stored(weight))} | dict(self.inputs) | self._below(f"{NORM}.")
        tape = Tape(self.table_of(NORM), given)
        logits = tape.call("lm_head", "linear", x=decoder.final_norm(tape, self.config, "x"), weight=weight, bias=None)
        loss = tape.call("loss", "lm_cross_entropy", logits=logits, input_ids="input_ids", mask="mask")
        tape.outputs = {"logits": logits, "loss": loss}
        return tape

    def _weights(self, index: int, buffer: _Buffer) -> Tape:
        """The tape of a block before its input is there: its parameters, and with NF4 the weights that are made of them."""
        path, config = f"model.layers.{index}", self.config
        table = self.table_of(path)
        tape = Tape(buffer.readers(table) if self._late else table, self._below(f"{path}."))
        for projection in config.projection_shapes():
            base_weight(tape, config, f"{path}.{projection}")
        return tape

    def _through(self, tape: Tape, index: int, x: Array) -> Tape:
        """The tape, on which a block's weights are, with the rest of the block."""
        tape.values |= {"x": x, "mask": self.inputs["mask"], "positions": decoder.positions_of(self.inputs["mask"])}
        tape.outputs = {"y": decoder.block(tape, self.config, f"model.layers.{index}", "x", adapted_projection(tape, self.config))}
        return tape

    def _without_weights(self, index: int, x: Array, buffer: _Buffer) -> Tape:
        """The tape of a block from its input, less the values that do not depend on the input."""
        tape = self._weights(index, buffer)
        weights = tuple(tape.values)
        self._through(tape, index, x)
        for name in weights:
            del tape.values[name]
        return tape

    def _gradients(self, blocks: list[Tape], top: Tape, buffer: _Buffer) -> dict[str, Array]:
        """Of all that is trained; the blocks are without their weights, and are let go one by one."""
        found = top.backward({"loss": np.ones_like(top.result()["loss"])}, wrt=["x", *self._wanted(top)])
        dx, embedded = found.pop("x"), f"{EMBEDDING}.weight" in self._trained
        for index in reversed(range(self.config.layers)):
            tape = blocks.pop()  # lets the block before it go, before weights are asked for
            tape.values |= self._weights(index, buffer).values
            wanted = self._wanted(tape)
            gradients = tape.backward({"y": dx}, wrt=["x", *wanted] if index or embedded else wanted)
            dx = gradients.pop("x", dx)
            found |= gradients
        return found | (self._of_the_embedding(dx, found) if embedded else {})

    def _wanted(self, tape: Tape) -> list[str]:
        return [name for name in tape.values if name in self._trained]

    def _of_the_embedding(self, dx: Array, found: Mapping[str, Array]) -> dict[str, Array]:
        """The gradient of the embedding: that of the rows that occur, and its share in a tied head."""
        name = f"{EMBEDDING}.weight"
        tape, rows = self._embedding()
        whole = found[name].copy() if name in found else np.zeros(self._shapes[name], dx.dtype)
        whole[rows] += tape.backward({"y": dx}, wrt=[name])[name]
        return {name: whole}

    def _below(self, prefix: str) -> dict[str, Array]:
        """The parameters under a prefix, as they are computed with; those that are widened late, as they are stored."""
        found: dict[str, Array] = {}
        for name in self._shapes:
            if not name.startswith(prefix):
                continue
            codes, absmax = (f"{name}{suffix}" for suffix in _NF4)
            if self.config.nf4 and codes in self.parameters:
                found |= {codes: self.parameters[codes], absmax: self.hold(self.parameters[absmax])}
            else:
                found[name] = self._stored(name) if name in self._late else self.hold(self._stored(name))
        return found

    def _stored(self, name: str) -> Array:
        if name not in self.parameters:
            raise ValueError(f"parameter {name!r} is missing")
        value, shape = self.parameters[name], self._shapes[name]
        if value.shape != shape:
            raise ValueError(f"parameter {name!r} has shape {list(value.shape)}; expected {list(shape)}")
        return value
