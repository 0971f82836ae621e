"""The engine under attack: bad subjects, bad references and bad claims each end in the state that is true of them."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from falsifiers_claims import EXACT, ROUNDING, Answer, Fake, Fickle, Wrong, boundary, claim, off, y_off

from blackswan import reference
from blackswan.contracts.model import Claim, Range, Tolerance
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack, Stopwatch
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.falsifiers.runner import engine
from blackswan.falsifiers.runner.engine import SEEDS_OF_A_DRAW, Options, falsify
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.subjects import isolated, serving
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference.table import Array, Operation

QUICK = Options(examples=6)


def verdict(change: Answer, one: Claim | None = None, dtype: str = "float32", options: Options = QUICK) -> Verdict:
    return falsify(one or claim(), dtype, Wrong(change), options)


# states


def test_a_correct_subject_holds_and_is_counted() -> None:
    named = claim(domain_changes={"boundary": (boundary(5),), "flavours": ("normal", "wide")})
    found = falsify(named, "bfloat16", ReferenceSubject(), QUICK)
    assert found.state is State.HELD
    expected = len(list(engine.cases(named, "bfloat16", QUICK)))
    assert expected == SEEDS_OF_A_DRAW + 6 * 2
    assert (found.tally.run, found.tally.compared, found.tally.rejected) == (expected, expected, 0)
    assert found.case is found.comparison is found.reason is None
    assert found.tally.worst.headroom <= 1


@pytest.mark.parametrize("kind", ["parity", "gradient", "trajectory"])
def test_a_wrong_subject_is_falsified_with_a_counterexample_that_reproduces(kind: str) -> None:
    one = claim(kind=kind)
    wrong = Wrong(lambda _, outputs: {name: off(value) for name, value in outputs.items()})
    found = falsify(one, "float32", wrong, QUICK)
    assert found.state is State.FALSIFIED
    assert found.reason is None
    assert not found.comparison.held
    assert engine.replay(one, found.case, wrong).state is State.FALSIFIED
    assert engine.replay(one, found.case, ReferenceSubject()).state is State.HELD


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), RuntimeError(), MemoryError("CUDA out of memory"), ZeroDivisionError(), StopIteration(), AssertionError("x")],
)
def test_a_subject_that_raises_is_falsified(error: Exception) -> None:
    def raising(_: Any, __: Any) -> None:
        raise error

    found = verdict(raising)
    assert found.state is State.FALSIFIED
    assert f"raised {type(error).__name__}" in str(found.comparison.reason)


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 9 GiB."


@pytest.mark.parametrize(
    ("device", "error", "state"),
    [
        ("cuda:0", torch.OutOfMemoryError(OUT_OF_MEMORY), State.NOT_RUN),
        ("cuda:0", MemoryError(OUT_OF_MEMORY), State.FALSIFIED),
        ("cuda:0", RuntimeError(OUT_OF_MEMORY), State.NOT_RUN),
        ("cuda:0", RuntimeError("mha_graph.execute was not good"), State.FALSIFIED),
        ("cuda:0", isolated._raised(*serving.failure(torch.OutOfMemoryError(OUT_OF_MEMORY), "cuda:0")), State.NOT_RUN),
        ("cuda:0", isolated._raised(*serving.failure(RuntimeError("the shapes differ"), "cuda:0")), State.FALSIFIED),
        ("cpu", torch.OutOfMemoryError(OUT_OF_MEMORY), State.FALSIFIED),
    ],
)
def test_a_gpu_that_is_too_small_for_an_operation_proves_nothing(device: str, error: Exception, state: State) -> None:
    def raising(_: Any, __: Any) -> None:
        raise error

    subject = Wrong(raising)
    subject.device = device
    found = falsify(claim(), "float32", subject, QUICK)
    assert found.state is state
    if state is State.NOT_RUN:
        assert found.reason is not None
        assert "needs more memory than cuda:0 has: CUDA out of memory" in found.reason


@pytest.mark.parametrize(
    ("free", "said", "state"),
    [
        (1 << 20, "mha_graph.execute was not good", State.NOT_RUN),
        (1 << 33, "mha_graph.execute was not good", State.FALSIFIED),
        (1 << 20, "the shapes differ", State.FALSIFIED),
    ],
)
def test_what_a_library_does_not_execute_on_a_full_gpu_proves_nothing(
    free: int, said: str, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(_: Any, __: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 36))
    subject = Wrong(raising)
    subject.device = "cuda:0"
    assert falsify(claim(), "float32", subject, QUICK).state is state


def test_a_wrong_answer_counts_though_other_cases_need_too_much_memory() -> None:
    def wrong_where_it_fits(inputs: Mapping[str, Array], outputs: dict[str, Array]) -> Any:
        if inputs["x"].shape[1] > 8:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return y_off(inputs, outputs)

    subject = Wrong(wrong_where_it_fits)
    subject.device = "cuda:0"
    named = claim(domain_changes={"boundary": (boundary(16), boundary(4))})
    assert falsify(named, "float32", subject, QUICK).state is State.FALSIFIED


class Full(Fake):
    """A subject on a GPU whose doors have no memory for anything."""

    device = "cuda:0"

    def door(self, name: str) -> object:
        """One that answers nothing."""
        del name
        return self

    def __getattr__(self, name: str) -> Any:
        """Of a door: a method without memory."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("check", "state"), [("fresh.update_is_zero_and_random", "NOT_RUN"), ("footprint.steps_keep_nothing", "FALSIFIED")]
)
def test_a_gpu_that_is_too_small_falsifies_claims_about_memory_alone(check: str, state: str) -> None:
    assert falsify(replace(claim(check=check), operation=None, cases=1), "float32", Full(), QUICK).state.name == state


