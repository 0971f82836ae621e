"""Suspects of a falsified claim: which functions are ranked, and that they are said wherever a verdict is."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from falsifiers_claims import CLAIMS
from reports_factory import CULPRIT, verdict

from blackswan.falsifiers.diagnosis import changes, tracing
from blackswan.falsifiers.diagnosis import suspects as ranking
from blackswan.falsifiers.diagnosis.blame import diagnose
from blackswan.falsifiers.diagnosis.run_failures import recorded
from blackswan.falsifiers.diagnosis.suspects import NAMED, failures_like, program, suspects, words
from blackswan.falsifiers.mutants import subject as mutated
from blackswan.falsifiers.mutants.registry import STEPS, applied
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.answers import raised as raised_instead
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.terminal import story
from blackswan.falsifiers.runner.verdict import Culprit, State
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.system.trial import came_through
from blackswan.impl import evaluation, fit, samples
from blackswan.impl.operations import attention, optimisation
from blackswan.reports import words as report_words
from blackswan.reports.digests import sealed

IMPL, QUICK = Implementation("cpu"), Options(effort="quick", shrink=False)
SCHEMA = json.loads((Path(__file__).parents[1] / "reports/verdict.schema.json").read_text(encoding="utf-8"))


def blamed(claim):
    """The verdict on a claim that has to be false, with its culprit."""
    found = falsify(CLAIMS[claim], "float32", IMPL, QUICK)
    assert found.state is State.FALSIFIED, found.reason
    return replace(found, culprit=diagnose(found.claim, found.case, found.comparison, IMPL))


def untouched(name):
    """Whether no mutant changes the function."""
    return name not in {program().defined(entry.step) for entry in STEPS.values()}


def test_of_a_claim_on_runs_functions_are_ranked_that_run_when_it_is_asked_again(monkeypatch):
    right = evaluation._scores
    monkeypatch.setattr(evaluation, "_scores", lambda *given: right(*given)[::-1])
    found, named = blamed("TRN-SCORES").culprit, {"impl.evaluation:_score", "impl.evaluation:evaluate"}
    assert named <= {found.operation, *found.suspects}
    with monkeypatch.context() as listening:
        listening.setattr("blackswan.falsifiers.diagnosis.blame.suspects", lambda *asked: tuple(sorted(asked[2] or ())))
        ran = blamed("TRN-SCORES").culprit
    assert "impl.evaluation:_scores" in {ran.operation, *ran.suspects}
    monkeypatch.setattr("blackswan.falsifiers.diagnosis.blame.executed", lambda: nullcontext({"impl.apr:open_apr"}))
    found = blamed("TRN-SCORES").culprit
    assert (found.operation, found.suspects) == ("impl.apr:open_apr", ())
    assert found.explanation.startswith("no wrong version of it is known")
    monkeypatch.setattr("blackswan.falsifiers.diagnosis.blame.executed", lambda: nullcontext(set()))
    asked_again = "all functions are ranked, because when the claim was asked again"
    assert blamed("TRN-SCORES").culprit.explanation.endswith(f"{asked_again} no function of impl was called")

    def gone(_):
        raise ValueError("gone")

    monkeypatch.setattr("blackswan.falsifiers.diagnosis.blame.Trial", lambda *_: SimpleNamespace(run=partial(gone, None)))
    assert blamed("TRN-SCORES").culprit.explanation.endswith(f"{asked_again} it raised ValueError: gone")


@pytest.mark.parametrize(
    ("claim", "module", "name", "wrong"),
    [
        ("OPT-SCHEDULE", optimisation, "_rate", lambda rate: 0.9 * rate),
        ("OP-ROPE", attention, "frequencies", lambda found: 1.1 * found),
    ],
)
def test_a_wrong_function_below_an_operation_is_a_suspect(claim, module, name, wrong, monkeypatch):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: wrong(right(*given, **named)))
    full = f"impl.operations.{module.__name__.rpartition('.')[2]}:{name}"
    assert untouched(full)
    assert full in blamed(claim).culprit.suspects


def test_of_a_claim_on_an_operation_only_functions_that_ran_are_ranked():
    claim = CLAIMS["OPT-SCHEDULE"]
    assert set(suspects(claim, "rates", {"impl.metrics:cut_back"})) == {"impl.metrics:cut_back"}
    assert suspects(claim, "rates", ()) == ()
    assert len(suspects(claim, "rates")) == NAMED


def test_mutants_that_fail_at_the_same_place_count_most():
    places = recorded()["TRN-KILLED-AND-CONTINUED"]
    assert suspects(CLAIMS["TRN-KILLED-AND-CONTINUED"], places["resume_forgets_moments"])[0] == STEPS["resume_forgets_moments"].step


def test_a_failure_of_another_claim_in_the_same_words_counts(monkeypatch):
    """A function whose source says nothing of the kind is ranked by its mutants alone."""
    monkeypatch.setattr("blackswan.falsifiers.diagnosis.suspects.WORDS", 0.0)
    other = next(name for name in recorded()["TRN-RUN-STEPS"] if name in STEPS)
    place = recorded()["TRN-RUN-STEPS"][other]
    assert program().defined(STEPS[other].step) in suspects(replace(CLAIMS["TRN-RUN-STEPS"], id="TRN-RUN-STEPS-ANEW"), place)


@pytest.fixture
def planted(monkeypatch):
    """Says that one change is known, of a function and where TRN-SCORES fails on it, and no mutant."""

    def known(function, place):
        changes = {"TRN-SCORES": {"round-1/01-a-change": [function, place]}}
        monkeypatch.setattr(ranking, "planted", lambda: changes)
        monkeypatch.setattr(ranking, "recorded", dict)
        monkeypatch.setattr(ranking, "WORDS", 0.0)
        ranking._failures.cache_clear()

    yield known
    ranking._failures.cache_clear()


def test_a_planted_change_that_failed_at_the_same_place_counts_and_what_its_function_calls(planted):
    claim = CLAIMS["TRN-SCORES"]
    planted("impl.samples:split_validation", "step #, a place")
    first, *others = suspects(claim, "step 4, a place")
    assert first == "impl.samples:split_validation"
    assert failures_like(claim, "step 4, a place", first) == "a wrong version of it fails here too (round-1/01-a-change)"
    called = {name for name in program().calls[first] if name != first}
    assert called
    assert called <= set(others[: len(called)])
    assert not called & set(suspects(claim, "step 4, a place", {*program().functions} - {first})[: len(called)])


def test_a_change_of_a_function_that_is_gone_is_not_known(planted):
    planted("impl.samples:gone", "a place")
    assert suspects(CLAIMS["TRN-SCORES"], "a place") == ()


def test_an_error_says_which_functions_it_came_through():
    """Functions of others are not named, and neither is the folder in which a file lies."""
    with pytest.raises(ValueError, match="effective batch") as raised:
        samples.effective_batches([1], 0)
    came = came_through(raised.value)
    assert came == " (raised in impl.samples:effective_batches)"
    assert came_through(ValueError("of nobody")) == ""
    found = raised_instead(SubjectError(f"raised ValueError: /tmp/a b/x.apr: bad{came}"))
    assert found.where.endswith(f"x.apr: bad{came}")
    assert suspects(CLAIMS["DATA-BATCH"], found.where)[0] == "impl.samples:effective_batches"
    assert suspects(CLAIMS["DATA-BATCH"], found.tensor)[0] != "impl.samples:effective_batches"


def test_calls_inside_the_block_are_named_by_module_and_function_and_tracing_ends():
    before = sys.gettrace()
    with tracing.executed() as ran:
        samples.epoch_order(5, 1, 0)
    fit.require_a_rate([1.0])  # outside the block
    assert "impl.samples:epoch_order" in ran
    assert all(name.startswith("impl.") for name in ran)
    assert "impl.fit:require_a_rate" not in ran
    assert sys.gettrace() is before


def test_a_rank_has_what_is_planted_here_and_is_traced():
    right = IMPL.door("corpora").elsewhere("epoch_order", 50, 1, 1)
    with applied("order_same_in_each_epoch"):
        wrong = IMPL.door("corpora").elsewhere("epoch_order", 50, 1, 1)
        with tracing.executed() as ran:
            assert IMPL.door("corpora").elsewhere("epoch_order", 50, 1, 1) == wrong != right
    assert "impl.samples:epoch_order" in ran


def test_a_thread_that_outlives_the_block_is_traced_no_more(tmp_path):
    marker, go_on = (lambda *_: None), threading.Event()
    threading.settrace(marker)
    try:
        with tracing.executed() as ran:
            thread = threading.Thread(target=lambda: (go_on.wait(9), samples.effective_batches([1], 1)))
            thread.start()
        with (tmp_path / "another").open("w") as opened:  # which may have the number of the file that was closed
            go_on.set()
            thread.join()
            assert not (tmp_path / "another").read_text(), opened.name
        assert "impl.samples:effective_batches" not in ran
        assert threading.gettrace() is marker
    finally:
        threading.settrace(None)


def test_the_body_of_a_module_is_no_function():
    with tracing.executed() as ran:
        runpy.run_path(str(tracing.IMPL / "metrics.py"), run_name="again")
    assert not {name for name in ran if name.startswith("impl.metrics:")}


def test_a_failure_at_a_known_place_names_the_mutants_that_fail_there():
    claim, step = CLAIMS["TRN-KILLED-AND-CONTINUED"], STEPS["resume_forgets_moments"].step
    known = recorded()[claim.id]["resume_forgets_moments"]
    assert "fails here too (" in failures_like(claim, known, step)
    assert "though elsewhere" in failures_like(claim, "nowhere", step)
    assert failures_like(claim, known, "impl.apr:open_apr").startswith("no wrong version of it is known")


def test_a_function_has_the_name_of_the_module_that_defines_it():
    assert program().defined("impl.fit:evaluate") == "impl.evaluation:evaluate"
    assert program().defined("impl.fit:_Run._after") == "impl.fit:_Run._after"
    assert "impl.fit:_Run._after" in program().functions


def test_words_have_no_endings_and_names_are_parted():
    assert words("stale_epochs TokenBatches padded") == ["stal", "epoch", "token", "batch", "padd"]


def test_another_subject_has_no_suspects():
    found = falsify(CLAIMS["CLS-TRAJECTORY"], "float32", mutated("clip_per_tensor"), QUICK)
    assert diagnose(found.claim, found.case, found.comparison, mutated("clip_per_tensor")).suspects == ()


MODULE = """RATE = 1
MOST = 2

