"""Contract files as strangers write them: each mistake has one clear message at its line, and nothing is loaded."""

import contextlib
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from blackswan.contracts import ContractError, Range, Vocabulary, contract_digest, load, load_operations
from blackswan.contracts.model import Check, Factors, Location, Mutant
from blackswan.contracts.problems import Problem

NOWHERE = Location("vocabulary.yaml", 1)
OPERATIONS = load_operations()
VOCABULARY = Vocabulary(
    OPERATIONS,
    {
        "softmax_sums_to_one": Check("softmax_sums_to_one", ("invariant", "bound"), "The entries sum to 1.", NOWHERE),
        "loads_twice_alike": Check("loads_twice_alike", ("determinism", "rejection"), "Two loads agree.", NOWHERE),
    },
    {
        name: Mutant(name, "rms_norm", ("S2",), "Another epsilon.", NOWHERE)
        for name in ("rms_norm_eps_hard_coded", "rms_norm_mean_subtracted")
    },
)
GOOD: dict[str, Any] = {
    "contract": "forward-parity",
    "version": "1.0.0",
    "title": "The device computes what the reference computes",
    "sources": {"higham2002": {"cite": "Higham, Accuracy and Stability", "locator": "§3.1"}},
    "claims": [
        {
            "id": "FWD-RMSNORM",
            "severity": "P0",
            "kind": "parity",
            "operation": "rms_norm",
            "statement": "RMSNorm equals the reference.",
            "domain": {
                "sizes": {"rows": {"min": 1, "max": 64}, "hidden": [32, 64]},
                "dtype": ["float32", "bfloat16"],
                "scalars": {"eps": [1.0e-6, 1.0e-5]},
                "flavours": ["normal", "wide"],
            },
            "tolerance": {"basis": "rounding", "factors": {"rms": 1.5, "row": 4, "max": 3}},
            "must_catch": ["rms_norm_eps_hard_coded"],
            "sources": {"higham2002": "§3.1"},
        }
    ],
}
CLAIM = GOOD["claims"][0]


def write(folder: Path, content: Any, name: str = "forward-parity-v1.yaml") -> Path:
    path = folder / name
    text = content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True, sort_keys=False)
    path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path) -> list[Problem]:
    with pytest.raises(ContractError) as caught:
        load([path], VOCABULARY)
    assert caught.value.problems
    assert str(caught.value).count("\n") + 1 == len(caught.value.problems)
    return list(caught.value.problems)


def changed(**claim: Any) -> dict[str, Any]:
    """The good contract with keys of its claim replaced; `domain__sizes` reaches inside, ... removes."""
    content = copy.deepcopy(GOOD)
    for path, value in claim.items():
        *parents, last = path.split("__")
        place = content["claims"][0]
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    return content


def test_the_good_contract_loads_completely(tmp_path: Path) -> None:
    (contract,) = load([write(tmp_path, GOOD)], VOCABULARY)
    (claim,) = contract.claims
    assert contract.sources["higham2002"].locator == "§3.1"
    assert claim.domain.sizes == {"rows": Range(1, 64), "hidden": (32, 64)}
    assert claim.domain.scalars == {"eps": (1e-6, 1e-5)}
    assert claim.tolerance.factors == {"float32": Factors(1.5, 4, 3), "bfloat16": Factors(1.5, 4, 3)}
    assert claim.location.file == str(tmp_path / "forward-parity-v1.yaml")
    assert claim.location.line == 1 + (tmp_path / "forward-parity-v1.yaml").read_text().split("\n").index("- id: FWD-RMSNORM")


def test_defaults_of_the_signature_complete_the_domain(tmp_path: Path) -> None:
    content = changed(
        operation="adamw_step",
        domain={
            "sizes": {"count": 8},
            "dtype": ["float32"],
            "scalars": {"step": {"min": 1, "max": 9}, "learning_rate": 1, "eps": [1e-8, 1]},
            "boundary": [{"scalars": {"step": 9}}],
        },
    )
    (claim,) = load([write(tmp_path, content)], VOCABULARY)[0].claims
    scalars = claim.domain.scalars
    assert scalars["beta1"] == (0.9,)
    assert scalars["learning_rate"] == (1.0,)
    assert isinstance(scalars["learning_rate"][0], float)  # type: ignore[index]  # a tuple, as asserted above
    assert claim.domain.boundary[0].scalars == {
        "step": 9, "learning_rate": 1.0, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01,
    }  # fmt: skip
    assert claim.domain.boundary[0].sizes == {"count": 8}
    assert claim.domain.flavours == ("normal",)


