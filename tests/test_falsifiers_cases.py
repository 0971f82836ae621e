"""Cases: what is drawn is in the domain, finite, representable, repeatable and its own; what is stored comes back bit for bit."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from falsifiers_claims import CLAIMS, ROUNDING, boundary, claim

from blackswan.contracts.model import Claim, Domain, Range
from blackswan.falsifiers.numeric.case import Case, load
from blackswan.falsifiers.numeric.generators import FLAVOURS, MARGINS, generator_for, padding, predicting
from blackswan.falsifiers.numeric.precision import STORAGE, held_dtype, is_real, signatures
from blackswan.falsifiers.numeric.strategies import Draw, boundaries, build
from blackswan.falsifiers.runner import engine
from blackswan.falsifiers.runner.engine import SEEDS_OF_A_DRAW, Options, falsify, replay
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.reference import ReferenceSubject

GENERATED = {(one.operation, one.kind, one.check): one for one in CLAIMS.values() if one.domain.input == "generated" and one.operation}
"""One of each kind and check about each operation."""
SAMPLE = Options(examples=2)
LORA = claim("lora_linear", domain_changes={"sizes": {}, "scalars": {}})
LORA_SIZES = {"rows": 3, "in_features": 5, "out_features": 4, "rank": 2}


def lora(seed: int = 0, flavour: str = "normal", dtype: str = "float32", bias: str = "present", **sizes: int) -> Case:
    return build(LORA, Draw({**LORA_SIZES, **sizes}, {"alpha": 16.0}, {"bias": bias}, seed), flavour, dtype)


def arrays(case: Case) -> dict[str, bytes]:
    return {
        name: value.tobytes() for name, value in {**case.inputs, **{f"d {key}": value for key, value in case.cotangents.items()}}.items()
    }


def drawn(one: Claim, dtype: str | None = None, **options: Any) -> list[Case]:
    return list(engine.cases(one, dtype or one.domain.dtype[0], Options(**{"examples": 2, **options})))


# arrays


def test_the_same_seed_gives_the_same_arrays_and_another_seed_others() -> None:
    assert arrays(lora(7)) == arrays(lora(7))
    assert lora(7).digest == lora(7).digest
    one, other = arrays(lora(7)), arrays(lora(8))
    assert all(one[name] != other[name] for name in one)


def test_an_input_more_changes_no_other() -> None:
    with_bias, without = arrays(lora(7)), arrays(lora(7, bias="absent"))
    assert set(with_bias) - set(without) == {"bias"}
    assert all(with_bias[name] == value for name, value in without.items())
    assert generator_for(1, "x").random() != generator_for(1, "y").random() != generator_for(2, "y").random()


def test_the_digest_sees_every_part_of_a_case() -> None:
    base = lora(7)
    changed = [
        lora(8),
        lora(7, dtype="bfloat16"),
        lora(7, bias="absent"),
        Case(**{**vars_of(base), "scalars": {"alpha": 8.0}}),
        Case(**{**vars_of(base), "inputs": {**base.inputs, "x": np.nextafter(base.inputs["x"], 9.0)}}),
        Case(**{**vars_of(base), "inputs": {**base.inputs, "x": base.inputs["x"].reshape(5, 3)}}),
        Case(**{**vars_of(base), "cotangents": {"y": -base.cotangents["y"]}}),
    ]
    assert len({base.digest, *(case.digest for case in changed)}) == 1 + len(changed)


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def test_a_flavour_is_what_its_name_says() -> None:
    x = {flavour: lora(3, flavour, "float64", in_features=200).inputs["x"] for flavour in FLAVOURS if flavour not in MARGINS}
    assert not x["zeros"].any()
    assert len(np.unique(x["constant"])) == 1
    assert (np.count_nonzero(x["one_hot"], axis=-1) == 1).all()
    assert len(np.unique(x["ties"])) <= 5
    assert 0 < np.abs(x["subnormal"]).max() < 2.0**-126
    assert 2.0**-100 < np.abs(x["minute"]).max() < 2.0**-25
    assert np.abs(x["outliers"]).max() > 20
    assert np.abs(x["wide"]).max() / np.abs(x["wide"]).min() > 1e4
    assert 1e-9 < (x["tiny_norm"] ** 2).mean() < 1e-3
    for flavour in ("zeros", "one_hot", "constant", "tiny_norm", "subnormal"):
        assert np.abs(lora(3, flavour).inputs["weight"]).max() > 0.1, "only the first input takes an extreme flavour"


@pytest.mark.parametrize("flavour", ["normal", "masked", "right_padded", "left_padded"])
def test_masks_have_a_real_token_in_every_sample(flavour: str) -> None:
    for seed in range(40):
        for shape in ((1, 1), (3, 2), (4, 9)):
            mask = padding(np.random.default_rng(seed), shape, flavour)
            assert mask.dtype == bool
            assert mask.shape == shape
            assert mask.any(axis=1).all()
            if flavour == "right_padded":
                assert (np.diff(mask.astype(int), axis=1) <= 0).all()
            if flavour == "left_padded":
                assert (np.diff(mask.astype(int), axis=1) >= 0).all()
    many = np.concatenate([padding(np.random.default_rng(seed), (4, 9), flavour) for seed in range(9)])
    assert many.all() == (flavour == "normal")


# domains


def in_domain(value: Any, choice: Any) -> bool:
    return choice.min <= value <= choice.max if isinstance(choice, Range) else value in choice


@pytest.mark.parametrize("one", GENERATED.values(), ids=lambda one: one.id)
def test_cases_are_in_their_domain(one: Claim) -> None:
    signature = signatures()[one.operation]
    for dtype in one.domain.dtype:
        cases, named = drawn(one, dtype), len(list(engine.Drawing(one, dtype, Options()).first()))
        assert named >= len(one.domain.boundary)
        assert len(cases) >= named + len(one.domain.flavours)
        for case in cases[named:]:
            assert all(in_domain(case.sizes[name], choice) for name, choice in one.domain.sizes.items())
            assert all(in_domain(case.scalars[name], choice) for name, choice in one.domain.scalars.items())
            assert case.flavour in one.domain.flavours
        for case in cases:
            required = {name for name, spec in signature.inputs.items() if not spec.optional and not spec.group}
            assert required <= set(case.inputs)
            assert all(np.isfinite(value).all() for value in case.inputs.values() if is_real(value))
            assert all(type(value) is int for value in case.sizes.values())
            below = {name: spec.below for name, spec in signature.inputs.items() if spec.below}
            assert all(case.inputs[name].max() < case.sizes[size] for name, size in below.items())
            narrow = STORAGE[held_dtype("storage" if signature.precision == "storage" else "float32", dtype)]
            for name, spec in signature.inputs.items():
                if spec.dtype == "real" and name in case.inputs:
                    np.testing.assert_array_equal(case.inputs[name], case.inputs[name].astype(narrow).astype(np.float64))


def test_two_claims_and_two_dtypes_draw_different_examples() -> None:
    one, other = claim(name="ONE"), claim(name="OTHER")
    sizes = [[(case.sizes["hidden"], case.seed) for case in drawn(*which, examples=8)] for which in ((one,), (other,), (one, "bfloat16"))]
    assert sizes[0] != sizes[1] != sizes[2] != sizes[0]
    assert sizes[0] == [(case.sizes["hidden"], case.seed) for case in drawn(one, examples=8)]
    assert sizes[0] != [(case.sizes["hidden"], case.seed) for case in drawn(one, examples=8, seed=1)]


def test_claims_of_the_contracts_share_no_seed() -> None:
    seeds = [engine.own_seed(one, dtype, 0) for one in CLAIMS.values() for dtype in one.domain.dtype]
    assert len(set(seeds)) == len(seeds)


def test_require_filters() -> None:
    even = claim(domain_changes={"require": ("hidden % 2 == 0", "rows < hidden")})
    cases = drawn(even, examples=12)
    assert cases
    assert all(case.sizes["hidden"] % 2 == 0 and case.sizes["rows"] < case.sizes["hidden"] for case in cases)


@pytest.mark.parametrize("named", [(), (boundary(4),)])
def test_a_domain_without_a_case_is_vacuous_even_if_a_boundary_was_compared(named: Any) -> None:
    verdict = falsify(claim(domain_changes={"require": ("hidden > 99",), "boundary": named}), "float32", ReferenceSubject(), SAMPLE)
    assert verdict.state is State.VACUOUS
    assert verdict.reason == "no case of the domain could be drawn"


def test_boundary_cases_always_run_first_and_in_their_flavour() -> None:
    named = claim(domain_changes={"boundary": (boundary(999), boundary(77, "zeros"))})
    assert [(draw.sizes["hidden"], flavour) for draw, flavour in boundaries(named, 0)] == [(999, "normal"), (77, "zeros")]
    for effort in ("quick", "default"):
        cases = list(engine.cases(named, "float32", Options(effort)))[: 2 * SEEDS_OF_A_DRAW]
        assert [(case.sizes["hidden"], case.flavour) for case in cases] == [(999, "normal")] * SEEDS_OF_A_DRAW + [
            (77, "zeros")
        ] * SEEDS_OF_A_DRAW
        assert len({case.digest for case in cases}) == len(cases)
        assert not any(case.inputs["x"].any() for case in cases[SEEDS_OF_A_DRAW:])


def test_each_draw_runs_in_every_flavour_and_effort_sets_the_number_of_draws() -> None:
    wide = claim(domain_changes={"flavours": ("normal", "wide", "zeros")})
    counts = {effort: len(list(engine.cases(wide, "float32", Options(effort)))) for effort in ("quick", "default")}
    assert counts == {"quick": 18, "default": 60}
    assert Options("deep").examples_for(wide) == 1000 // SEEDS_OF_A_DRAW
    assert Options().examples_for(claim(cases=7)) == -(-7 // SEEDS_OF_A_DRAW)
    assert Options("quick").examples_for(claim(cases=1)) == 1
    assert Options().examples_for(claim("decoder_forward", cases=7)) == 7


# files


def stored(tmp_path: Path, case: Case, name: str = "TEST-CLAIM") -> Path:
    path = tmp_path / "deep" / "case.npz"
    case.save(path, name)
    return path


def test_odd_values_survive_a_file(tmp_path: Path) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, -0.0, 5e-324, 0.1 + 0.2]])
    case = Case("softmax", "float32", {"rows": 1}, {"eps": 0.1 + 0.2, "on": True, "mode": "zäh", "none": None}, 3, "normal", {"x": x})
    _, back = load(stored(tmp_path, case))
    assert arrays(back) == arrays(case)
    assert back.scalars == case.scalars
    assert list(tmp_path.rglob("*.partial*")) == []


def test_a_replay_outlives_the_domain_it_was_drawn_from(tmp_path: Path) -> None:
    _, case = load(stored(tmp_path, drawn(claim(), examples=1)[-1]))
    assert replay(claim(), case, ReferenceSubject()).state is State.HELD
    for domain in (Domain(), Domain(sizes={"rows": (999,)}, dtype=("float64",), flavours=("zeros",))):
        assert replay(claim(domain=domain), case, ReferenceSubject()).state is State.HELD


def test_a_replay_in_a_dtype_without_factors_says_so() -> None:
    case = drawn(claim(), examples=1)[-1]
    other = claim(tolerance=type(ROUNDING)("rounding", {"bfloat16": ROUNDING.factors["bfloat16"]}))
    verdict = replay(other, case, ReferenceSubject())
    assert verdict.state is State.VACUOUS
    assert "no factors for float32; it has them for bfloat16" in str(verdict.reason)


def damaged(tmp_path: Path, **header: Any) -> Path:
    path = stored(tmp_path, drawn(claim(), examples=1)[-1])
    with np.load(path) as content:
        parts = dict(content)
    new = {**json.loads(str(parts["header"])), **header}
    np.savez(path, **{**parts, "header": np.array(json.dumps({key: value for key, value in new.items() if value != "drop"}))})  # type: ignore[arg-type]
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def zipped(path: Path, **parts: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def flipped(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 40] = b"\xff" * 40
    return write(path, bytes(content))


def array_file(path: Path, value: Any) -> Path:
    with path.open("wb") as stream:
        np.save(stream, value, allow_pickle=True)
    return path


BAD_FILES: dict[str, Any] = {
    "no file": lambda folder: folder / "nothing.npz",
    "a folder": lambda folder: folder,
    "empty": lambda folder: write(folder / "a.npz", b""),
    "text": lambda folder: write(folder / "a.npz", b"claim: OP-RMSNORM\n"),
    "zip magic only": lambda folder: write(folder / "a.npz", b"PK\x03\x04"),
    "truncated": lambda folder: write(folder / "a.npz", stored(folder, lora()).read_bytes()[:300]),
    "flipped bytes": lambda folder: flipped(stored(folder, lora())),
    "another zip": lambda folder: zipped(folder / "a.npz", readme=b"hello"),
    "a plain array": lambda folder: array_file(folder / "a.npz", np.zeros(3)),
    "a pickle": lambda folder: array_file(folder / "a.npz", np.array([{"a": 1}], object)),
    "a header of another kind": lambda folder: damaged_header(folder, "[1, 2]"),
    "a header of text": lambda folder: damaged_header(folder, '"OP-RMSNORM"'),
    "a header that is not JSON": lambda folder: damaged_header(folder, "{"),
    "no claim": lambda folder: damaged(folder, claim="drop"),
    "no seed": lambda folder: damaged(folder, seed="drop"),
    "a key too many": lambda folder: damaged(folder, colour="red"),
}


def damaged_header(folder: Path, text: str) -> Path:
    np.savez(folder / "a.npz", header=np.array(text))
    return folder / "a.npz"


@pytest.mark.parametrize("bad", BAD_FILES)
def test_a_file_that_is_no_case_is_refused_by_name(bad: str, tmp_path: Path) -> None:
    path = BAD_FILES[bad](tmp_path)
    with pytest.raises(ValueError, match="expected a case written by a falsified claim") as refused:
        load(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value).strip()


@pytest.mark.parametrize("flavour", ["normal", "right_padded", "left_padded", "masked"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 5)])
def test_a_mask_of_a_token_stream_has_a_token_to_predict(shape: tuple[int, int], flavour: str) -> None:
    masks = [predicting(np.random.default_rng(seed), shape, flavour) for seed in range(300)]
    assert all((mask[:, 1:] & mask[:, :-1]).any() for mask in masks)
    assert flavour == "normal" or shape == (1, 2) or not all(mask.all() for mask in masks)
    assert flavour != "left_padded" or all(mask[:, -1].all() for mask in masks)
    assert flavour != "right_padded" or all(mask[:, 0].all() for mask in masks)
    assert flavour != "masked" or shape == (1, 2) or any(not (mask[:, 1:] & mask[:, :-1]).any(axis=1).all() for mask in masks)
