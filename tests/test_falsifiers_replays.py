"""Which stored cases are replayed: every one that an attack could have stored, and none that contradicts itself or its claim."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from falsifiers_claims import CLAIMS, LOADED
from terminal_processes import several

from blackswan.contracts.model import Claim
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.runner import engine
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.plugin import EXIT_USAGE
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.validate_case import stored_case

SHIPPED = RealInput(CHECKPOINT, CORPUS_HELDOUT)
Parts = dict[str, Any]
Damage = Callable[[Parts, Parts], Any]
"""Of the header and the arrays."""


def drawn(claim: Claim, dtype: str) -> list[Case]:
    return list(engine.cases(claim, dtype, Options(examples=1), SHIPPED.case if claim.domain.input == "checkpoint" else None))


ONE_OF_EACH = {(claim.operation or claim.check, claim.kind, claim.domain.input): claim for claim in CLAIMS.values()}


def test_what_an_attack_draws_can_be_replayed(tmp_path: Path) -> None:
    """Of a claim of each kind about each operation, rules and the shipped checkpoint among them."""
    path = tmp_path / "case.npz"
    for claim in ONE_OF_EACH.values():
        case = drawn(claim, claim.domain.dtype[-1])[-1]
        case.save(path, claim.id)
        assert stored_case(LOADED, path)[1].digest == case.digest


def stored(folder: Path, name: str, damage: Damage) -> Path:
    path = folder / "case.npz"
    drawn(CLAIMS[name], CLAIMS[name].domain.dtype[0])[-1].save(path, name)
    with np.load(path) as content:
        arrays = dict(content)
    header = json.loads(str(arrays.pop("header")))
    damage(header, arrays)
    np.savez(path, header=np.array(json.dumps(header)), **arrays)
    return path


def header(**changes: Any) -> Damage:
    return lambda header, _: header.update(changes)


def scalars(**changes: Any) -> Damage:
    return lambda header, _: header["scalars"].update(changes)


def sizes(**changes: Any) -> Damage:
    return lambda header, _: header["sizes"].update(changes)


def array(name: str, change: Callable[[Any], Any]) -> Damage:
    return lambda _, arrays: arrays.update({name: change(arrays[name])})


def wider(value: Any) -> Any:
    return np.concatenate([value, value[..., :1]], axis=-1)


BAD: list[tuple[str, Damage, str]] = [
    ("OP-RMSNORM", header(dtype="float64"), "dtype is float64; OP-RMSNORM can be attacked in float32, bfloat16 only"),
    ("OP-RMSNORM", header(seed="one"), "seed is 'one'; expected a whole number"),
    ("OP-RMSNORM", header(seed=10**30), "seed is 1000000000000000000000000000000; expected a whole number from 0 to 9223372036854775807"),
    ("OP-RMSNORM", header(flavour=3), "flavour is 3; expected text"),
    ("OP-RMSNORM", scalars(zzz=1), "scalars.zzz is none of the operation's; expected eps"),
    ("OP-RMSNORM", scalars(eps=10**400), "expected a finite number"),
    ("OP-RMSNORM", sizes(hidden=10**4000), "expected a whole number from 0 to 1099511627776"),
    ("OP-RMSNORM", header(sizes=[3]), "sizes is a list; expected an object"),
    ("OP-RMSNORM", header(scalars=None), "scalars is null; expected an object"),
    ("OP-RMSNORM", lambda header, _: header["scalars"].clear(), "scalars.eps is missing; expected a finite number"),
    ("OP-RMSNORM", scalars(eps="1e-6"), "scalars.eps is '1e-6'; expected a finite number"),
    ("OP-RMSNORM", scalars(eps=float("nan")), "scalars.eps is nan; expected a finite number"),
    ("OP-RMSNORM", scalars(eps=True), "scalars.eps is true; expected a finite number"),
    ("OP-RMSNORM", sizes(hidden="wide"), "sizes.hidden is 'wide'; expected a whole number"),
    ("OP-RMSNORM", lambda header, _: header["sizes"].pop("hidden"), "missing size 'hidden'"),
    ("OP-RMSNORM", array("input:x", wider), "input:x has shape"),
    ("OP-RMSNORM", array("input:x", lambda x: x[0, 0]), "input:x has shape ()"),
    ("OP-RMSNORM", array("input:x", lambda x: x + 1j), "input:x has dtype complex128; expected real numbers"),
    ("OP-RMSNORM", lambda _, arrays: arrays.update({"input:y": np.ones(3)}), "input:y is none of the operation's; expected x, weight"),
    ("OP-RMSNORM-GRADIENT", array("cotangent:y", wider), "cotangent:y has shape"),
    (
        "OP-RMSNORM",
        array("input:x", lambda x: np.full_like(x, np.nan)),
        "input:x is nan at [0, 0]; expected finite numbers, up to 3.403e+38",
    ),
    ("OP-RMSNORM", array("input:weight", lambda weight: weight - np.inf), "input:weight is -inf at [0]; expected finite numbers"),
    ("OP-RMSNORM", array("input:x", lambda x: x * 0.0 + 1e39), "input:x is 1e+39 at [0, 0]; expected finite numbers"),
    ("OP-RMSNORM-GRADIENT", array("cotangent:y", lambda y: y + np.nan), "cotangent:y is nan at"),
    (
        "FWD-DECODER",
        array("input:parameters/model.norm.weight", lambda weight: weight + np.inf),
        "input:parameters/model.norm.weight is inf",
    ),
    ("OP-ROPE", sizes(head_dim=3), "sizes.head_dim is 3; expected"),
    ("OP-ROPE", array("input:positions", lambda positions: positions + 0.5), "input:positions has dtype float64; expected whole numbers"),
    ("OP-POOL", scalars(mode="median"), "scalars.mode is 'median'; expected one of mean, last, first"),
    ("OP-POOL", array("input:mask", lambda mask: mask * 1.0), "input:mask has dtype float64; expected truth values"),
    ("NF4-QUANTIZE", scalars(block_size=7), "scalars.block_size is 7; expected"),
    ("OPT-ADAMW", scalars(step=1.5), "scalars.step is 1.5; expected a whole number"),
    ("FWD-DECODER", scalars(tied="yes"), "scalars.tied is 'yes'; expected true or false"),
    ("FWD-DECODER", lambda _, arrays: arrays.pop("input:parameters/model.norm.weight"), "input:parameters/model.norm.weight is missing"),
    (
        "FWD-DECODER",
        array("input:input_ids", lambda ids: ids + 10**6),
        "input:input_ids is outside its range; expected whole numbers from 0 to below",
    ),
    ("FWD-CHECKPOINT", array("input:mask", lambda mask: mask[:, 1:]), "input:mask has shape"),
    ("C-HP-001-RANGE", scalars(learning_rate="high"), "scalars.learning_rate is 'high'; expected a number"),
    ("C-HP-001-RANGE", lambda header, _: header["scalars"].pop("learning_rate"), "scalars.learning_rate is missing"),
]


@pytest.mark.parametrize(("name", "damage", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_case_that_contradicts_itself_or_its_claim_is_refused(name: str, damage: Damage, words: str, tmp_path: Path) -> None:
    path = stored(tmp_path, name, damage)
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        stored_case(LOADED, path)
    assert str(refused.value).startswith(f"{path}: not a case of {name}: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("OP-RMSNORM", array("input:x", lambda x: np.full_like(x, -3e38))),
        ("OP-RMSNORM", array("input:x", lambda x: x.astype(np.float32))),
        ("OP-RMSNORM", scalars(eps=1)),
        ("C-HP-006-ON", scalars(gradient_clip_norm=None)),
    ],
)
def test_values_may_be_any_that_the_dtype_holds(name: str, damage: Damage, tmp_path: Path) -> None:
    assert stored_case(LOADED, stored(tmp_path, name, damage))[0].id == name


def test_a_case_of_another_operation_is_refused(tmp_path: Path) -> None:
    for operation in ("swiglu", "rms_normal", ["rms_norm"]):
        with pytest.raises(ValueError, match="but OP-RMSNORM is a claim on rms_norm"):
            stored_case(LOADED, stored(tmp_path, "OP-RMSNORM", header(operation=operation)))


def test_a_malformed_case_is_one_line_and_status_4(tmp_path: Path) -> None:
    path = stored(tmp_path, "OP-RMSNORM", scalars(eps=float("nan")))
    (run,) = several([["--replay", str(path), "--verdicts", str(tmp_path / "out" / "replay.jsonl")]])
    run.refuses(EXIT_USAGE, f"blackswan: {path}: not a case of OP-RMSNORM: scalars.eps is nan; expected a finite number")
    assert not (tmp_path / "out").exists()
