"""Hyperparameter rules: they report, their advice heals, nothing missing raises, and a user's YAML is enough for a new one."""

import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from blackswan.contracts import ContractError, Vocabulary, load
from blackswan.contracts import rules as engine
from blackswan.contracts.advice import advised, check, unjudged
from blackswan.contracts.fields import CONFIG, MINORITY_UPDATES, STATISTICS, ConfigError, variables
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
    "lora_rank": 64, "lora_alpha": 16, "learning_rate": 2e-4, "batch_size": 1, "accumulation_steps": 16, "gradient_clip_norm": 0.3,
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
        "class_weights": st.none() | st.just("balanced") | st.lists(st.floats(0.1, 5), max_size=4), "num_classes": st.integers(2, 4),
        "multi_label": st.booleans(), "lora_targets": st.lists(st.sampled_from(["q_proj", "o_proj"]), min_size=1),
        "pooling": st.sampled_from(["mean", "last"]),
        "model_params": st.integers(1, 10**12) | st.sampled_from([13 * 10**9, 13 * 10**9 + 1]),
    },
)  # fmt: skip
MEASURED = st.fixed_dictionaries(
    {},
    optional={
        "p99_length": st.floats(1, 40_000),
        "imbalance_ratio": st.floats(1, 1e4) | st.just(math.inf), "minority_count": st.integers(0, 10_000),
        "sample_count": st.integers(10_000, 10**6),
    },
)  # fmt: skip


def reported(config: dict[str, Any], statistics: dict[str, Any] | None = None) -> set[str]:
    return {finding.rule for finding in check(config, statistics, RULES)}


def followed(config: dict[str, Any], statistics: dict[str, Any]) -> set[str]:
    """The rules that report after all advice was applied once, in whatever order."""
    found = check(config, statistics, RULES)
    healed, reverse = config, config
    for finding in found:
        healed = apply(healed, finding.recommendation)
    for finding in reversed(found):
        reverse = apply(reverse, finding.recommendation)
    assert healed == reverse == advised(config, found)
    return reported(healed, statistics)


@settings(max_examples=300, deadline=None, database=None)
@given(CONFIGS, MEASURED)
def test_all_advice_applied_once_leaves_no_finding(config: dict[str, Any], statistics: dict[str, Any]) -> None:
    assert followed(config, statistics) <= {"C-HP-008-EMPTY-CLASS"}


def test_advice_knows_what_other_advice_changes() -> None:
    """Batches of 16 in the place of 4 need a fourth epoch, which no rule asks for before: the advice on the batch brings it along."""
    statistics = {"imbalance_ratio": 24.5, "minority_count": 37, "sample_count": 944}
    config = {"batch_size": 2, "accumulation_steps": 2, "epochs": 3, "model_params": 500_000_000}
    (effective,) = check(config, statistics, RULES)
    assert effective.recommendation == {"batch_size": 2, "accumulation_steps": 8, "epochs": 4}
    assert followed({**config, "batch_size": 3, "accumulation_steps": 4, "epochs": 1}, statistics) == set()


def test_the_general_defaults_of_the_ancestor_are_seen() -> None:
    found = reported(ANCESTOR_DEFAULTS)
    assert {"C-HP-001-MODEL-SIZE", "C-HP-002-EFFECTIVE", "C-HP-003-ALPHA-TWICE"} <= found
    assert not any(finding.severity == "error" for finding in check(ANCESTOR_DEFAULTS, rules=RULES))


def test_a_sound_configuration_is_not_criticised() -> None:
    assert check(SOUND, {"p99_length": 200, "imbalance_ratio": 2, "minority_count": 400, "sample_count": 1200}, RULES) == []