@pytest.mark.parametrize(
    ("check", "arguments", "backend", "words"),
    [
        ("continued.killed_run_goes_on", {"kils": 2}, None, "arguments.kils: continued.killed_run_goes_on has no such argument; it has"),
        ("continued.killed_run_goes_on", {}, None, "continued.killed_run_goes_on needs kills"),
        ("sampling.refuses_split", {"kills": 2}, None, "sampling.refuses_split has no such argument; it has none"),
        ("sampling.refuses_split", {}, "fused", "impl's corpora have no choice of backends"),
        ("sampling.refuse_split", {}, None, "the nearest is 'refuses_split'"),
    ],
)
def test_a_system_claim_with_a_setting_that_nothing_reads_proves_nothing(
    check: str, arguments: dict[str, Any], backend: str | None, words: str
) -> None:
    one = replace(claim(check=check, arguments=arguments, backend=backend), operation=None, cases=1)
    found = falsify(one, "float32", Implementation("cpu"), QUICK)
    assert found.state is State.VACUOUS
    assert words in str(found.reason)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "NoneType"),
        ([1.0], "list"),
        ({"y": 1.0}, "y: float"),
        ({"y": None}, "y: NoneType"),
        ({"y": np.float32(1)}, "y: float32"),
        ({}, "without y"),
        ({"Y": np.zeros((1, 1), np.float32)}, "without y"),
    ],
)
def test_what_is_no_arrays_by_name_is_no_answer(answer: Any, words: str) -> None:
    for one in (claim(), claim(check="twice_the_same", kind="determinism")):
        found = verdict(lambda _, __: answer, one)
        assert found.state is State.FALSIFIED
        assert words in str(found.comparison.reason)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y.astype(np.float64), "dtype"),
        (lambda y: y[..., None], "shape"),
        (lambda y: y[:0], "shape"),
        (lambda y: y.reshape(-1), "shape"),
        (lambda y: np.full_like(y, np.nan), "non-finite"),
        (lambda y: off(y, np.nan), "non-finite"),
        (lambda y: off(y, np.inf), "non-finite"),
    ],
)
@pytest.mark.parametrize("tolerance", [ROUNDING, EXACT, Tolerance("literal", value=1e30, unit="absolute")])
def test_an_answer_of_another_structure_is_falsified_on_every_basis(
    change: Callable[[Array], Array], words: str, tolerance: Tolerance
) -> None:
    one = claim("residual_add", tolerance=tolerance, domain_changes={"sizes": {"rows": Range(2, 3), "hidden": Range(2, 4)}, "scalars": {}})
    found = verdict(lambda _, outputs: {"y": change(outputs["y"])}, one)
    assert found.state is State.FALSIFIED
    assert words in str(found.comparison.reason or found.comparison.metric) or (words == "non-finite" and tolerance is EXACT)


@pytest.mark.parametrize("named", [(), (boundary(3),)])
def test_a_subject_that_answers_differently_the_second_time_is_flaky(named: Any) -> None:
    found = falsify(claim(domain_changes={"boundary": named}), "float32", Fickle(), QUICK)
    assert found.state is State.FLAKY
    assert "differently" in str(found.reason)
    assert found.case is not None


