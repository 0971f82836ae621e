"""Hyperparameter rules: they report, their advice heals, nothing missing raises, and a user's YAML is enough for a new one."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from blackswan.contracts import ContractError, Vocabulary, load
from blackswan.contracts.advice import check
from blackswan.contracts.fields import CONFIG, STATISTICS, ConfigError, variables
from blackswan.contracts.model import Claim
from blackswan.contracts.rules import apply

EMPTY = Vocabulary({}, {}, {})
FILE = Path(__file__).parent.parent / "contracts" / "qlora-hyperparameters-v1.yaml"
RULES = load([FILE])[0].claims
ANCESTOR_DEFAULTS: dict[str, Any] = {
    "num_classes": 5, "lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-4, "epochs": 3, "max_seq_len": 512, "log_interval": 100,
    "batch_size": 32, "accumulation_steps": 1, "gradient_clip_norm": 1.0, "class_weights": None, "quantize_nf4": False,
    "model_params": 494_032_768,
}  # fmt: skip
QLORA_PAPER: dict[str, Any] = {
    "lora_rank": 64, "lora_alpha": 16, "learning_rate": 2e-4, "batch_size": 4, "accumulation_steps": 4, "gradient_clip_norm": 0.3,
    "warmup_fraction": 0.03, "weight_decay": 0.0, "quantize_nf4": True, "model_params": 6_738_415_616,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "num_classes": 2, "lora_rank": 16, "lora_alpha": 32.0, "learning_rate": 2e-4, "epochs": 3, "max_seq_len": 256, "log_interval": 100,
    "batch_size": 16, "accumulation_steps": 1, "gradient_clip_norm": 1.0, "class_weights": None, "quantize_nf4": True,
    "warmup_fraction": 0.06, "weight_decay": 0.01, "lora_targets": ["q_proj", "v_proj"], "pooling": "mean", "model_params": 494_032_768,
}  # fmt: skip

reals = st.floats(-10, 1e5, allow_nan=False) | st.sampled_from([0.0, 0.01, 0.03, 0.1, 5e-5, 1e-4, 1.5e-4, 2e-4, 5e-4, 1.0, 32.0])
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "lora_rank": st.integers(-2, 512), "lora_alpha": reals, "learning_rate": reals, "epochs": st.integers(-2, 50),
        "max_seq_len": st.integers(-2, 40_000), "batch_size": st.integers(-2, 300), "accumulation_steps": st.integers(-2, 100),
        "gradient_clip_norm": st.none() | reals, "quantize_nf4": st.booleans(), "warmup_fraction": reals, "weight_decay": reals,
        "class_weights": st.none() | st.lists(st.floats(0, 5), max_size=4), "lora_targets": st.lists(st.sampled_from(["q_proj", "o_proj"])),
        "pooling": st.sampled_from(["mean", "last"]),
        "model_params": st.integers(1, 10**12) | st.sampled_from([13 * 10**9, 13 * 10**9 + 1]),
    },
)  # fmt: skip
MEASURED = st.fixed_dictionaries(
    {},
    optional={
        "p99_length": st.floats(1, 40_000),
        "imbalance_ratio": st.floats(1, 1e4) | st.just(math.inf), "minority_count": st.integers(0, 10_000),
    },
)  # fmt: skip


def named(rule: str) -> Claim:
    return next(claim for claim in RULES if claim.id == rule)


def reported(config: dict[str, Any], statistics: dict[str, Any] | None = None) -> set[str]:
    return {finding.rule for finding in check(config, statistics, RULES)}


@pytest.mark.parametrize("claim", RULES, ids=lambda claim: claim.id)
def test_examples_do_what_they_say(claim: Claim) -> None:
    for example in claim.examples.holds:
        assert check(example.config, example.statistics, [claim]) == []
    for example in claim.examples.violates:
        assert [found.rule for found in check(example.config, example.statistics, [claim])] == [claim.id]


@settings(max_examples=150, deadline=None, database=None)
@given(CONFIGS, MEASURED)
def test_every_recommendation_heals_its_rule(config: dict[str, Any], statistics: dict[str, Any]) -> None:
    for claim in RULES:
        for finding in check(config, statistics, [claim]):
            assert finding.recommendation or claim.id == "C-HP-008-EMPTY-CLASS"
            healed = apply(config, finding.recommendation)
            if finding.recommendation:
                assert check(healed, statistics, [claim]) == [], (claim.id, finding)


@settings(max_examples=100, deadline=None, database=None)
@given(CONFIGS, MEASURED)
def test_following_all_advice_ends_in_silence(config: dict[str, Any], statistics: dict[str, Any]) -> None:
    for _ in range(3):
        for finding in reversed(check(config, statistics, RULES)):
            config = apply(config, finding.recommendation)
    assert {finding.rule for finding in check(config, statistics, RULES)} <= {"C-HP-008-EMPTY-CLASS"}


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 15, 16, 17, 32, 33, 100])
def test_the_effective_batch_is_healed_to_exactly_16(batch: int) -> None:
    rule = [named("C-HP-002-EFFECTIVE")]
    config = {"batch_size": batch, "accumulation_steps": 3}
    (finding,) = check(config, rules=rule)
    healed = apply(config, finding.recommendation)
    assert healed["batch_size"] * healed["accumulation_steps"] == 16
    assert healed["batch_size"] <= batch
    assert all(type(value) is int for value in healed.values())


@settings(max_examples=200, deadline=None, database=None)
@given(st.integers(1, 10**12))
def test_no_message_says_zero_billion(parameters: int) -> None:
    config = {**SOUND, "learning_rate": 1.2e-4, "model_params": parameters}
    messages = [finding.message for finding in check(config, rules=RULES)]
    sizes = [float(size) for message in messages for size in re.findall(r"([0-9.e+-]+)B\b", message)]
    assert len(sizes) == len([message for message in messages if "parameters" in message]) > 0
    assert all(size == pytest.approx(parameters / 1e9, rel=0.01) for size in sizes)


def test_half_a_billion_reads_half_a_billion() -> None:
    (message,) = [d.message for d in check({"learning_rate": 1e-4, "model_params": 500_000_000}, rules=[named("C-HP-001-MODEL-SIZE")])]
    assert "0.5B" in message


def test_the_general_defaults_of_the_ancestor_are_seen() -> None:
    found = reported(ANCESTOR_DEFAULTS)
    assert {"C-HP-001-MODEL-SIZE", "C-HP-002-EFFECTIVE", "C-HP-003-ALPHA"} <= found
    assert not any(finding.severity == "error" for finding in check(ANCESTOR_DEFAULTS, rules=RULES))


def test_a_sound_configuration_is_not_criticised() -> None:
    assert check(SOUND, {"p99_length": 200, "imbalance_ratio": 2, "minority_count": 400}, RULES) == []


def test_the_conflict_with_qlora_itself_is_shown() -> None:
    found = {finding.rule: finding.severity for finding in check(QLORA_PAPER, rules=RULES)}
    assert found == {"C-HP-003-ALPHA": "warn", "C-HP-006-NORM": "info", "C-HP-007-VALUE": "info"}


def test_errors_come_first_and_only_impossible_values_are_errors() -> None:
    config = {**ANCESTOR_DEFAULTS, "batch_size": 0, "gradient_clip_norm": None, "weight_decay": -1}
    severities = [finding.severity for finding in check(config, rules=RULES)]
    assert severities == ["error", "error", "warn", "warn", "info"]


def test_clipping_that_is_off_differs_from_clipping_that_is_not_mentioned() -> None:
    assert "C-HP-006-ON" in reported({"gradient_clip_norm": None})
    assert reported({}) == set()


@pytest.mark.parametrize(("p99", "expected"), [(1, 1), (1.5, 2), (2, 2), (128, 128), (128.5, 256), (129, 256), (8191.9, 8192)])
def test_next_power_of_two(p99: float, expected: int) -> None:
    assert variables({}, {"p99_length": p99})["p99_power_of_two"] == expected


@pytest.mark.parametrize(
    ("minority", "batch", "steps", "expected"),
    [(400, 16, 1, 4), (1600, 16, 1, 2), (100_000, 16, 1, 2), (1, 16, 1, 1600), (399, 16, 1, 5), (100, 4, 4, 16), (0, 16, 1, None)],
)
def test_required_epochs(minority: int, batch: int, steps: int, expected: int | None) -> None:
    assert variables({"batch_size": batch, "accumulation_steps": steps}, {"minority_count": minority})["required_epochs"] == expected


@pytest.mark.parametrize(
    ("config", "statistics", "message"),
    [
        ({"learning_rat": 1}, {}, "learning_rat: unknown field 'learning_rat'"),
        ({"learning_rat": 1}, {}, "did you mean 'learning_rate'?"),
        ({"learning_rate": "1e-4"}, {}, "learning_rate: is '1e-4'; expected a number"),
        ({"learning_rate": math.nan}, {}, "expected a number"),
        ({"batch_size": 2.5}, {}, "batch_size: is 2.5; expected an integer"),
        ({"batch_size": True}, {}, "batch_size: is true; expected an integer"),
        ({"batch_size": None}, {}, "batch_size: is null; expected an integer (leave the field out"),
        ({"batch_size": math.inf}, {}, "expected an integer"),
        ({"learning_rate": 10**400}, {}, "expected a number"),
        ({"quantize_nf4": 1}, {}, "quantize_nf4: is 1; expected true or false"),
        ({"lora_targets": "q_proj"}, {}, "lora_targets: is 'q_proj'; expected a list of texts"),
        ({"class_weights": [1, "x"]}, {}, "class_weights: is a list; expected a list of numbers"),
        ({"p99_length": 3}, {}, "p99_length: unknown field"),
        ({}, {"p99_length": 0}, "p99_length: is 0; expected at least 1"),
        ({}, {"batch_size": 3}, "batch_size: unknown field"),
    ],
)
def test_values_that_cannot_be_judged(config: dict[str, Any], statistics: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config, statistics, RULES)
    assert message in str(caught.value)


def test_apply_changes_a_copy_and_refuses_unknown_fields() -> None:
    config = {"batch_size": 3, "epochs": 3}
    assert apply(config, {"batch_size": 2.0, "lora_alpha": 32}) == {"batch_size": 2, "lora_alpha": 32.0, "epochs": 3}
    assert config == {"batch_size": 3, "epochs": 3}
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        apply(config, {"batchsize": 2})


# A user's own rule, and what can be wrong with it.
OWN: dict[str, Any] = {
    "id": "SITE-TARGETS",
    "severity": "P2",
    "kind": "rule",
    "statement": "The output projection is adapted too.",
    "domain": {"scalars": {"lora_targets": [["q_proj"], ["q_proj", "o_proj"]]}},
    "rule": {
        "when": "lora_targets != null",
        "require": "lora_targets.exists(target, target == 'o_proj')",
        "severity": "warn",
        "message": "o_proj is not among {lora_targets}",
        "recommend": {"lora_targets": "lora_targets + ['o_proj']"},
    },
    "examples": {"holds": [{}], "violates": [{"lora_targets": ["q_proj"]}]},
}


def write(folder: Path, claim: dict[str, Any]) -> Path:
    path = folder / "site-rules-v1.yaml"
    path.write_text(yaml.safe_dump({"contract": "site-rules", "version": "1.0.0", "title": "Ours", "claims": [claim]}, sort_keys=False))
    return path


def test_a_rule_is_added_by_yaml_alone(tmp_path: Path) -> None:
    rules = [*RULES, *load([write(tmp_path, OWN)], EMPTY)[0].claims]
    (finding,) = check({"lora_targets": ["q_proj"]}, rules=rules)
    assert (finding.rule, finding.contract, finding.severity) == ("SITE-TARGETS", "site-rules", "warn")
    assert finding.message == "o_proj is not among ['q_proj']"
    assert check(apply({"lora_targets": ["q_proj"]}, finding.recommendation), rules=rules) == []


def with_rule(**changes: Any) -> dict[str, Any]:
    plain = {"when": "epochs != null", "require": "epochs > 1.0", "severity": "warn", "message": "{epochs} epochs"}
    changes = {name.replace("_", "."): value for name, value in changes.items()}
    claim = {**OWN, "domain": {"scalars": changes.pop("scalars", {"epochs": {"min": 1, "max": 3}})}, "rule": {**plain, **changes}}
    claim["examples"] = claim["rule"].pop("examples", {"holds": [{}], "violates": [{"epochs": 1}]})
    return claim


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"require": "epoch > 1.0"}, "rule.require", "unknown variable 'epoch'"),
        ({"require": "epoch > 1.0"}, "rule.require", "did you mean 'epochs'?"),
        ({"require": "epochs >"}, "rule.require", "is not CEL: "),
        ({"require": "ceil(epochs) > 1.0"}, "rule.require", "unknown function 'ceil'"),
        ({"require": "2 * epochs > 3.0"}, "rule", "numbers are doubles: write 2.0, not 2"),
        ({"require": "epochs"}, "rule", "require 'epochs' gives 1.0; expected true or false"),
        ({"when": "true"}, "rule", "guard with `epochs != null`"),
        ({"when": "epochs != null && learning_rate == null"}, "rule.when", "domain.scalars does not draw 'learning_rate'"),
        ({"when": "effective_batch != null"}, "rule.when", "domain.scalars does not draw 'accumulation_steps'"),
        ({"severity": "fatal"}, "rule.severity", "unknown severity 'fatal'; expected one of error, info, warn"),
        ({"message": "{epoch}"}, "rule.message", "unknown placeholder 'epoch'"),
        ({"message": "{epochs:q}"}, "rule.message", "the format 'q' does not fit epochs"),
        ({"message": "{epochs"}, "rule.message", "is not a format"),
        ({"message": "{epochs!r}"}, "rule.message", "has a conversion !r"),
        ({"message": "{0}"}, "rule.message", "unknown placeholder '0'"),
        ({"recommend": {"epoch": "2.0"}}, "rule.recommend.epoch", "did you mean 'epochs'?"),
        ({"recommend": {"model_params": "2.0"}}, "rule.recommend.model_params", "unknown field to recommend"),
        ({"recommend": {"epochs": "1.5"}}, "rule", "recommend '1.5': epochs: is 1.5; expected an integer"),
        ({"recommend": {"epochs": 2}}, "rule.recommend.epochs", "is 2; expected text"),
        ({"scalars": {"epoch": 1}}, "domain.scalars.epoch", "did you mean 'epochs'?"),
        ({"scalars": {"epochs": {"min": 3, "max": 1}}}, "domain.scalars.epochs", "the range is empty: min 3 is more than max 1"),
        ({"scalars": {"epochs": ["x"]}}, "domain.scalars.epochs", "is 'x'; expected an integer"),
        ({"scalars": {"pooling": {"min": 3, "max": 4}}}, "domain.scalars.pooling", "cannot have a range"),
        ({"examples": {"holds": [{"epoch": 1}], "violates": [{}]}}, "examples.holds[0].epoch", "did you mean 'epochs'?"),
        ({"examples": {"holds": [{"epochs": "x"}], "violates": [{}]}}, "examples.holds[0].epochs", "is 'x'; expected an integer"),
        ({"examples": {"holds": [{}]}}, "examples", "missing key 'violates'"),
    ],
)
def test_faulty_rules_do_not_load(tmp_path: Path, changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        load([write(tmp_path, with_rule(**changes))], EMPTY)
    found = caught.value.problems
    assert any(problem.key == f"claims[0].{key}" and message in problem.message and problem.line > 4 for problem in found), [
        *map(str, found)
    ]


def test_a_rule_without_an_example_that_violates_it_does_not_load(tmp_path: Path) -> None:
    """Nothing else could show that it ever reports."""
    path = write(tmp_path, {name: value for name, value in OWN.items() if name != "examples"})
    with pytest.raises(ContractError) as caught:
        load([path], EMPTY)
    assert [(problem.line, problem.key, problem.message) for problem in caught.value.problems] == [
        (5, "claims[0]", "missing key 'examples' (kind: rule)")
    ]
    with pytest.raises(ContractError) as caught:
        load([write(tmp_path, {**OWN, "examples": {"holds": [{}], "violates": []}})], EMPTY)
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("claims[0].examples.violates", "is empty; expected at least 1 entry")
    ]


def test_what_a_message_does_not_know_reads_as_unknown(tmp_path: Path) -> None:
    rules = load([write(tmp_path, with_rule(message="{epochs:03d} epochs of a model of {model_billions:.3g}B"))], EMPTY)[0].claims
    assert [finding.message for finding in check({"epochs": 1}, rules=rules)] == ["001 epochs of a model of unknownB"]


@pytest.mark.parametrize("key", ["operation", "check", "tolerance", "arguments"])
def test_a_rule_has_no_operation_check_or_tolerance(tmp_path: Path, key: str) -> None:
    value = {"tolerance": {"basis": "exact"}, "arguments": {}}.get(key, "x")
    with pytest.raises(ContractError) as caught:
        load([write(tmp_path, {**OWN, key: value})], EMPTY)
    assert [problem.key for problem in caught.value.problems] == [f"claims[0].{key}"]


def test_every_field_is_known_to_some_rule_or_only_described() -> None:
    """The fields are those of the configuration; a field nobody mentions would be a rule forgotten or a name misspelt."""
    drawn = {name for claim in RULES for name in claim.domain.scalars}
    silent = {"num_classes", "log_interval", "class_weights", "lora_targets", "pooling", "schedule", "seed", "multi_label"}
    silent |= {"validation_fraction", "early_stop_patience", "padding_side", "dtype", "engine"}
    assert drawn == (set(CONFIG) | set(STATISTICS)) - silent


def test_each_rule_of_the_list_has_a_claim_with_both_kinds_of_example() -> None:
    assert {claim.id[:8] for claim in RULES} == {f"C-HP-{number:03}" for number in range(1, 9)}
    assert all(claim.examples.holds and claim.examples.violates for claim in RULES)
