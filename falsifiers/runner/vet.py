"""`blackswan vet`: somebody's function, module or subject is asked every claim on what it has, in a process that never holds an answer."""

import argparse
import importlib
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from blackswan import contracts
from blackswan.contracts.model import Claim, Contract
from blackswan.contracts.vocabulary import own_folder, use_folder
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.runner import options
from blackswan.falsifiers.runner.campaign import Campaign, Selection, Target
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.terminal import story
from blackswan.falsifiers.runner.validate_case import stored_case
from blackswan.falsifiers.runner.verdict import State, Verdict, plain
from blackswan.falsifiers.runner.verdict_file import VerdictFile, writable
from blackswan.falsifiers.subjects.isolated import Isolated
from blackswan.falsifiers.subjects.named import Named, require_device, subject_of
from blackswan.falsifiers.subjects.protocol import Lacks, Subject
from blackswan.reports import places

EXIT_FAILED, EXIT_USAGE, EXIT_NOTHING_HELD = 1, 4, 5
MATTERS = {
    "models": ("whole_models",),
    "trainer": ("continued", "entry_points", "non_finite", "parallel", "parallel_runs", "runs", "scores", "split_runs"),
}
"""The modules of `system` whose claims are asked of a subject that has a door."""
BAD = (State.FALSIFIED, State.FLAKY, State.VACUOUS)
DESCRIPTION = """Asks your code every claim on the operations that it has, in a process of its own that never holds an answer. Each claim
holds, is falsified by a smallest case that can be replayed, or could not be asked. Exit status: 0 all held, 1 a claim failed, 4 the subject
or an option cannot be used, 5 nothing held."""


@dataclass
class Result:
    """What a subject came to: a verdict for each claim and dtype that it was asked."""

    subject: str
    verdicts: list[Verdict]

    @property
    def failures(self) -> list[Verdict]:
        """The verdicts that say that something is wrong."""
        return [verdict for verdict in self.verdicts if verdict.state in BAD]

    def __str__(self) -> str:
        """A line a claim, the story of each failure, and the totals."""
        told = [(one.claim.operation or one.claim.id, telling(one), f"\n{story(one)}") for one in self.failures]
        return "\n".join(
            [*map(line, self.verdicts), *most_telling(told), "", totals(self.subject, [verdict.state for verdict in self.verdicts])]
        )


Telling = tuple[bool, float]


def telling(verdict: Verdict) -> Telling:
    """Whether a wrong program was found that errs likewise, and the error as a share of its tolerance, infinite where there is none."""
    named = verdict.culprit is not None and verdict.culprit.mutant is not None
    return named, verdict.comparison.headroom if verdict.comparison else float("inf")


def most_telling(failures: Iterable[tuple[str, Telling, str]]) -> list[str]:
    """The story of one failure of each operation, the most telling: the others mostly say the same again. Claims about runs have none."""
    best: dict[str, tuple[Telling, str]] = {}
    for operation, how, told in failures:
        if operation not in best or how > best[operation][0]:
            best[operation] = how, told
    return [told for _, told in best.values()]


def line(verdict: Verdict) -> str:
    """State, claim, dtype, and the worst error as a share of its tolerance, or why the claim was not asked."""
    worst = verdict.tally.worst
    found = f"{verdict.tally.run} cases, worst error {worst.headroom:.3g} × its tolerance" if worst else ""
    place = f"{verdict.claim.id} in {verdict.dtype}"
    return f"{verdict.state.value:<9}  {place:<40}  {'; '.join(filter(None, (found, verdict.reason)))}".rstrip()


def totals(name: str, states: Sequence[str]) -> str:
    """How many verdicts there are of each state."""
    counts = Counter(states)
    return f"{name}: " + (", ".join(f"{counts[state]} {state.value}" for state in State if counts[state]) or "no claim was asked")


def asked_of(subject: Subject, loaded: Sequence[Contract]) -> list[Contract]:
    """The contracts with the claims on operations that the subject has, each on the device that the subject is on, where it speaks of that.

    A contract on request is asked without one where no other contract speaks of an operation of the subject's.
    """
    regular = {claim.operation for contract in loaded if not contract.on_request for claim in contract.claims}
    kept = [(contract, tuple(_on(subject, claim) for claim in contract.claims if _has(subject, claim))) for contract in loaded]
    return [
        replace(contract, claims=claims, on_request=contract.on_request and all(claim.operation in regular for claim in claims))
        for contract, claims in kept
    ]


def _has(subject: Subject, claim: Claim) -> bool:
    if claim.operation is None or claim.kind == "rule":
        matter = (claim.check or "").partition(".")[0]
        return any(matter in matters and _opens(subject, door) for door, matters in MATTERS.items())
    return any(subject.unsupported(claim.operation, dtype) is None for dtype in claim.domain.dtype)


