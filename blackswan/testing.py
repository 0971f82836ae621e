"""A test of a user's own, run once for each claim and dtype: `@blackswan.parametrize({"rms_norm": my_norm})`."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from blackswan.falsifiers.runner.campaign import Campaign, Selection, Target
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.terminal import story
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.runner.vet import as_subject, campaign_of, replaying


class ClaimOfSubject:
    """One claim in one dtype, asked of the subject when it is called."""

    def __init__(self, campaign: Campaign, target: Target) -> None:
        self.campaign, self.target = campaign, target

    def __call__(self) -> None:
        """An AssertionError with the story of a claim that does not hold. A claim that cannot be asked skips the test, with the reason."""
        __tracebackhide__ = True
        verdict = self.campaign.attack(self.target)
        if verdict.state is State.NOT_RUN:
            pytest.skip(f"{verdict.claim.id}: {verdict.reason}")
        if verdict.state is not State.HELD:
            raise AssertionError(story(verdict))


def parametrize(
    subject: Any, *, operation: str | None = None, device: str = "cpu", effort: str = "default", expected: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Runs a test once for each claim on what the subject has: its argument `claim` is called to ask it.

        @blackswan.parametrize({"rms_norm": my_norm}, expected={"OP-RMSNORM": "issue 12"})
        def test_my_norm(claim):
            claim()

    `subject`, `operation`, `device` and `effort` are those of `blackswan.check`. A claim that is named in `expected` is known to fail, for
    the reason given; that it holds after all fails its test. Raises a ValueError for a claim in `expected` that is not asked.
    """
    known = dict(expected or {})
    command = replaying(subject, operation, device)
    campaign = campaign_of(as_subject(subject, operation, device), Selection(), Options(effort), command=command, operation=operation)
    targets = list(campaign.targets())
    for name in known:
        if name not in {target.claim.id for target in targets}:
            asked = ", ".join(dict.fromkeys(target.claim.id for target in targets))
            raise ValueError(f"expected: {name} is not asked of {campaign.subject.name}; it is asked {asked}")
    return pytest.mark.parametrize("claim", [_parameter(campaign, target, known) for target in targets])


def _parameter(campaign: Campaign, target: Target, known: Mapping[str, str]) -> Any:
    reason = known.get(target.claim.id)
    marks = [pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True)] if reason else []
    return pytest.param(ClaimOfSubject(campaign, target), id=f"{target.claim.id}-{target.dtype}", marks=marks)
