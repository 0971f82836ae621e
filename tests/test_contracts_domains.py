"""Domains by name: a claim that uses one is as if it had written it out, and its mistakes have the line where they stand."""

from pathlib import Path

import pytest
import torch

from blackswan.contracts import DTYPES, FLAVOURS, ContractError, Range, load
from blackswan.falsifiers.numeric.generators import FLAVOURS as GENERATORS
from blackswan.falsifiers.numeric.precision import STORAGE

HEAD = """\
contract: small
version: 1.0.0
title: Small
domains:
  rows:
    sizes: {rows: {min: 1, max: 4}, hidden: [8]}
    dtype: [float32]
    scalars: {eps: [1.0e-6]}
  wide:
    use: rows
    sizes: {hidden: [64]}
    flavours: [wide]
claims:
"""
CLAIM = """\
  - id: SMALL-{name}
    severity: P0
    kind: parity
    operation: rms_norm
    statement: RMSNorm equals the reference.
    domain: {domain}
    tolerance: {{basis: rounding, factors: {{rms: 1, row: 1, max: 1}}}}
    must_catch: [rms_norm_eps_hard_coded]
"""
BOTH = ["{use: rows}", "{use: wide}"]


def written(folder: Path, domains: list[str], head: str = HEAD) -> Path:
    path = folder / "small-v1.yaml"
    claims = (CLAIM.format(name=chr(ord("A") + index), domain=domain) for index, domain in enumerate(domains))
    path.write_text(head + "".join(claims), encoding="utf-8")
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(ContractError) as caught:
        load([path])
    return [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]


def test_a_claim_takes_what_it_does_not_say_itself(tmp_path: Path) -> None:
    domains = [
        "{use: wide, sizes: {rows: [2]}, dtype: [bfloat16]}",
        "{use: rows, scalars: {eps: [1.0e-5]}, boundary: [{sizes: {rows: 3}}]}",
    ]
    first, second = load([written(tmp_path, domains)])[0].claims
    assert first.domain.sizes == {"rows": (2,), "hidden": (64,)}
    assert (first.domain.dtype, first.domain.flavours, first.domain.scalars) == (("bfloat16",), ("wide",), {"eps": (1e-6,)})
    assert second.domain.sizes == {"rows": Range(1, 4), "hidden": (8,)}
    assert (second.domain.scalars, second.domain.boundary[0].sizes) == ({"eps": (1e-5,)}, {"rows": 3, "hidden": 8})


def test_a_claim_that_uses_a_domain_is_the_claim_that_writes_it_out(tmp_path: Path) -> None:
    used = load([written(tmp_path, BOTH)])[0].claims[1]
    plain = "{sizes: {rows: {min: 1, max: 4}, hidden: [64]}, dtype: [float32], scalars: {eps: [1.0e-6]}, flavours: [wide]}"
    alone = HEAD.split("  wide:")[0] + "claims:\n"
    out = load([written(tmp_path, [*BOTH[:1], plain], alone)])
    assert out[0].claims[1].content == used.content
    assert out[0].claims[1].domain == used.domain


@pytest.mark.parametrize(
    ("domains", "old", "new", "expected"),
    [
        (["{use: row}", *BOTH], "", "", ["19: claims[0].domain.use: unknown domain 'row'; expected one of rows, wide; did you mean 'rows"]),
        (["{use: rows}"], "", "", ["9: domains.wide: is used by no claim of this file"]),
        (["{use: rows, sizes: {hiden: 3}}", *BOTH], "", "", ["19: claims[0].domain.sizes.hiden: unknown size 'hiden'; "]),
        (BOTH, "hidden: [8]", "hiden: [8]", ["6: domains.rows.sizes.hiden: unknown size 'hiden'; ", "6: domains.rows.sizes: missing size"]),
        (BOTH, "hidden: [64]", "hidden: []", ["11: domains.wide.sizes.hidden: is empty"]),
        (BOTH, "[wide]", "[wde]", ["12: domains.wide.flavours[0]: unknown flavours 'wde'; expected one of "]),
        (BOTH, "[float32]", "[fp32]", ["7: domains.rows.dtype[0]: unknown dtype 'fp32'"]),
        (BOTH, "eps:", "epsilon:", ["8: domains.rows.scalars.epsilon: unknown scalar", "8: domains.rows.scalars: missing scalar 'eps'"]),
        (BOTH, "dtype: [float32]", "dtpe: [float32]", ["7: domains.rows.dtpe: unknown key 'dtpe'", "19: claims[0].domain: missing key"]),
        (BOTH, "use: rows", "use: wide", ["10: domains.wide.use: the domain 'wide' uses itself"]),
        (BOTH, "use: rows", "use: 3", ["10: domains.wide.use: is 3; expected a lower-case name"]),
        (["{use: 3}", *BOTH], "", "", ["19: claims[0].domain.use: is 3; expected "]),
    ],
)
def test_a_mistake_has_the_line_where_it_stands(tmp_path: Path, domains: list[str], old: str, new: str, expected: list[str]) -> None:
    found = problems(written(tmp_path, domains, HEAD.replace(old, new) if old else HEAD))
    for message in expected:
        assert any(problem.startswith(message) for problem in found), found
    assert len(found) == len(set(found))


def test_an_unknown_flavour_is_told_what_each_flavour_is(tmp_path: Path) -> None:
    (found,) = problems(written(tmp_path, ["{use: rows}", "{use: wide, flavours: [wde]}"]))
    assert "did you mean 'wide'?" in found
    for name, line in FLAVOURS.items():
        assert f"{name}: {line}" in found


def test_every_flavour_that_claims_may_name_is_drawn_and_no_other() -> None:
    assert set(GENERATORS) == set(FLAVOURS)


def test_the_table_of_dtypes_says_what_numpy_and_torch_say() -> None:
    assert len(DTYPES) == 5
    for name, dtype in DTYPES.items():
        assert dtype.unit_roundoff == torch.finfo(getattr(torch, dtype.storage)).eps / 2, name
        assert str(STORAGE[name]) == dtype.storage