def _opens(subject: Subject, door: str) -> bool:
    try:
        subject.door(door)
    except Lacks:
        return False
    return True


def _on(subject: Subject, claim: Claim) -> Claim:
    """The claim on the subject's device alone; as it is, and so not run, where its tolerance was measured on other devices only."""
    here = subject.device.partition(":")[0] in claim.domain.device
    return replace(claim, domain=replace(claim.domain, device=())) if here else claim


def check(
    subject: Any,
    *,
    operation: str | None = None,
    claims: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    effort: str = "default",
    seed: int = 0,
    on_fail: str = "raise",
) -> Result:
    """Asks a subject every claim on what it has, in this process.

    `subject` is a function or a torch.nn.Module (with the name of its `operation`, unless that is the function's own name), a mapping from
    operations to functions, or a Subject, of which `operation` chooses one. `on_fail` is raise, for an AssertionError that says which
    claims failed, on which case, and how to replay it, or return. Raises a ValueError for a subject or a name that cannot be used.
    """
    __tracebackhide__ = True
    if on_fail not in ("raise", "return"):
        raise ValueError(f"on_fail={on_fail!r}: expected raise or return")
    given = as_subject(subject, operation, device)
    campaign = campaign_of(
        given, Selection(claims, (), dtypes), Options(effort, seed), command=replaying(subject, operation, device), operation=operation
    )
    result = Result(campaign.subject.name, [campaign.attack(target) for target in campaign.targets()])
    if result.failures and on_fail == "raise":
        raise AssertionError(str(result))
    return result


def as_subject(given: Any, operation: str | None = None, device: str = "cpu") -> Subject:
    """The subject that an object is, guarded, in this process."""
    from blackswan.falsifiers.subjects.guards import Guards

    require_device(device)
    return subject_of(given, getattr(given, "__qualname__", type(given).__name__), operation, device, Guards())


def replaying(given: Any, operation: str | None, device: str) -> str:
    """The command that asks an object of this process, by the name under which its module has it where it has one."""
    if isinstance(given, Mapping) and len(given) == 1:  # which has no name of its own; its function mostly has
        ((operation, given),) = given.items()
    module, name = sys.modules.get(getattr(given, "__module__", "")), getattr(given, "__qualname__", "")
    file = getattr(module, "__file__", None) if getattr(module, name, None) is given else None
    named = ["--operation", operation] if operation else []
    place = f"{places.shown(Path(file))}:{name}" if file else "FILE.py:NAME"
    return " ".join(["blackswan vet", *map(shlex.quote, [place, *named, *(["--device", device] if device != "cpu" else [])])])


def _with_own() -> None:
    if own_folder():
        importlib.import_module("blackswan.falsifiers.mutants")  # runs the user's decorators


@cache
def _every_contract() -> list[Contract]:
    """The contracts, read once for all subjects of a process, and where there are the user's own, what they need."""
    _with_own()
    return contracts.load()


