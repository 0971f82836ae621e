"""A published checkpoint on a text: the subject's hidden states, logits and loss against the float64 reference, and each call by itself.

The reference goes through the model layer by layer, in float64 and under the rounding of the dtype beside each other, and reads the weights
of a layer when it comes to it, without `impl`: it holds one layer in float64 at a time, and the head a block of rows at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from blackswan import contracts, reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.blame import first_clear
from blackswan.falsifiers.diagnosis.local import Local, Suspicion
from blackswan.falsifiers.diagnosis.trace_check import NOT_CALLED, Section, Trace, same
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF, compute_dtype, round_to
from blackswan.falsifiers.numeric.whole_model import under_rounding
from blackswan.falsifiers.subjects.protocol import Subject, TracedCall
from blackswan.falsifiers.system.whole_models import REPLAYS, THOROUGH_REPLAYS, THOROUGH_REPLAYS_OF_SMALL
from blackswan.reference import decoder, memory
from blackswan.reference.decoder import DecoderConfig
from blackswan.reference.operations import TABLE
from blackswan.reference.table import Array, Arrays, Operation, Table
from blackswan.reference.tape import Tape

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
HEAD_ROWS = 16_384
"""Rows of the language-model head that are in float64 at a time."""
SMALL = 10_000_000
"""Parameters of a model that runs in moments, and gets as many replays as a small whole model."""
SEED = 0

Calls = Mapping[str, Callable[[], TracedCall]]
"""What brings a recorded call to the host, by the call's path, in the order of the calls."""


@dataclass(frozen=True)
class Answer:
    """What a subject made of the text: hidden states [batch, seq, hidden] by path, logits [batch, seq, vocab], loss, and calls if any."""

    outputs: Arrays
    calls: Calls = field(default_factory=dict)


def attacks(subject: Subject, dtype: str) -> dict[str, Attack]:
    """The claims whose tolerances a model that somebody has is held to: for its states and logits, its loss and its gradients."""
    claims = {claim.id: claim for contract in contracts.load() for claim in contract.claims}
    # WHOLE-TORCH is measured layer by layer in a true shape, and in bfloat16 alone.
    whole = claims["WHOLE-TORCH"].tolerance
    assert whole is not None

    def measured(claim: Claim) -> Claim:
        assert claim.tolerance is not None
        return replace(claim, tolerance=replace(claim.tolerance, factors={**claim.tolerance.factors, **whole.factors}))

    judged = {"states": measured(claims["FWD-CHECKPOINT"]), "gradients": measured(claims["CLS-GRADIENT"]), "loss": claims["FWD-LM-LOSS"]}
    return {name: Attack(claim, subject, dtype) for name, claim in judged.items()}