def fit():
    return 1

class Run:
    seed: int = 0

    def end(self):
        pass
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder for `impl` in a checkout of git, with one module and one commit."""
    for module in (changes, tracing):
        monkeypatch.setattr(module, "IMPL", tmp_path / "impl")
    changes.changed.cache_clear()
    (tmp_path / "impl").mkdir()
    (tmp_path / "impl/__init__.py").touch()
    (tmp_path / "impl/fit.py").write_text(MODULE)
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a commit -q -m one"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    yield tmp_path / "impl"
    changes.changed.cache_clear()


def test_what_differs_from_a_commit_is_known_by_name(checkout):
    assert changes.changed("HEAD") == set()
    text = (checkout / "fit.py").read_text().replace("MOST = 2", "MOST = 3").replace("int = 0", "int = 1").replace("pass", "return 2")
    (checkout / "fit.py").write_text(text.replace("return 1\n", "return 1  # the first\n"))
    (checkout / "new.py").write_text("if True:\n    def begin():\n        pass\n")
    changes.changed.cache_clear()
    assert changes.changed("HEAD") == {"impl.fit:MOST", "impl.fit:Run.seed", "impl.fit:Run.end", "impl.new:begin"}
    with pytest.raises(ValueError, match="bad revision 'nowhere'"):
        changes.changed("nowhere")


def test_without_a_checkout_nothing_is_known_to_be_changed(checkout):
    shutil.rmtree(checkout.parent / ".git")
    with pytest.raises(ValueError, match="not a git repository"):
        changes.changed("HEAD")


def test_what_is_changed_and_ran_stands_before_the_suspects(monkeypatch):
    right = optimisation._rate
    monkeypatch.setattr(optimisation, "_rate", lambda *given: 0.9 * right(*given))
    found = blamed("OPT-SCHEDULE")
    module = "impl.operations.optimisation"
    names = [f"{module}:MOST", f"{module}:learning_rate_schedule", "impl.fit:fit"]  # a constant of a module that ran; fit did not
    named = diagnose(found.claim, found.case, found.comparison, IMPL, changed=names)
    assert set(named.changed) == set(names[:2])
    third = story(replace(found, culprit=named)).splitlines()[2]
    assert re.search(r"suspects   [^;]*:MOST[^;]* \(changed, and run\); [^;]*:_rate[^;]* \(ranked, not proven\)$", third)
    assert third.count("learning_rate_schedule") == 1


def test_of_a_claim_on_runs_too_it_is_said_what_is_changed(monkeypatch):
    right = evaluation._scores
    monkeypatch.setattr(evaluation, "_scores", lambda *given: right(*given)[::-1])
    found = blamed("TRN-SCORES")
    named = diagnose(found.claim, found.case, found.comparison, IMPL, changed=["impl.evaluation:evaluate", "impl.apr:open_apr"])
    assert named.changed == ("impl.evaluation:evaluate",)


def test_suspects_are_within_the_first_three_lines_of_the_story(monkeypatch):
    right = optimisation._rate
    monkeypatch.setattr(optimisation, "_rate", lambda *given: 0.9 * right(*given))
    found = blamed("OPT-SCHEDULE")
    assert "  suspects   " in "\n".join(story(found).splitlines()[:3])
    assert "impl.operations.optimisation:_rate" in "\n".join(story(found).splitlines()[:3])


def test_records_and_pages_carry_the_suspects():
    named = asdict(Culprit("rms_norm", "rms_norm", "why", suspects=("impl.a:b", "impl.c:d"), changed=("impl.e:f",)))
    record = verdict(state="FALSIFIED", culprit={**named, **{key: list(named[key]) for key in ("suspects", "changed")}})
    jsonschema.Draft202012Validator({"$ref": "#/$defs/verdict", "$defs": SCHEMA["$defs"]}).validate(sealed(record, []))
    assert report_words.culprit(record).endswith("; changed, and run: impl.e:f; suspects, ranked and not proven: impl.a:b, impl.c:d")
    assert "suspects" not in report_words.culprit(verdict(state="FALSIFIED", culprit=CULPRIT))