def campaign_of(
    subject: Subject,
    chosen: Selection,
    effort: Options,
    verdicts: Path | None = None,
    command: str | None = None,
    operation: str | None = None,
) -> Campaign:
    """The claims on what the subject has, or on that operation of it. ValueError where none is left, or a name is unknown."""
    loaded = _every_contract()
    options.known_names(replace(chosen, operations=[operation] if operation else []), loaded)
    path = verdicts or places.generated() / "vet.jsonl"
    asked = asked_of(subject, loaded)
    if operation:
        asked = [replace(one, claims=tuple(claim for claim in one.claims if claim.operation == operation)) for one in asked]
    campaign = Campaign(subject, asked, effort, chosen, RealInput(CHECKPOINT, CORPUS_HELDOUT), path)
    campaign.command = command
    if not any(campaign.targets()):
        has = sorted({claim.operation for contract in asked_of(subject, loaded) for claim in contract.claims if claim.operation})
        missing = f"has no {operation}" if operation and operation not in has else "has nothing that the chosen claims are on"
        raise ValueError(f"{subject.name} {missing}; it has {', '.join(has) or 'no operation'}")
    return campaign


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `blackswan vet`."""
    found = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    add = found.add_argument
    add("subject", metavar="SUBJECT", help="FILE.py:NAME or package.module:NAME of a function, a torch.nn.Module, a dict or a Subject")
    add("--operation", metavar="NAME", help="which operation a function or module is (default: its own name), or which one to ask")
    add("--claim", action="append", default=[], metavar="ID", help="ask this claim only; may be repeated")
    add("--dtype", action="append", default=[], choices=contracts.DTYPES, help="ask in this dtype only; may be repeated")
    add("--device", default="cpu", help="where its tensors are: cpu, cuda, cuda:1 (default: cpu)")
    add("--effort", choices=("quick", "default", "deep"), default="default", help="how many cases a claim gets")
    add("--seed", type=int, default=0, help="seed of the run (default: 0)")
    add("--contiguous", action="store_true", help="its tensors are contiguous, for it says that it takes no others")
    add("--aligned", action="store_true", help="its tensors begin at multiples of 64 elements, for it says that it takes no others")
    add(
        "--contracts",
        type=Path,
        metavar="DIR",
        help="ask the claims of this folder of your own too; its Python files hold their references",
    )
    add("--declare", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="a convention that it follows; may be repeated")
    add("--replay", type=Path, metavar="FILE", help="ask the one case that is stored in FILE")
    add("--verdicts", type=Path, metavar="FILE", help="the verdict file (default: vet.jsonl, where the other commands write)")
    add("--json", action="store_true", help="print the verdicts' records as JSON, and nothing else")
    add("-n", "--processes", type=options.positive, default=options.cores(), help="processes (default: all cores)")
    return found


def main(arguments: Sequence[str], prog: str = "blackswan vet") -> int:
    """Runs the command; returns its exit status."""
    given = parser(prog).parse_args(arguments)
    named = Named(given.subject, given.operation, given.device, True, given.contiguous, given.aligned, tuple(given.declare))
    try:
        use_folder(given.contracts)
        return _vet(given, Isolated(named), _command(prog, given))
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_USAGE


def _command(prog: str, given: argparse.Namespace) -> str:
    named = ["--operation", given.operation] if given.operation else []
    own = ["--contracts", str(given.contracts)] if given.contracts else []
    device = ["--device", given.device] if given.device != "cpu" else []
    declared = [word for name, value in given.declare for word in ("--declare", f"{name}={value}")]
    tensors = [option for option in ("--contiguous", "--aligned") if getattr(given, option[2:])]
    return " ".join([prog, *map(shlex.quote, [given.subject, *named, *device, *own, *tensors, *declared])])


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, such as intermediates=storage")
    return name, value


def _vet(given: argparse.Namespace, subject: Isolated, command: str) -> int:
    chosen, effort = Selection(given.claim, (), given.dtype), Options(given.effort, given.seed)
    campaign = campaign_of(subject, chosen, effort, given.verdicts and writable(given.verdicts), command, given.operation)
    if given.replay:
        stored = stored_case(campaign.contracts, given.replay)
        found: Iterator[_Found] = iter([_found(campaign, campaign.replay(*stored))])
    else:
        found = _attacked(campaign, list(campaign.targets()), given.processes)
    file = VerdictFile(campaign, given.replay)
    file.open()
    say: Callable[..., None] = (lambda *_, **__: None) if given.json else print
    failures = []
    for record, said, told in found:
        file.add(record)
        say(said, flush=True)
        failures += [(record["operation"] or record["claim"], *told)] if record["state"] in BAD else []
    states = [record["state"] for record in file.records.values()]
    status = EXIT_FAILED if failures else 0 if State.HELD in states else EXIT_NOTHING_HELD
    file.close(status, interrupted=False)
    subject.close()
    say(
        *(f"\n{told}" for told in most_telling(failures)),
        f"\n{totals(subject.name, states)}; verdicts: {places.shown(file.path)}",
        sep="\n",
    )
    if given.json:
        print(json.dumps(list(file.records.values()), indent=2, ensure_ascii=False))
    return status


_Found = tuple[dict[str, Any], str, tuple[Telling, str]]
"""A verdict's record, its line, and how telling its story is, with the story."""
_shared: list[Campaign] = []


def _found(campaign: Campaign, verdict: Verdict) -> _Found:
    return campaign.record(verdict), plain(line(verdict)), (telling(verdict), plain(story(verdict)))


def _attacked(campaign: Campaign, targets: Sequence[Target], processes: int) -> Iterator[_Found]:
    """The verdicts, from so many processes, each of which has a process of the subject beside it.

    Claims that want most of a GPU's memory come last, one after another in this process.
    """
    wanted = min(processes, len(targets) // options.TARGETS_PER_PROCESS)
    shared = [number for number, target in enumerate(targets) if wanted >= 2 and not target.group]
    alone = [target for number, target in enumerate(targets) if number not in shared]
    if shared:
        with ProcessPoolExecutor(wanted, get_context("spawn"), _share, (campaign,)) as pool:
            yield from pool.map(_attack, shared)
    yield from (_found(campaign, campaign.attack(target)) for target in alone)


def _share(campaign: Campaign) -> None:
    _with_own()
    _shared.append(campaign)


def _attack(index: int) -> _Found:
    (campaign,) = _shared
    return _found(campaign, campaign.attack(list(campaign.targets())[index]))