def test_both_states_of_an_optional_input_are_drawn_unless_one_is_chosen(tmp_path: Path) -> None:
    domain = {"sizes": {"rows": 1, "in_features": 2, "out_features": 3}, "dtype": ["float32"]}
    both = load([write(tmp_path, changed(operation="linear", domain=domain))], VOCABULARY)[0].claims[0]
    one = load([write(tmp_path, changed(operation="linear", domain={**domain, "optional": {"bias": ["present"]}}))], VOCABULARY)[0].claims[
        0
    ]
    assert both.domain.optional == {"bias": ("absent", "present")}
    assert one.domain.optional == {"bias": ("present",)}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "is empty"),
        ("# only a comment\n", 1, "is empty"),
        ("- a\n- b\n", 1, "is not a mapping"),
        ("just words\n", 1, "is not a mapping"),
        ("contract: x\n  title: y\n", 2, "is not YAML: mapping values are not allowed"),
        ("contract: [x\n", 2, "is not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "is not YAML: but found another document"),
        ("a: *nowhere\n", 1, "is not YAML: found undefined alias"),
        ("a: \x00\n", 1, "is not YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a'; first given in line 1"),
        ("a:\n  b: 1\n  b: 2\n", 3, "a.b: duplicate key 'b'; first given in line 2"),
        ("1: x\n", 1, "the key '1' is not text"),
        ("null: x\n", 1, "the key 'null' is not text"),
        ("? [a, b]\n: x\n", 1, "is not text"),
        ("a: !!python/object:os.system {}\n", 1, "unsupported tag"),
        ("a: !!binary aGk=\n", 1, "unsupported tag"),
        ("a: &me\n  b: *me\n", 1, "the alias refers to itself"),
        ("a: " + "1" * 5000 + "\n", 1, "cannot be read as a number"),
        ("a: " + "[" * 300 + "]" * 300 + "\n", 1, "is nested more than 40 levels deep"),
        ("a: " + "[" * 900, 1, "is nested more than 40 levels deep"),
    ],
)
def test_files_that_are_no_contract_at_all(tmp_path: Path, text: str, line: int, message: str) -> None:
    found = problems(write(tmp_path, text))
    assert any(message in str(problem) and problem.line == line for problem in found), [*map(str, found)]


def test_bytes_that_are_not_text_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "forward-parity-v1.yaml"
    path.write_bytes(b"contract: x\ntitle: \xff\n")
    (problem,) = problems(path)
    assert (problem.line, problem.message) == (2, "is not UTF-8: byte 0xff")


def test_unreadable_and_missing_files(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "absent-v1.yaml")[0].message
    assert "has no contracts" in problems(tmp_path)[0].message
    (tmp_path / "folder-v1.yaml").mkdir()
    assert "has no contracts" in problems(tmp_path / "folder-v1.yaml")[0].message


@pytest.mark.parametrize("name", ["mine.yaml", "mine-v1.yml"])
def test_a_contract_that_nobody_would_read_is_a_problem(tmp_path: Path, name: str) -> None:
    write(tmp_path, yaml.safe_dump(GOOD))
    assert [contract.name for contract in load([tmp_path], VOCABULARY)] == ["forward-parity"]
    (tmp_path / name).write_text("contract: mine\n")
    (problem,) = problems(tmp_path)
    assert name in str(problem)
    assert "is read by nobody; expected a contract to be named *-v*.yaml, such as mine" in problem.message