@pytest.mark.parametrize(
    ("billions", "batch", "rate"), [(6.7, 16, 2e-4), (13, 16, 2e-4), (32.5, 32, 1e-4), (32.5, 16, 1e-4), (65.2, 64, 1e-4)]
)
def test_qloras_own_runs_are_no_warning_and_the_conflict_is_shown(billions: float, batch: int, rate: float) -> None:
    """Table 9 of the paper, and the authors' script for 33B, which has 16 samples a step."""
    run = {**QLORA_PAPER, "model_params": int(billions * 1e9), "accumulation_steps": batch, "learning_rate": rate}
    found = {finding.rule: finding.severity for finding in check(run, rules=RULES)}
    assert found == {"C-HP-003-ALPHA-TWICE": "info", "C-HP-006-NORM": "info", "C-HP-007-VALUE": "info"}


def test_every_rule_cites_a_source_and_every_source_is_cited() -> None:
    assert all(claim.sources and all(claim.sources.values()) for claim in RULES)
    assert {name for claim in RULES for name in claim.sources} == set(load([FILE])[0].sources)


def test_errors_come_first_and_only_impossible_values_are_errors() -> None:
    config = {**ANCESTOR_DEFAULTS, "batch_size": 0, "gradient_clip_norm": None, "weight_decay": -1}
    severities = [finding.severity for finding in check(config, rules=RULES)]
    assert severities == ["error", "error", "warn", "info", "info"]


@pytest.mark.parametrize(("p99", "expected"), [(1, 1), (1.5, 2), (2, 2), (128, 128), (128.5, 256), (129, 256), (8191.9, 8192)])
def test_next_power_of_two(p99: float, expected: int) -> None:
    assert variables({}, {"p99_length": p99})["p99_power_of_two"] == expected


@pytest.mark.parametrize(
    ("samples", "minority", "batch", "steps", "expected"),
    [
        (944, 37, 16, 1, 4), (944, 37, 8, 2, 4), (1000, 1, 16, 1, 100), (1600, 25, 1, 1, 4), (10, 1, 64, 8, 100), (10, 10, 1, 1, 10),
        (100_000, 50_000, 16, 1, 2), (10**15, 1, 16, 1, 100), (10**15, 10**14, 1, 1, 2), (10**12, 10**6, 10**6, 1, 2),
        (944, 0, 16, 1, None), (944, 37, 0, 1, None),
    ],
)  # fmt: skip
def test_required_epochs(samples: int, minority: int, batch: int, steps: int, expected: int | None) -> None:
    config, statistics = {"batch_size": batch, "accumulation_steps": steps}, {"minority_count": minority, "sample_count": samples}
    assert variables(config, statistics)["required_epochs"] == expected


@pytest.mark.parametrize(("samples", "minority", "batch"), [(944, 37, 16), (200, 10, 32), (64, 3, 7), (300, 150, 20)])
def test_required_epochs_are_what_shuffled_epochs_give(samples: int, minority: int, batch: int) -> None:
    """By C(n, k) in integers, and by counting the batches of shuffled epochs, whose last, smaller one counts for its part."""
    missed = Fraction(math.comb(samples - minority, batch), math.comb(samples, batch))
    updates = Fraction(samples, batch) * (1 - missed)
    config, statistics = {"batch_size": batch, "accumulation_steps": 1}, {"minority_count": minority, "sample_count": samples}
    assert variables(config, statistics)["required_epochs"] == max(2, math.ceil(MINORITY_UPDATES / updates))
    draw, full = random.Random(0), samples // batch
    seen = sum(min(place) < minority for _ in range(400) for place in _full_batches(draw, samples, batch)) / 400
    assert seen == pytest.approx(float(updates) * full * batch / samples, rel=0.02)


def _full_batches(draw: random.Random, samples: int, batch: int) -> list[list[int]]:
    order = draw.sample(range(samples), samples)
    return [order[start : start + batch] for start in range(0, samples - batch + 1, batch)]


