"""From a claim's domain to cases: Hypothesis draws sizes, scalars, presence of optional inputs and a seed; the seed fills the arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from blackswan.contracts import sizes as symbolic
from blackswan.contracts.fields import FIELDS
from blackswan.contracts.model import Claim, Range, Scalar, Signature
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.generators import MARGINS, confident, fill, generator_for, model_parameter, scale
from blackswan.falsifiers.numeric.precision import STORAGE, held_dtype, is_real, round_to, signatures
from blackswan.reference.classifier import parameter_shapes as classifier_shapes
from blackswan.reference.classifier import trainable_names
from blackswan.reference.decoder import parameter_shapes as decoder_shapes
from blackswan.reference.table import Array

SEEDS = 2**31
"""The number of seeds."""


@dataclass(frozen=True)
class Draw:
    """A draw of Hypothesis: everything of a case but the numbers."""

    sizes: Mapping[str, int]
    scalars: Mapping[str, Any]
    optional: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def key(self) -> str:
        """The same for the same draw."""
        return repr((sorted(self.sizes.items()), sorted(self.scalars.items()), sorted(self.optional.items()), self.seed))


def draws(claim: Claim, small: bool = False, first_seed: int = 0) -> st.SearchStrategy[Draw]:
    """The domain as a strategy; it shrinks to the smallest sizes, the first of each choice, absent inputs and the first seed.

    With `small` every other size is the smallest of its choice. A search of one example has the simplest only, and so the first seed.
    """
    domain = claim.domain
    signature = signatures()[claim.operation] if claim.operation else None
    kinds = signature.scalars if signature else {}
    sizes = st.fixed_dictionaries({name: _size(choice, small) for name, choice in domain.sizes.items()})
    if domain.require and signature:
        sizes = sizes.filter(lambda drawn: symbolic.holds(domain.require, symbolic.resolve(signature, drawn)))
    return st.builds(
        Draw,
        sizes=sizes,
        scalars=st.fixed_dictionaries({name: _scalar(name, choice, kinds.get(name)) for name, choice in domain.scalars.items()}),
        optional=st.fixed_dictionaries({name: st.sampled_from(presence) for name, presence in domain.optional.items()}),
        seed=st.integers(0, SEEDS - 1).map(lambda drawn: (first_seed + drawn) % SEEDS),
    )


def _size(choice: Any, small: bool) -> st.SearchStrategy[int]:
    values = range(int(choice.min), int(choice.max) + 1) if isinstance(choice, Range) else [int(value) for value in choice]
    drawn = st.integers(values[0], values[-1]) if isinstance(choice, Range) else st.sampled_from(values)
    return st.one_of(st.just(min(values)), drawn) if small else drawn


def _scalar(name: str, choice: Any, scalar: Scalar | None) -> st.SearchStrategy[Any]:
    if not isinstance(choice, Range):
        return st.sampled_from(list(choice))
    if (scalar.type if scalar else FIELDS[name].type) == "int":
        return st.integers(int(choice.min), int(choice.max))
    return st.floats(float(choice.min), float(choice.max), allow_nan=False, allow_infinity=False)


def boundaries(claim: Claim, seed: int) -> Iterator[tuple[Draw, str]]:
    """The named boundary cases, each with its flavour."""
    for boundary in claim.domain.boundary:
        yield Draw(boundary.sizes, boundary.scalars, boundary.optional, seed), boundary.flavour


def build(claim: Claim, draw: Draw, flavour: str, dtype: str) -> Case:
    """The case of a draw in a flavour, its real arrays rounded to what the dtype can hold."""
    if claim.operation is None:
        return Case("", dtype, {}, draw.scalars, draw.seed, flavour, {})
    signature = signatures()[claim.operation]
    sizes = symbolic.resolve(signature, draw.sizes)
    scalars = {**draw.scalars, **{name: sizes[name] for name in signature.attributes}}
    inputs: dict[str, Array] = {}
    first_real = True
    for name, spec in signature.inputs.items():
        if spec.group:
            inputs.update(parameters(spec.group, scalars, flavour, draw.seed, dtype))
            continue
        if spec.optional and draw.optional.get(name) == "absent":
            continue
        array = fill(
            spec, symbolic.shape(spec.shape, sizes), sizes.get(spec.below or ""), flavour, first_real, generator_for(draw.seed, name)
        )
        first_real = first_real and not is_real(array)
        narrow = signature.precision == "storage" and spec.dtype == "real"
        inputs[name] = _representable(array, dtype if narrow else held_dtype("float32", dtype))
    if flavour in MARGINS:
        inputs["logits"] = _representable(confident(inputs, generator_for(draw.seed, flavour), MARGINS[flavour]), dtype)
    cotangents = _cotangents(signature, sizes, draw.seed, dtype) if signature.gradients else {}
    return Case(claim.operation, dtype, sizes, scalars, draw.seed, flavour, inputs, cotangents)


def parameters(group: str, scalars: Mapping[str, Any], flavour: str, seed: int, dtype: str) -> dict[str, Array]:
    """A model's parameters, under `parameters/`: trainable ones as float32 holds them, the rest as the dtype under test does."""
    shapes = classifier_shapes(scalars) if group == "classifier" else decoder_shapes(scalars)
    masters = set(trainable_names(scalars)) if group == "classifier" else set()
    return {
        f"parameters/{name}": _representable(
            model_parameter(name, shape, flavour, generator_for(seed, name)), held_dtype("float32", dtype) if name in masters else dtype
        )
        for name, shape in shapes.items()
    }


def loss_cotangent(seed: int, dtype: str) -> Array:
    """One number of either sign, 1/16 to 16: training differentiates a share of its loss, or a multiple."""
    return _representable(scale(generator_for(seed, "cotangent/loss")), dtype)


def _cotangents(signature: Signature, sizes: Mapping[str, int], seed: int, dtype: str) -> dict[str, Array]:
    """N(0, 1) for each real output; a loss is differentiated alone, whatever other outputs there are."""
    if "loss" in signature.outputs:
        return {"loss": loss_cotangent(seed, dtype)}
    return {
        name: _representable(
            generator_for(seed, f"cotangent/{name}").standard_normal(symbolic.shape(output.shape, sizes)), held_dtype(output.dtype, dtype)
        )
        for name, output in signature.outputs.items()
    }


def _representable(array: Array, dtype: str) -> Array:
    return np.asarray(round_to(array, dtype), np.float64) if is_real(array) and dtype in STORAGE else array