def test_determinism_is_not_fooled_by_an_answer_in_the_same_memory() -> None:
    buffer = np.zeros((4, 32), np.float32)

    class Shared(Fake):
        def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> dict[str, Array]:
            assert inputs["x"].shape == outputs["y"].shape
            view = buffer[: outputs["y"].shape[0], : outputs["y"].shape[1]]
            view[:] = outputs["y"] + self.asked % 2
            return {"y": view}

    assert falsify(claim(kind="determinism", check="twice_the_same", tolerance=None), "float32", Shared(), QUICK).state in (
        State.FALSIFIED,
        State.FLAKY,
    )


def test_all_cases_rejected_is_vacuous_and_counted() -> None:
    def noisy(x: Array, branch: Array) -> Array:
        return x + branch if x.dtype == np.float64 else x * 0 - 9

    one = claim("residual_add", domain_changes={"sizes": {"rows": (2,), "hidden": (3,)}, "scalars": {}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reference.TABLE, "residual_add", Operation(noisy))
        found = falsify(one, "float32", Fake(), QUICK)
    assert found.state is State.VACUOUS
    assert (found.tally.compared, found.tally.rejected) == (0, found.tally.run)
    assert f"all {found.tally.run} cases" in str(found.reason)


def test_comparing_nothing_is_vacuous() -> None:
    one = claim(
        "nf4_quantize",
        "roundtrip",
        check="nf4_keeps_zero",
        domain_changes={"sizes": {"rows": (2,), "columns": (8,), "block_size": (64,)}, "scalars": {}},
    )
    assert falsify(one, "float32", ReferenceSubject(), QUICK).state is State.VACUOUS


def test_what_a_subject_cannot_do_is_not_run() -> None:
    class Unable(Fake):
        def unsupported(self, operation: str, dtype: str) -> str | None:
            return f"no {operation} in {dtype}"

    subject = Unable()
    found = falsify(claim(), "float32", subject, QUICK)
    assert (found.state, found.reason, found.tally.run, subject.asked) == (State.NOT_RUN, "no rms_norm in float32", 0, 0)


def test_a_reference_that_raises_proves_nothing_and_is_no_crash() -> None:
    def refusing(*_: Any, **__: Any) -> dict[str, Array]:
        raise FloatingPointError("1.0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attack, "expect", refusing)
        found = falsify(claim(domain_changes={"boundary": (boundary(3),)}), "float32", ReferenceSubject(), QUICK)
    assert found.state is State.VACUOUS
    assert "the attack broke on case" in str(found.reason)
    assert "FloatingPointError: 1.0 (test_falsifiers_engine.py:" in str(found.reason)


def test_a_reference_that_raises_hides_no_counterexample_found_before() -> None:
    expect = Attack.expect

    def sometimes(self: Attack, case: Any, *rest: Any, **changes: Any) -> dict[str, Array]:
        if case.sizes["hidden"] > 5:
            raise KeyError("reference")
        return expect(self, case, *rest, **changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attack, "expect", sometimes)
        assert verdict(y_off, options=Options(examples=30)).state is State.FALSIFIED
        assert falsify(claim(), "float32", ReferenceSubject(), Options(examples=30)).state is State.VACUOUS


def test_an_interrupt_inside_a_subject_is_no_verdict() -> None:
    def interrupted(_: Any, __: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdict(interrupted)


# inputs


@pytest.mark.parametrize("kind", ["parity", "gradient"])
def test_a_subject_that_writes_to_its_inputs_is_found(kind: str) -> None:
    class Scribbler(Fake):
        def run(self, operation: str, inputs: Any, scalars: Any, dtype: str) -> Any:
            return self.scribbled(inputs, super().run(operation, inputs, scalars, dtype))

        def differentiate(self, operation: str, inputs: Any, scalars: Any, cotangents: Any, *rest: Any) -> Any:
            return self.scribbled(cotangents, super().differentiate(operation, inputs, scalars, cotangents, *rest))

        def scribbled(self, arrays: dict[str, Array], answer: Any) -> Any:
            next(iter(arrays.values()))[..., 0] = 9
            return answer

    found = falsify(claim(kind=kind), "float32", Scribbler(), QUICK)
    assert found.state is State.FALSIFIED
    assert found.comparison.reason == f"changed its input {'x' if kind == 'parity' else 'cotangent y'} in place"
    assert (
        found.case.digest
        == build(
            claim(),
            Draw({k: found.case.sizes[k] for k in ("rows", "hidden")}, {"eps": 1e-6}, {}, found.case.seed),
            found.case.flavour,
            "float32",
        ).digest
    )


def test_a_subject_that_empties_the_dictionary_it_was_given_does_no_harm() -> None:
    class Greedy(Fake):
        def run(self, operation: str, inputs: Any, scalars: Any, dtype: str) -> Any:
            answer = super().run(operation, inputs, scalars, dtype)
            assert scalars
            inputs.clear()
            scalars.clear()
            return answer

    assert falsify(claim(), "float32", Greedy(), QUICK).state is State.HELD


def test_a_refusal_that_damages_the_input_is_no_refusal() -> None:
    class Damaging(Fake):
        def run(self, _: str, inputs: Any, *__: Any) -> Any:
            inputs["logits"][...] = 0
            raise ValueError("non-finite logits")

    one = claim(
        "weighted_cross_entropy",
        "rejection",
        check="refuses",
        arguments={"bad": "non_finite_logits", "error": "ValueError", "message": "finite"},
        domain_changes={"sizes": {"batch": (2,), "classes": (3,)}, "scalars": {}, "optional": {"class_weights": ("absent",)}},
    )
    found = falsify(one, "float32", Damaging(), QUICK)
    assert found.state is State.FALSIFIED
    assert "changed its input logits" in str(found.comparison.reason)
    assert falsify(one, "float32", ReferenceSubject(), QUICK).state is State.HELD
    accepting = falsify(one, "float32", Wrong(lambda _, outputs: outputs), replace(QUICK, examples=1))
    assert accepting.state is State.HELD, "the reference refuses before the answer is changed"


# shrinking


def test_shrinking_ends_in_the_smallest_size_and_the_plainest_flavour() -> None:
    one = claim(domain_changes={"flavours": ("normal", "wide", "outliers")})
    found = verdict(lambda inputs, outputs: y_off(inputs, outputs) if inputs["x"].shape[-1] >= 7 else outputs, one, options=Options())
    assert (found.case.sizes["hidden"], found.case.sizes["rows"], found.case.flavour, found.case.seed) == (7, 1, "normal", 0)


def test_shrinking_keeps_a_flavour_that_is_needed() -> None:
    one = claim(domain_changes={"flavours": ("normal", "wide", "outliers")})
    found = verdict(lambda inputs, outputs: y_off(inputs, outputs) if np.abs(inputs["x"]).max() > 60 else outputs, one, options=Options())
    assert found.case.flavour in ("wide", "outliers")


def test_shrinking_has_a_budget() -> None:
    def asked(budget: float) -> int:
        subject = Wrong(lambda inputs, outputs: y_off(inputs, outputs) if inputs["x"].shape[-1] >= 7 else outputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "SHRINK_SECONDS", budget)
            assert falsify(claim(), "float32", subject, Options()).state is State.FALSIFIED
        return subject.asked

    assert asked(-1.0) < asked(60.0) / 2


def test_without_shrinking_the_first_case_found_stays() -> None:
    found = verdict(
        y_off, claim(domain_changes={"sizes": {"rows": Range(2, 9), "hidden": Range(9, 99)}}), options=Options(shrink=False, examples=3)
    )
    assert found.state is State.FALSIFIED


def test_the_answers_of_a_claim_without_a_subject_error_have_a_cause() -> None:
    with pytest.raises(SubjectError) as raised:
        Attack(claim(), Wrong(lambda _, __: 1 / 0), "float32").answer(
            build(claim(), Draw({"rows": 1, "hidden": 2}, {"eps": 1e-6}), "normal", "float32")
        )
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_the_seed_of_a_run_is_that_of_a_claims_only_case() -> None:
    one = claim(cases=1, domain_changes={"flavours": ("normal",)})
    drawn = {seed: [case.seed for case in engine.cases(one, "float32", Options(seed=seed))] for seed in (0, 7, 2**31 + 5)}
    assert {seed: seeds[0] for seed, seeds in drawn.items()} == {0: 0, 7: 7, 2**31 + 5: 5}


def test_time_of_a_stage_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    watch = Stopwatch()
    with watch.on("reference"):
        with watch.on("noise"), watch.on("subject"):
            pass
        with pytest.raises(KeyError), watch.on("drawing"):
            raise KeyError
    with watch.on("subject"):
        pass
    assert watch.seconds == {"reference": 3, "noise": 2, "subject": 2, "drawing": 1, "comparison": 0}