def test_aliases_of_aliases_do_not_grow_without_limit(tmp_path: Path) -> None:
    wide = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
    deep = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))
    assert "grows by its aliases" in problems(write(tmp_path, wide))[0].message
    assert "grows by its aliases" in problems(write(tmp_path, deep))[0].message


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5), ("1E+5", 1e5), (".5", 0.5), ("1.", 1.0), ("010", 10), ("0x1f", 31), ("0o17", 15), ("true", True), ("~", None),
        ("on", "on"), ("no", "no"), ("1_000", "1_000"), ("1:30", "1:30"), ("2020-01-01", "2020-01-01"), ("1.0.0", "1.0.0"), ("=", "="),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, written: str, value: Any) -> None:
    from blackswan.contracts.document import read

    path = write(tmp_path, f"a: {written}\n")
    assert read(path).data == {"a": value}
    assert type(read(path).data["a"]) is type(value)


# What is changed in the good claim, the key path of the problem, and what the message must say.
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"severty": "P0"}, "severty", "unknown key 'severty'; expected one of"),
    ({"severty": "P0"}, "severty", "did you mean 'severity'?"),
    ({"severity": ...}, "", "missing key 'severity'"),
    ({"severity": "P3"}, "severity", "unknown severity 'P3'; expected one of P0, P1, P2"),
    ({"kind": "parety"}, "kind", "did you mean 'parity'?"),
    ({"id": "fwd-rmsnorm"}, "id", "is 'fwd-rmsnorm'; expected an upper-case id"),
    ({"statement": " "}, "statement", "is ' '; expected text that is not blank"),
    ({"statement": 3}, "statement", "is 3; expected text"),
    ({"operation": "rmsnorm"}, "operation", "unknown operation 'rmsnorm'"),
    ({"operation": "rmsnorm"}, "operation", "did you mean 'rms_norm'?"),
    ({"operation": ...}, "", "missing key 'operation' (kind: parity)"),
    ({"cases": 0}, "cases", "is 0; expected at least 1"),
    ({"cases": 1.0}, "cases", "is 1.0; expected an integer"),
    ({"cases": True}, "cases", "is true; expected an integer"),
    ({"must_catch": []}, "must_catch", "is empty"),
    ({"must_catch": ...}, "", "missing key 'must_catch'"),
    ({"must_catch": ["rms_norm_eps_hardcoded"]}, "must_catch[0]", "did you mean 'rms_norm_eps_hard_coded'?"),
    ({"must_catch": ["rms_norm_eps_hard_coded"] * 2}, "must_catch", "contains 'rms_norm_eps_hard_coded' twice"),
    (
        {"sources": {"higham2022": "§3"}},
        "sources.higham2022",
        "unknown source 'higham2022'; expected higham2002; did you mean 'higham2002'?",
    ),
    ({"rule": {}}, "rule", "is not allowed here (kind: parity)"),
    ({"check": "softmax_sums_to_one"}, "check", "is not allowed here (kind: parity)"),
    ({"tolerance": ...}, "", "missing key 'tolerance' (kind: parity)"),
    ({"kind": "invariant"}, "", "missing key 'check' (kind: invariant)"),
    ({"kind": "invariant", "check": "softmax_sum_to_one"}, "check", "did you mean 'softmax_sums_to_one'?"),
    ({"kind": "metamorphic", "check": "softmax_sums_to_one"}, "check", "is for invariant, bound; the claim's kind is metamorphic"),
    ({"backend": "cuda"}, "backend", "unknown backend 'cuda'; expected one of fused, torch, triton"),
    ({"backend": "triton", "domain__dtype": ["float32", "float64"]}, "backend", "its kernels have no float64"),
    ({"kind": "gradient", "operation": "clip_by_global_norm"}, "kind", "the operation 'clip_by_global_norm' has no gradients"),
    ({"domain__size": {}}, "domain.size", "did you mean 'sizes'?"),
    ({"domain__sizes": ...}, "domain", "missing key 'sizes'"),
    ({"domain__dtype": ...}, "domain", "missing key 'dtype'"),
    ({"domain__dtype": []}, "domain.dtype", "is empty"),
    ({"domain__dtype": ["fp32"]}, "domain.dtype[0]", "unknown dtype 'fp32'"),
    ({"domain__flavours": ["onehot"]}, "domain.flavours[0]", "did you mean 'one_hot'?"),
    ({"domain__input": "none"}, "domain.sizes", "is not allowed here (input: none)"),
    ({"domain__sizes__hiden": 3}, "domain.sizes.hiden", "unknown size 'hiden'; expected one of hidden, rows; did you mean 'hidden'?"),
    ({"domain__sizes": {"rows": 1}}, "domain.sizes", "missing size 'hidden' of the operation 'rms_norm'"),
    ({"domain__sizes__rows": {"min": 3, "max": 2}}, "domain.sizes.rows", "the range is empty: min 3 is more than max 2"),
    ({"domain__sizes__rows": {"min": 3}}, "domain.sizes.rows", "missing key 'max'"),
    ({"domain__sizes__rows": {"min": 3, "max": 4, "step": 1}}, "domain.sizes.rows.step", "expected one of max, min"),
    ({"domain__sizes__rows": {"min": 1.0, "max": 2}}, "domain.sizes.rows.min", "is 1.0; expected an integer"),
    ({"domain__sizes__rows": -1}, "domain.sizes.rows", "is -1; expected at least 0"),
    ({"domain__sizes__rows": "many"}, "domain.sizes.rows", "is 'many'; expected a range {min, max}, a list of choices or one integer"),
    ({"domain__sizes__rows": []}, "domain.sizes.rows", "is empty"),
    ({"domain__require": ["hidden % 3 == 0 and hidden < 64"]}, "domain.require", "the domain is empty: none of the 128 size combinations"),
    ({"domain__require": ["+".join(["hidden"] * 2_000) + ">1"]}, "domain.require[0]", "of 14,001 characters; expected at most 300"),
    ({"domain__sizes__rows": {"min": 1, "max": 10**30}}, "domain.sizes.rows.max", "expected at most 1099511627776"),
    ({"domain__sizes__rows": [10**30]}, "domain.sizes.rows[0]", "expected at most 1099511627776"),
    ({"domain__require": ["hiden > 1"]}, "domain.require[0]", "did you mean 'hidden'?"),
    ({"domain__require": ["hidden + 1"]}, "domain.require[0]", "is not a condition"),
    ({"domain__require": ["hidden ="]}, "domain.require[0]", "is not an expression"),
    ({"domain__require": ["__import__('os').system('true') == 0"]}, "domain.require[0]", "uses what a size expression cannot (Call)"),
    ({"domain__require": ["hidden // (rows - rows) == 1"]}, "domain.sizes", "divides by zero with hidden = 32, rows = 1"),
    ({"domain__scalars": {}}, "domain.scalars", "missing scalar 'eps' of the operation 'rms_norm'"),
    ({"domain__scalars": {"epsilon": 1e-5}}, "domain.scalars.epsilon", "did you mean 'eps'?"),
    ({"domain__scalars__eps": "small"}, "domain.scalars.eps", "is 'small'; expected a number"),
    ({"domain__scalars__eps": [True]}, "domain.scalars.eps", "is true; expected a number"),
    ({"domain__scalars__eps": float("nan")}, "domain.scalars.eps", "expected a range {min, max}, a list of choices or one value"),
    ({"domain__scalars__eps": {"min": 1, "max": float("inf")}}, "domain.scalars.eps.max", "is inf; expected a finite number"),
    ({"domain__scalars__eps": {"min": 1e-5, "max": 1e-6}}, "domain.scalars.eps", "the range is empty"),
    ({"domain__optional": {"bias": ["present"]}}, "domain.optional.bias", "unknown optional input 'bias'; nothing is declared"),
    ({"domain__boundary": [{"sizes": {"rows": 0}}]}, "domain.boundary[0].sizes.rows", "0 is outside the domain 1 to 64"),
    ({"domain__boundary": [{"sizes": {"row": 1}}]}, "domain.boundary[0].sizes.row", "did you mean 'rows'?"),
    ({"domain__boundary": [{"scalars": {"eps": 1e-3}}]}, "domain.boundary[0].scalars.eps", "0.001 is outside the domain 1e-06, 1e-05"),
    ({"domain__boundary": [{"flavour": "zeros"}]}, "domain.boundary[0].flavour", "'zeros' is outside the domain's normal, wide"),
    (
        {"domain__boundary": [{}], "domain__require": ["rows > 1"]},
        "domain.boundary[0]",
        "does not meet 'rows > 1' with rows = 1, hidden = 32",
    ),
    ({"tolerance": {"factors": {}}}, "tolerance", "missing key 'basis'"),
    ({"tolerance": {"basis": "rounded"}}, "tolerance.basis", "did you mean 'rounding'?"),
    ({"tolerance": {"basis": "rounding"}}, "tolerance", "has no factors for FWD-RMSNORM in bfloat16; measure them: "),
    ({"tolerance": {"basis": "exact", "value": 0}}, "tolerance.value", "unknown key 'value'; expected basis (basis: exact)"),
    ({"tolerance": {"basis": "literal", "value": 1}}, "tolerance", "missing key 'unit' (basis: literal)"),
    ({"tolerance": {"basis": "literal", "value": 1}}, "tolerance", "missing key 'source' (basis: literal)"),
    ({"tolerance": {"basis": "literal", "value": -1, "unit": "ulp", "source": "x"}}, "tolerance.value", "is -1; expected at least 0"),
    ({"tolerance__factors__rms": 0}, "tolerance.factors.rms", "is 0; expected more than 0"),
    ({"tolerance__factors__rms": float("nan")}, "tolerance.factors.rms", "is nan; expected a finite number"),
    ({"tolerance__factors__row": ...}, "tolerance.factors", "missing factor 'row'"),
    ({"tolerance__factors__float32": {"rms": 1, "row": 1, "max": 1}}, "tolerance.factors.float32", "not by both"),
    ({"tolerance__factors": {"float32": {"rms": 1, "row": 1, "max": 1}}}, "tolerance.factors", "missing factors for the dtype bfloat16"),
    (
        {"tolerance__factors": {name: {"rms": 1, "row": 1, "max": 1} for name in ("float32", "bfloat16", "float16")}},
        "tolerance.factors.float16",
        "the domain has no dtype float16; expected exactly bfloat16, float32",
    ),
    (
        {"tolerance": {"basis": "band", "low": 2, "high": 1, "n": 3, "confidence": 0.9, "source": "x"}},
        "tolerance.low",
        "the band is empty: low 2 is not less than high 1",
    ),
    (
        {"tolerance": {"basis": "band", "low": 0, "high": 1, "n": 3, "confidence": 1, "source": "x"}},
        "tolerance.confidence",
        "is 1; expected less than 1",
    ),
]