@pytest.mark.parametrize(
    ("config", "statistics", "message"),
    [
        ({"learning_rat": 1}, {}, "learning_rat: unknown field 'learning_rat'"),
        ({"learning_rat": 1}, {}, "did you mean 'learning_rate'?"),
        ({"learning_rate": "1e-4"}, {}, "learning_rate: is '1e-4'; expected a number"),
        ({"batch_size": 2.5}, {}, "batch_size: is 2.5; expected an integer"),
        ({"batch_size": None}, {}, "batch_size: is null; expected an integer (leave the field out"),
        ({"lora_alpha": math.inf}, {}, "lora_alpha: is inf; expected a finite number"),
        ({"seed": 2**63}, {}, "seed: is 9223372036854775808; expected at most 9223372036854775807"),
        ({"validation_fraction": 1}, {}, "validation_fraction: is 1; expected below 1"),
        ({"schedule": "linaer"}, {}, "schedule: unknown choice 'linaer'; expected one of constant, cosine, linear; did you mean 'linear'?"),
        ({"lora_targets": "q_proj,w_proj"}, {}, "lora_targets: unknown projection 'w_proj'"),
        ({"class_weights": [1.0, 0.0]}, {}, "class_weights: is a list; expected balanced, balanced_over_classes or a positive number"),
        ({}, {"minority_count": 5, "sample_count": 4}, "minority_count: is 5; expected no more than sample_count, 4"),
        ({"quantize_nf4": 1}, {}, "quantize_nf4: is 1; expected true or false"),
        ({"p99_length": 3}, {}, "p99_length: unknown field"),
        ({}, {"p99_length": 0}, "p99_length: is 0; expected at least 1"),
        ({}, {"batch_size": 3}, "batch_size: unknown field"),
    ],
)
def test_values_that_cannot_be_judged(config: dict[str, Any], statistics: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config, statistics, RULES)
    assert message in str(caught.value)


def test_the_rules_that_could_not_be_judged_are_named() -> None:
    found = unjudged(
        {"max_seq_len": 512, "batch_size": 16, "accumulation_steps": 1, "gradient_clip_norm": None}, {"imbalance_ratio": 9}, RULES
    )
    assert found["C-HP-004-COVERS"] == ("p99_length",)
    assert found["C-HP-008-IMBALANCE"] == ("epochs", "minority_count", "sample_count")
    assert found["C-HP-002-EFFECTIVE"] == ("model_params",)
    assert not found.keys() & {"C-HP-004-POSITIVE", "C-HP-002-BATCH-POSITIVE", "C-HP-006-ON"}
    everything = dict.fromkeys(CONFIG, 1), dict.fromkeys(STATISTICS, 1)
    assert unjudged(*everything, RULES) == {}


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


def nested(macro: str, end: str) -> str:
    """A macro six deep, through lists of eight numbers."""
    numbers = f"[{', '.join(['1.0'] * 8)}]"
    return "".join(f"{numbers}.{macro}({name}, " for name in "abcdef") + end + ")" * 6


LONG = {"class_weights": [[1.0] * 3_000]}
HOSTILE: list[tuple[dict[str, Any], str, str]] = [
    ({"require": " + ".join(["1.0"] * 20_000) + " > 1.0"}, "rule.require", "of 120,003 characters; expected at most 1,000"),
    ({"when": "(" * 10_000 + "true" + ")" * 10_000}, "rule.when", "of 20,004 characters; expected at most 1,000"),
    ({"when": "(" * 100 + "true" + ")" * 100}, "rule.when", "has brackets nested 100 deep; expected at most 16"),
    ({"when": "[" * 400}, "rule.when", "has brackets nested 400 deep; expected at most 16"),
    ({"require": nested("all", "true")}, "rule.require", "steps, by the lengths of its lists and texts; expected at most 200,000"),
    ({"recommend": {"epochs": nested("exists", "false") + " ? 1.0 : 2.0"}}, "rule.recommend.epochs", "expected at most 200,000"),
    ({"require": f"size({nested('map', '1.0')}) > 0"}, "rule.require", "expected at most 200,000"),
    ({"require": f"size({nested('filter // (', 'true')}) > 0".replace("// (", "// ')'\n")}, "rule.require", "expected at most 200,000"),
    ({"require": nested("all", "r'))))))\\' != '))))))'")}, "rule.require", "expected at most 200,000"),
    ({"require": "class_weights.map(w, class_weights) != null", "scalars": LONG}, "rule.require", "expected at most 200,000"),
    ({"require": "class_weights.all(w, w in class_weights)", "scalars": LONG}, "rule.require", "expected at most 200,000"),
    ({"require": f"'{'a' * 10**6}' != ''"}, "rule.require", "of 1,000,008 characters"),
    ({"require": f"[{', '.join(['1.0'] * 10**5)}].all(w, w > 0.0)"}, "rule.require", "expected at most 1,000"),
    ({"require": " || ".join(["'a'.matches('(\\\\w{30}){20}')"] * 20)}, "rule.require", "expected at most 200,000"),
    ({"message": "{epochs:999999999}"}, "rule.message", "the format '999999999' has a number above 99"),
    ({"message": "{epochs:.99999g}"}, "rule.message", "the format '.99999g' has a number above 99"),
]


