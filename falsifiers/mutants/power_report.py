"""The report on a kill matrix: faults of claims and mutants, the power of each claim, and who killed whom."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from blackswan.contracts.model import Claim
from blackswan.falsifiers.mutants.power import ENOUGH, Cell, candidate_mutants
from blackswan.falsifiers.runner.verdict import State

LEAST_POWER = 3.0
LOOSEST = 10.0
"""Noise floors that a literal tolerance may amount to."""


def shown(power: float) -> str:
    """Error / tolerance as text; attacks end at ENOUGH."""
    return f"≥{ENOUGH:g}" if power >= ENOUGH else f"{power:.3g}"


def faults(claims: Sequence[Claim], names: Sequence[str], cells: Sequence[Cell], chosen_mutants: bool = False) -> list[str]:
    """Everything that makes the matrix fail, one line each; empty when all claims can fail and all mutants die.

    Against chosen mutants alone, a claim need not kill any.
    """
    powerless = () if chosen_mutants else _powerless(claims, cells)
    return [*_unsound(cells), *_survivors(claims, names, cells), *powerless, *_uncaught(cells)]


def closing(names: Sequence[str], cells: Sequence[Cell], chosen_claims: bool, chosen_mutants: bool) -> str:
    """The last line where nothing is at fault: how many of the mutants tried die, and which claims can fail."""
    if not chosen_claims and not chosen_mutants:
        return "every mutant dies, every claim can fail"
    kills = [cell for cell in cells if cell.killed and not cell.honest]
    dead, claims = {cell.mutant for cell in kills}, list(dict.fromkeys(cell.claim for cell in kills))
    die = f"{len(dead)} of {len(names)} mutants {'dies' if len(dead) == 1 else 'die'} here"
    if chosen_mutants:
        return f"{die}, by {listed(claims)}"
    catch = "catches what it must" if len(claims) == 1 else "catch what they must"
    return f"{die}: {listed(claims)} {catch} and can fail"


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _unsound(cells: Iterable[Cell]) -> Iterator[str]:
    for cell in cells:
        if cell.mutant is None and cell.state != State.HELD.value:
            yield f"{cell.claim} in {cell.dtype}: {cell.state} on the correct subject ({cell.reason}); a claim must hold there"
        if cell.honest and cell.state not in (State.HELD.value, State.NOT_RUN.value):
            yield f"{cell.claim} in {cell.dtype}: {cell.state} on {cell.mutant}, which is right ({cell.reason}); see mutants/honest.py"
        if cell.looseness is not None and cell.looseness > LOOSEST:
            yield (
                f"{cell.claim} in {cell.dtype}: its literal tolerance is {cell.looseness:.3g} noise floors; at most {LOOSEST:g} tell a "
                "wrong answer from rounding"
            )


def _survivors(claims: Sequence[Claim], names: Iterable[str], cells: Iterable[Cell]) -> Iterator[str]:
    dead = {cell.mutant for cell in cells if cell.killed}
    for name in names:
        if name not in dead:
            tried = [claim.id for claim in claims if name in candidate_mutants(claim)]
            where = f"of {listed(tried)}" if tried else "reaches it: a claim on its operation is missing"
            yield f"mutant {name}: survives; no claim {where}"


def _powerless(claims: Iterable[Claim], cells: Iterable[Cell]) -> Iterator[str]:
    deadly = {cell.claim for cell in cells if cell.killed and not cell.honest}
    for claim in claims:
        if claim.id not in deadly:
            yield f"{claim.id}: kills no mutant, so that nothing shows it can fail; name one in must_catch"


def _uncaught(cells: Iterable[Cell]) -> Iterator[str]:
    """In every dtype of the claim but those in which the catalogue says that rounding hides the mutant."""
    for cell in cells:
        where, most = f"{cell.claim} in {cell.dtype}", f"largest error / tolerance: {shown(cell.power)}"
        if cell.must_catch and not cell.killed:
            yield f"{where}: does not catch {cell.mutant}, which it must ({cell.reason or most})"
        elif cell.must_catch and cell.power < LEAST_POWER:
            yield f"{where}: catches {cell.mutant} too narrowly ({most}; at least {LEAST_POWER:g} asked for)"


def power(cells: Iterable[Cell]) -> dict[tuple[str, str], tuple[float, str]]:
    """Claim and dtype → power, and the mutant that gives it."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for cell in cells:
        key = (cell.claim, cell.dtype)
        if cell.must_catch and cell.mutant and (key not in found or cell.power < found[key][0]):
            found[key] = (cell.power, cell.mutant)
    return found


def power_table(cells: Sequence[Cell]) -> list[str]:
    """A line a claim and dtype, the weakest first."""
    rows = sorted(power(cells).items(), key=lambda row: (row[1][0], row[0]))
    return [f"{claim:28} {dtype:9} {shown(value):>8}  {mutant}" for (claim, dtype), (value, mutant) in rows]


def kill_table(names: Iterable[str], cells: Sequence[Cell]) -> list[str]:
    """A line a mutant: the claims that killed it, and what the quickest kill took."""
    kills: Mapping[str | None, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.killed:
            kills[cell.mutant].append(cell)
    return [_killed(name, kills[name]) for name in names]


def _killed(name: str, kills: Sequence[Cell]) -> str:
    if not kills:
        return f"{name:46} SURVIVED"
    quickest = min(kills, key=lambda cell: cell.seconds)
    by = sorted({cell.claim for cell in kills})
    return f"{name:46} {quickest.cases:4} cases {quickest.seconds:7.3f} s  {listed(by, 4)}"