@pytest.mark.parametrize(
    ("mistake", "key", "message"), MISTAKES, ids=[f"{key or 'claim'}-{index}" for index, (_, key, _) in enumerate(MISTAKES)]
)
def test_each_mistake_has_its_message_at_its_line(tmp_path: Path, mistake: dict[str, Any], key: str, message: str) -> None:
    path = write(tmp_path, changed(**mistake))
    found = problems(path)
    expected = f"claims[0].{key}" if key else "claims[0]"
    matching = [problem for problem in found if problem.key == expected and message in problem.message]
    assert matching, [*map(str, found)]
    line = path.read_text(encoding="utf-8").split("\n")[matching[0].line - 1]
    last = key.split(".")[-1].split("[")[0] or "id"
    assert f"{last}:" in line or line.strip().startswith("- "), line
    assert str(matching[0]).startswith(f"{path}:{matching[0].line}: {expected}: ")


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"contract": "other"}, "contract", "is 'other' in the file forward-parity-v1.yaml; expected other-v1.yaml"),
        ({"version": "2.0.0"}, "version", "the major versions must be equal"),
        ({"version": "1.0"}, "version", "expected a semantic version"),
        ({"version": 1.0}, "version", "is 1.0; expected a semantic version such as 1.0.0"),
        ({"titel": "x"}, "titel", "did you mean 'title'?"),
        ({"claims": []}, "claims", "is empty"),
        ({"claims": {}}, "claims", "is an empty mapping; expected a list"),
        ({"claims": [3]}, "claims[0]", "is 3; expected a mapping"),
        ({"sources": {"higham2002": {}}}, "sources.higham2002", "missing key 'cite'"),
        ({"sources": []}, "sources", "is an empty list; expected a mapping"),
    ],
)
def test_mistakes_outside_claims(tmp_path: Path, change: dict[str, Any], key: str, message: str) -> None:
    found = problems(write(tmp_path, {**copy.deepcopy(GOOD), **change}))
    assert any(problem.key == key and message in problem.message for problem in found), [*map(str, found)]