@pytest.mark.parametrize(("changes", "key", "message"), HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_a_rule_that_asks_for_too_much_is_refused_before_the_engine_sees_it(
    tmp_path: Path, changes: dict[str, Any], key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_run", lambda *_: pytest.fail("evaluated"))
    path = write(tmp_path, with_rule(**changes))
    with pytest.raises(ContractError) as caught:
        load([path], EMPTY)
    (problem,) = (problem for problem in caught.value.problems if problem.key == f"claims[0].{key}")
    assert message in problem.message
    assert f"{key.rpartition('.')[2]}:" in path.read_text().splitlines()[problem.line - 1]


def test_a_rule_goes_through_the_weights_of_ten_thousand_classes_and_not_through_their_pairs(tmp_path: Path) -> None:
    def own(require: str) -> list[Claim]:
        scalars = {"class_weights": [[1.0, 2.0]]}
        examples = {"holds": [{}], "violates": [{"class_weights": [7.0]}]}
        claim = with_rule(when="class_weights != null", require=require, message="negative", scalars=scalars, examples=examples)
        return [*load([write(tmp_path, claim)], EMPTY)[0].claims]

    weights = {"class_weights": [1.0] * 9_999 + [7.0]}
    assert [found.message for found in check(weights, rules=own("class_weights.all(w, w < 5.0)"))] == ["negative"]
    pairs = "class_weights.all(v, class_weights.all(w, w + v < 10.0))"
    assert [found.message for found in check({"class_weights": [1.0, 7.0]}, rules=own(pairs))] == ["negative"]
    with pytest.raises(ContractError, match=r"site-rules-v1\.yaml:\d+: SITE-TARGETS: require .* may take .* expected at most 200,000"):
        check(weights, rules=own(pairs))


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


@pytest.mark.parametrize("key", ["operation", "check", "tolerance", "arguments", "backend"])
def test_a_rule_has_no_operation_check_or_tolerance(tmp_path: Path, key: str) -> None:
    value = {"tolerance": {"basis": "exact"}, "arguments": {}, "backend": "torch"}.get(key, "x")
    with pytest.raises(ContractError) as caught:
        load([write(tmp_path, {**OWN, key: value})], EMPTY)
    assert [problem.key for problem in caught.value.problems] == [f"claims[0].{key}"]


def test_every_field_is_known_to_some_rule_or_only_described() -> None:
    """The fields are those of the configuration; a field nobody mentions would be a rule forgotten or a name misspelt."""
    drawn = {name for claim in RULES for name in claim.domain.scalars}
    silent = {"log_interval", "lora_targets", "pooling", "schedule", "seed"}
    silent |= {"validation_fraction", "early_stop_patience", "padding_side", "dtype", "backend"}
    assert drawn == (set(CONFIG) | set(STATISTICS)) - silent
