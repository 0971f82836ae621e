"""Every claim of every contract, one test a claim and dtype. A new YAML file runs by being there."""

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
    """Turns a verdict into a test's outcome."""
    if verdict.state is State.NOT_RUN and not campaign.required:
        pytest.skip(verdict.reason or "")
    if verdict.state is not State.HELD:
        pytest.fail(story(verdict), pytrace=False)