def test_every_problem_of_every_file_is_collected(tmp_path: Path) -> None:
    bad = copy.deepcopy(GOOD)
    second = copy.deepcopy(CLAIM)
    second["operation"] = "rmsnorm"
    bad["claims"][0]["severity"] = "P9"
    bad["claims"].append(second)
    write(tmp_path, bad)
    write(tmp_path, "a: 1\na: 2\n", "broken-v1.yaml")
    text = [str(problem) for problem in problems(tmp_path)]
    assert sum("P9" in line for line in text) == 1
    assert sum("rmsnorm" in line for line in text) == 1
    assert sum("duplicate claim id 'FWD-RMSNORM'; first given at" in line for line in text) == 1
    assert sum("duplicate key 'a'" in line for line in text) == 1


def test_a_size_that_follows_from_others_is_not_given(tmp_path: Path) -> None:
    domain = {
        "sizes": {"batch": 1, "seq": 1, "heads": 1, "half_dim": 2, "head_dim": 4},
        "dtype": ["float32"],
        "scalars": {"theta": 10000.0},
    }
    assert "'head_dim' follows from '2 * half_dim'" in problems(write(tmp_path, changed(operation="rope", domain=domain)))[0].message


def test_the_digest_is_blind_to_form_and_sees_content(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return contract_digest(load([write(tmp_path, text)], VOCABULARY)[0].claims[0])

    plain = yaml.safe_dump(GOOD, allow_unicode=True, sort_keys=False)
    reformed = "# a comment\n" + yaml.safe_dump(GOOD, allow_unicode=True, sort_keys=True, default_flow_style=True)
    assert plain != reformed
    assert digest(plain) == digest(reformed)
    assert digest(plain) == digest(plain.replace("1.0e-05", "1e-5"))
    assert digest(plain) != digest(plain.replace("rms: 1.5", "rms: 1.6"))
    assert digest(plain) != digest(plain.replace("rows:\n        min: 1", "rows:\n        min: 2"))


def test_an_operation_that_is_called_exists(tmp_path: Path) -> None:
    path = tmp_path / "operations.yaml"
    text = (Path(__file__).parents[1] / "contracts" / "operations.yaml").read_text()
    path.write_text(text.replace("classifier_forward, classifier_loss, ", "classifier_forward, classifier_los, "))
    with pytest.raises(ContractError, match="classifier_los"):
        load_operations(path)


def test_a_large_unsatisfiable_domain_is_found_by_sampling(tmp_path: Path) -> None:
    sizes = {"rows": {"min": 1, "max": 10**6}, "hidden": {"min": 1, "max": 10**6}}
    found = problems(write(tmp_path, changed(domain__sizes=sizes, domain__require=["hidden > rows", "rows > hidden"])))
    assert "sampled size combinations meets 'hidden > rows' and 'rows > hidden'" in found[0].message


def test_no_single_replaced_value_ends_in_a_traceback(tmp_path: Path) -> None:
    """Every value of the good contract in turn becomes something foreign: the answer is a contract or a ContractError."""

    def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return [path, *itertools.chain.from_iterable(places(value, (*path, key)) for key, value in items)]

    accepted = tried = 0
    strange: list[Any] = [None, True, -1, 0.5, float("nan"), "", "x", [], [None], [[]], {}, {"min": 1}, {"x": {"y": 1}}, 10**400]
    strange += [{"min": 0, "max": 10**400}, "+".join(["1"] * 2_000)]
    for path, value in itertools.product(places(GOOD)[1:], strange):
        tried += 1
        content = copy.deepcopy(GOOD)
        place = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with contextlib.suppress(ContractError):
            load([write(tmp_path, content)], VOCABULARY)
            accepted += 1
    assert 0 < accepted < tried / 4
