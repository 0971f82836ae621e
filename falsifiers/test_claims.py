"""Every claim of every contract, one test a claim and dtype. A new YAML file runs by being there."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.runner.campaign import Campaign, Target
from blackswan.falsifiers.runner.terminal import story
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.runner.verdict_file import UnwrittenError


def test_holds(target: Target, campaign: Campaign) -> None:
    """HELD passes; NOT_RUN is an outcome of its own; anything else fails."""
    with whole_or_none():
        verdict = campaign.attack(target)
    conclude(verdict, campaign)


def test_replay(stored: tuple[Claim, Case], campaign: Campaign) -> None:
    """One stored case, whatever has become of seeds and contracts."""
    claim, case = stored
    with whole_or_none():
        verdict = campaign.replay(claim, case)
    conclude(verdict, campaign)


@contextmanager
def whole_or_none() -> Iterator[None]:
    """Ends the run where a verdict cannot be written: that falsifies no claim."""
    try:
        yield
    except UnwrittenError as error:
        pytest.exit(f"blackswan: {error}", returncode=pytest.ExitCode.INTERNAL_ERROR)


def conclude(verdict: Verdict, campaign: Campaign) -> None:
    """Turns a verdict into a test's outcome. A known failure is an outcome of its own; an entry that is stale or out of date fails."""
    listed = campaign.listed(verdict)
    if listed and (objection := listed.objection(verdict, datetime.datetime.now(datetime.UTC).date())):
        pytest.fail(f"{objection}\n{story(verdict)}", pytrace=False)
    if listed and verdict.state is State.FALSIFIED:
        pytest.xfail(f"known until {listed.expiry}: {listed.reason}")
    if verdict.state is State.NOT_RUN and not campaign.required:
        pytest.skip(verdict.reason or "")
    if verdict.state is not State.HELD:
        pytest.fail(story(verdict), pytrace=False)
