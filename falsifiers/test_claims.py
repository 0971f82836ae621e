"""Every claim of every contract, one test a claim and dtype. A new YAML file runs by being there."""

import datetime

import pytest

from contracts.model import Claim
from falsifiers.campaign import Campaign, Target
from falsifiers.case import Case
from falsifiers.terminal import story
from falsifiers.verdict import State, Verdict


def test_holds(target: Target, campaign: Campaign) -> None:
    """HELD passes; NOT_RUN is an outcome of its own; anything else fails."""
    conclude(campaign.attack(target), campaign)


def test_replay(stored: tuple[Claim, Case], campaign: Campaign) -> None:
    """One stored case, whatever has become of seeds and contracts."""
    claim, case = stored
    conclude(campaign.replay(claim, case), campaign)


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
