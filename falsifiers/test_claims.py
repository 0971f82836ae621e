"""Every claim of every contract, one test a claim and dtype. A new YAML file runs by being there."""

from collections.abc import Callable
from typing import Any

import pytest

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.runner.campaign import Campaign, Target
from blackswan.falsifiers.runner.terminal import story
from blackswan.falsifiers.runner.verdict import State, Verdict

Note = Callable[[dict[str, Any]], None]


def test_holds(target: Target, campaign: Campaign, note: Note) -> None:
    """HELD passes; NOT_RUN is an outcome of its own; anything else fails."""
    conclude(campaign.attack(target), campaign, note)


def test_replay(stored: tuple[Claim, Case], campaign: Campaign, note: Note) -> None:
    """One stored case, whatever has become of seeds and contracts."""
    conclude(campaign.replay(*stored), campaign, note)


def conclude(verdict: Verdict, campaign: Campaign, note: Note) -> None:
    """Hands on a verdict's record and turns the verdict into a test's outcome. A known failure is an outcome of its own; an entry that is
    stale or out of date fails."""
    note(campaign.record(verdict))
    place = verdict.claim.id, verdict.dtype, verdict.device
    if objection := campaign.objection(*place, verdict.state):
        pytest.fail(f"{objection}\n{story(verdict)}", pytrace=False)
    if (listed := campaign.listed(*place)) and verdict.state is State.FALSIFIED:
        pytest.xfail(f"known until {listed.expiry}: {listed.reason}")
    if verdict.state is State.NOT_RUN and not campaign.required:
        pytest.skip(verdict.reason or "")
    if verdict.state is not State.HELD:
        pytest.fail(story(verdict), pytrace=False)