@dataclass(frozen=True)
class Parity:
    """The answers of one dtype beside the reference. `progress` is told which layer was done, and how many there are.

    `stored` gives a parameter by its name, `inputs` are input_ids and mask [batch, seq], `answers` are by the name of who gave them.
    """

    scalars: Mapping[str, Any]
    stored: Callable[[str], Array]
    inputs: Arrays
    dtype: str
    subject: Subject
    answers: Mapping[str, Answer]
    progress: Callable[[str, int, int], None]

    @cached_property
    def config(self) -> DecoderConfig:
        """The architecture."""
        return DecoderConfig.from_scalars(self.scalars)

    @cached_property
    def blocks(self) -> list[str]:
        """The paths of the layers."""
        return [f"model.layers.{index}" for index in range(self.config.layers)]

    @cached_property
    def attacks(self) -> dict[str, Attack]:
        """The claims whose tolerances are taken, by output."""
        return attacks(self.subject, self.dtype)

    def whole(self) -> dict[str, list[Comparison]]:
        """By who answered: every output in order, up to the first that leaves its noise; judged again by more replays where it is near."""
        found: dict[str, list[Comparison]] = {}

        def judged() -> list[Comparison]:
            found.clear()
            found.update({name: self._missing(answer) for name, answer in self.answers.items()})
            with memory.kept():
                self._compare(found)
            return [each for comparisons in found.values() for each in comparisons]

        self.attacks["states"].judge_with_retry(judged)
        return found

    def _missing(self, answer: Answer) -> list[Comparison]:
        """The first output that is not there, where the answer is of more than logits."""
        names = [f"hidden/{path}" for path in (EMBEDDING, *self.blocks, NORM)] + ["loss"] if answer.calls else []
        return [broken(name, "missing from the answer") for name in (*names, "logits") if name not in answer.outputs][:1]

    def by_layer(self, name: str) -> Iterator[Suspicion]:
        """The first wrong call of each layer and of the last norm, every call held to the reference on its own inputs."""
        local = Local(self.attacks["states"].claim, self.subject, self.dtype, SEED)
        parts = [*self.blocks, NORM]
        self.progress(f"{self.dtype}, {name}, each call by itself", 0, len(parts))
        for index, path in enumerate(parts):
            found = first_clear(self._part(self.answers[name], path, ([EMBEDDING, *self.blocks])[index], local))
            self.progress(f"{self.dtype}, {name}, each call by itself", index + 1, len(parts))
            if found is not None:
                yield found

    def _part(self, answer: Answer, path: str, before: str, local: Local) -> Iterator[Suspicion]:
        """The wrong calls of a layer or of the last norm, and of these the first where it reads something else than what came before."""
        calls = [bring() for place, bring in answer.calls.items() if f"{place}.".startswith(f"{path}.")]
        first = next((call for call in calls if call.path in (path, f"{path}.input_layernorm")), None)
        if first is None:
            yield Suspicion("rms_norm", path, NOT_CALLED)
            return
        if not same(answer.outputs[f"hidden/{before}"], first.inputs["x"]):
            yield Suspicion(first.operation, first.path, f"is called with another x than {before} gave")
        entering, weights = np.asarray(first.inputs["x"], np.float64), self._weights(f"{path}.")
        tape = self._norm(TABLE, weights, entering) if path == NORM else self._block(TABLE, weights, path, entering)
        yield from Section(tape, Trace(calls), local).forward()

    def _compare(self, found: dict[str, list[Comparison]]) -> None:
        """Carries the lanes through the model; each is the reference's state so far, under no rounding, to nearest, or in a replay."""
        roundings = [under_rounding(self.dtype, SEED, replay) for replay in (None, *range(self._replays()))]
        tables: list[Callable[[str], Table]] = [lambda _: TABLE, *(table_of for table_of, _ in roundings)]
        ids, rows = self._rows()
        embedded = [self._held(lane, rows)[ids] for lane in range(len(tables))]
        lanes = self._judge(found, f"hidden/{EMBEDDING}", embedded)
        self.progress(f"{self.dtype}, whole, layers", 0, len(self.blocks))
        for index, path in enumerate(self.blocks):
            weights = self._weights(f"{path}.")
            for lane, table_of in enumerate(tables):
                held = {name: self._held(lane, value) for name, value in weights.items()}
                lanes[lane] = self._block(table_of(path), held, path, lanes[lane]).result()["y"]
            self._judge(found, f"hidden/{path}", lanes)
            self.progress(f"{self.dtype}, whole, layers", index + 1, len(self.blocks))
        self._top(found, tables, lanes)

    def _top(self, found: dict[str, list[Comparison]], tables: list[Callable[[str], Table]], lanes: list[Array]) -> None:
        weights, normed, losses = self._weights(f"{NORM}."), [], []
        for lane, table_of in enumerate(tables):
            held = {name: self._held(lane, value) for name, value in weights.items()}
            normed.append(self._norm(table_of(NORM), held, lanes[lane]).result()["y"])
        self._judge(found, f"hidden/{NORM}", normed)
        logits = [self._logits(lane, table_of(HEAD), normed[lane]) for lane, table_of in enumerate(tables)]
        for lane, table_of in enumerate(tables):
            loss = table_of("loss")["lm_cross_entropy"]
            assert isinstance(loss, Operation)
            losses.append(loss.run({"logits": logits[lane], **self.inputs})["loss"])
        floor = self._judge(found, "logits", logits, floors=True)[0]
        slope = reference.differentiate("lm_cross_entropy", {"logits": logits[0], **self.inputs}, {}, {"loss": np.ones(())}, ["logits"])
        # The loss is one number, whose error in a few runs may be small by luck: independent errors of the logits make one of this size.
        passed_on = Errors.flat(floor.rms * float(np.linalg.norm(slope["logits"])))
        self._judge(found, "loss", losses, passed_on)

    def _judge(
        self, found: dict[str, list[Comparison]], name: str, lanes: list[Array], least: Errors | None = None, floors: bool = False
    ) -> list[Any]:
        """Compares an output of every answer that is right so far; returns the lanes, or the floor."""
        of_loss = name == "loss"
        dtype = compute_dtype(self.dtype) if of_loss else STORAGE[self.dtype]
        attack = self.attacks["loss" if of_loss else "states"]
        expected, *rounded = [np.asarray(value if of_loss else value[self.inputs["mask"]], np.float64) for value in lanes]
        floor = Errors.of(expected).times(UNIT_ROUNDOFF[str(dtype)])
        for value in (Errors.of(each - expected) for each in rounded):
            floor = floor.at_least(value)
        floor = floor.at_least(least) if least else floor
        for who, answer in self.answers.items():
            if name in answer.outputs and (not found[who] or found[who][-1].held):
                given = answer.outputs[name] if of_loss else answer.outputs[name][self.inputs["mask"]]
                found[who] += attack.judge({name: expected}, {name: given}, lambda: {name: floor}, {name: dtype})
        return [floor] if floors else lanes

    def _replays(self) -> int:
        if not self.attacks["states"].thorough:
            return REPLAYS
        size = sum(int(np.prod(shape)) for shape in decoder.parameter_shapes(self.scalars).values())
        return THOROUGH_REPLAYS_OF_SMALL if size <= SMALL else THOROUGH_REPLAYS

    def _block(self, table: Table, weights: Arrays, path: str, x: Array) -> Tape:
        mask = self.inputs["mask"]
        tape = Tape(table, {**weights, "x": x, "mask": mask, "positions": decoder.positions_of(mask)})
        tape.outputs = {"y": decoder.block(tape, self.config, path, "x", decoder.linear_projection(tape, self.config))}
        return tape

    def _norm(self, table: Table, weights: Arrays, x: Array) -> Tape:
        tape = Tape(table, {**weights, "x": x})
        tape.outputs = {"y": decoder.final_norm(tape, self.config, "x")}
        return tape

    def _rows(self) -> tuple[Array, Array]:
        """The ids of the text among the rows of the embedding that occur, and those rows."""
        occurring, ids = np.unique(self.inputs["input_ids"], return_inverse=True)
        return ids.reshape(self.inputs["input_ids"].shape), self._rounded(self.stored(f"{EMBEDDING}.weight")[occurring])

    def _logits(self, lane: int, table: Table, x: Array) -> Array:
        """[batch, seq, vocab], a block of the head's rows after the other."""
        linear, weight = table["linear"], self.stored(f"{EMBEDDING}.weight" if self.config.tied else f"{HEAD}.weight")
        assert isinstance(linear, Operation)
        blocks = (weight[start : start + HEAD_ROWS] for start in range(0, len(weight), HEAD_ROWS))
        return np.concatenate(
            [linear.run({"x": x, "weight": self._held(lane, self._rounded(block)), "bias": None})["y"] for block in blocks], axis=-1
        )

    def _weights(self, prefix: str) -> dict[str, Array]:
        return {name: self._rounded(self.stored(name)) for name in decoder.parameter_shapes(self.scalars) if name.startswith(prefix)}

    def _rounded(self, stored: Array) -> Array:
        """The stored values as the dtype holds them, in float64."""
        return np.asarray(round_to(stored.astype(np.float64), self.dtype), np.float64)

    def _held(self, lane: int, value: Array) -> Array:
        return value if lane == 0 else np.asarray(value, compute_dtype(self.dtype))
