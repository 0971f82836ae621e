"""`pytest falsifiers`: options, the campaign, the header and the closing table."""

import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

from blackswan import contracts
from blackswan.contracts.model import Claim
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.runner.campaign import GENERATED, Campaign, Selection, Target
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.known_failures import load as known_failures_of
from blackswan.falsifiers.runner.options import alone, known_names, one_case, seconds, something, stored_case
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.terminal import kept, known, not_run, table, time_spent
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.runner.verdict_file import UnwrittenError, writable
from blackswan.impl.signals import no_interrupt_lost

EXIT_USAGE, EXIT_NOTHING_HELD, EXIT_NO_DEVICE = 4, 5, 6
CAMPAIGN = pytest.StashKey[Campaign]()
NOTES = pytest.StashKey[list[warnings.WarningMessage]]()
STORED = pytest.StashKey[tuple[Claim, Case]]()
OUTCOME = pytest.StashKey[str]()
DESELECTED = pytest.StashKey[bool]()
VERDICTS_HELP = "verdict file (default: reports/generated/verdicts.jsonl, of a replay replay.jsonl beside it)"
NOT_RUN, KNOWN_FAILURE = "not run", "known failure"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the main door."""
    group = parser.getgroup("falsifiers", "Blackswan")
    group.addoption("--model", type=Path, default=CHECKPOINT, metavar="DIR", help="checkpoint folder (default: the one shipped)")
    group.addoption("--corpus", type=Path, default=CORPUS_HELDOUT, metavar="FILE", help="JSONL corpus (default: the held-out one shipped)")
    group.addoption("--device", default="cpu", metavar="DEVICE", help="cpu | cuda | cuda:N | auto (default: cpu)")
    group.addoption("--dtype", action="append", default=[], choices=contracts.DTYPES, help="attack in this dtype only; may be repeated")
    group.addoption("--effort", choices=("quick", "default", "deep"), default="default", help="how many cases a claim gets")
    group.addoption("--claim", action="append", default=[], metavar="ID", help="attack this claim only; may be repeated")
    group.addoption(
        "--operation", action="append", default=[], metavar="NAME", help="attack claims on this operation only; may be repeated"
    )
    group.addoption("--require", action="append", default=[], choices=("cuda",), help="fail where a claim could not be run on it")
    group.addoption("--verdicts", type=Path, default=None, metavar="FILE", help=VERDICTS_HELP)
    group.addoption("--replay", type=Path, default=None, metavar="FILE", help="attack the one case stored in FILE")
    group.addoption(
        "--limit", type=seconds, default=None, metavar="SECONDS", help="attack in a process of its own, and stop a claim after this time"
    )
    group.addoption("--resume", action="store_true", help="go on with the run in the verdict file: what held there is not attacked again")
    group.addoption("--seed", type=int, default=0, help="seed of the run (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares the campaign; bad input stops here, before anything is written."""
    if config.option.help or config.option.version:
        return
    config.stash[CAMPAIGN] = _campaign(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """After pytest's own hook is there, to which an interrupt is a failure of the test."""
    stack = ExitStack()
    stack.enter_context(no_interrupt_lost())
    session.config.add_cleanup(stack.close)


def _campaign(config: pytest.Config) -> Campaign:
    option = config.option
    try:
        alone(config)
        loaded = contracts.load()
        selection = Selection(option.claim, option.operation, option.dtype)
        known_names(selection, loaded)
        real_input = RealInput(option.model, option.corpus)
        real_input.check()
        known_failures = known_failures_of([claim for contract in loaded for claim in contract.claims])
        path = writable(option.verdicts or GENERATED / ("replay.jsonl" if option.replay else "verdicts.jsonl"))
        if option.replay is not None:
            one_case(config)
            config.stash[STORED] = stored_case(loaded, option.replay)
    except (contracts.ContractError, ValueError, OSError) as error:
        pytest.exit(f"blackswan: {error}", returncode=EXIT_USAGE)
    from blackswan.falsifiers.subjects.implementation import Implementation
    from blackswan.impl.device import DeviceUnavailable

    try:
        with warnings.catch_warnings(record=True) as config.stash[NOTES]:
            warnings.simplefilter("always")
            subject = Implementation(option.device)
    except DeviceUnavailable as error:
        pytest.exit(f"blackswan: {error}", returncode=EXIT_NO_DEVICE)
    except ValueError as error:
        pytest.exit(f"blackswan: {error}", returncode=EXIT_USAGE)
    if "cuda" in option.require and not subject.device.startswith("cuda"):
        pytest.exit(f"blackswan: --require cuda, but this run's device is {subject.device}; add --device cuda", returncode=EXIT_NO_DEVICE)
    campaign = Campaign(
        subject,
        loaded,
        Options(option.effort, option.seed),
        selection,
        real_input,
        path,
        option.require,
        option.limit,
        known_failures,
        option.replay,
    )
    config.add_cleanup(campaign.release)
    try:
        something(campaign, option.replay is not None)
        campaign.reserve()
        if option.resume:
            campaign.resume()
    except (ValueError, OSError) as error:
        pytest.exit(f"blackswan: {error}", returncode=EXIT_USAGE)
    return campaign


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a target; with --replay only the stored case."""
    campaign, replayed = metafunc.config.stash[CAMPAIGN], metafunc.config.option.replay
    if "target" in metafunc.fixturenames:
        targets = [] if replayed else list(campaign.targets())
        metafunc.parametrize("target", targets, ids=str)
    if "stored" in metafunc.fixturenames:
        stored = [metafunc.config.stash[STORED]] if replayed else []
        metafunc.parametrize("stored", stored, ids=lambda pair: f"{pair[0].id} {pair[1].digest}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drops the placeholder that pytest makes of an empty parameter set: it is no verdict."""
    items[:] = [item for item in items if "NOTSET" not in item.name]


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remembers that a test was left out, by `-k` for one."""
    for item in items:
        item.config.stash[DESELECTED] = True


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest) -> Campaign:
    """The run's campaign."""
    return request.config.stash[CAMPAIGN]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Subject, device, dtypes, versions, seed, effort, real input."""
    campaign = config.stash.get(CAMPAIGN, None)
    if campaign is None:
        return []
    from blackswan.falsifiers.runner import environment

    versions = environment.versions(campaign.subject.device)
    shown = ", ".join(
        f"{name} {value}" for name, value in versions.items() if value and name in ("python", "numpy", "torch", "bitsandbytes", "cuda")
    )
    dtypes = sorted({target.dtype for target in campaign.targets()})
    name = environment.device_name(campaign.subject.device)
    where = f"{campaign.subject.device} ({name})" if name else campaign.subject.device
    return [
        f"blackswan: subject {campaign.subject.name} on {where} in {', '.join(dtypes) or 'no dtype'}",
        f"  {shown}",
        f"  seed {campaign.options.seed}, effort {campaign.options.effort}, claims of {len(campaign.contracts)} contracts",
        *([f"  resumed: {len(campaign.kept)} verdicts that held are kept"] if campaign.kept else []),
        f"  model {environment.display_path(campaign.real_input.model)}, corpus {environment.display_path(campaign.real_input.corpus)}",
        *(f"  note: {note.message}" for note in config.stash[NOTES]),
    ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Opens the verdict file once it is known that a claim will be attacked; a run of other tests alone leaves it as it is."""
    campaign = session.config.stash.get(CAMPAIGN, None)
    if campaign is None or session.config.option.collectonly:
        return
    params = [item.callspec.params for item in session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    campaign.keep_except(target for found in params if isinstance(target := found.get("target"), Target))
    if any("campaign" in getattr(item, "fixturenames", ()) for item in session.items):
        try:
            campaign.open()
        except OSError as error:
            reason = f"{campaign.verdict_file} cannot be written: {error.strerror or error}"
            pytest.exit(f"blackswan: --verdicts: {reason}", returncode=EXIT_USAGE)
        except ValueError as error:
            pytest.exit(f"blackswan: {error}", returncode=EXIT_USAGE)
        except UnwrittenError as error:
            pytest.exit(f"blackswan: {error}", returncode=pytest.ExitCode.INTERNAL_ERROR)


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """NOT_RUN is neither passed nor skipped, and a known failure neither passed nor failed."""
    if hasattr(report, "wasxfail"):
        return KNOWN_FAILURE, "K", ("KNOWN FAILURE", {"yellow": True})
    if report.skipped and getattr(report, "when", None) == "call":
        return NOT_RUN, "N", ("NOT RUN", {"yellow": True})
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Leaves out frames of instructions that CPython gives no line, where an interrupt may come; pytest fails on them."""
    excinfo.traceback = type(excinfo.traceback)(entry for entry in excinfo.traceback if entry._rawentry.tb_lineno is not None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing held is no success; the verdict file is closed and the report rendered."""
    campaign = session.config.stash.get(CAMPAIGN, None)
    if campaign is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _all_had_held(session.config, campaign):
        session.exitstatus = pytest.ExitCode.OK
    if campaign is not None and session.exitstatus == pytest.ExitCode.OK and campaign.kept_failures:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if campaign is None:
        return
    if campaign.is_open and exitstatus == pytest.ExitCode.OK and not any(verdict.state is State.HELD for verdict in campaign.verdicts):
        session.exitstatus = EXIT_NOTHING_HELD
    session.config.stash[OUTCOME] = _recorded(campaign, session, exitstatus == pytest.ExitCode.INTERRUPTED)


def _recorded(campaign: Campaign, session: pytest.Session, interrupted: bool) -> str:
    """Closes the verdict file and renders its report; says where they are, or why not: then what held is no success."""
    file = campaign.verdict_file
    try:
        campaign.close(int(session.exitstatus), interrupted)
        return f"verdicts: {_shown(file)}; report: {_shown(_report(campaign))}" if campaign.verdicts else ""
    except (UnwrittenError, OSError, ValueError) as error:
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        reason = f"{error.strerror}: {error.filename2 or error.filename}" if isinstance(error, OSError) and error.strerror else error
        return f"blackswan: the report of {_shown(file)} is not whole: {reason}"


def _all_had_held(config: pytest.Config, campaign: Campaign) -> bool:
    """Whether a resumed run had nothing left to do; a selection that matches nothing is no such run."""
    return bool(campaign.kept) and not any(campaign.targets()) and not config.stash.get(DESELECTED, False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table, what was not run and why, the time by stage, and where the report is."""
    campaign = config.stash.get(CAMPAIGN, None)
    if campaign is None or not campaign.verdicts:
        return
    terminalreporter.section("verdicts")
    found = campaign.verdicts
    for line in (*table(found), *not_run(found), *known(found), *kept(campaign.kept_failures), time_spent(found)):
        terminalreporter.write_line(line)
    terminalreporter.write_line(config.stash.get(OUTCOME, ""))


def _shown(path: Path) -> str:
    from blackswan.falsifiers.runner.environment import display_path

    return display_path(path)


def _report(campaign: Campaign) -> Path:
    from blackswan.reports.render import write_pages

    _, pages = write_pages(campaign.verdict_file, campaign.verdict_file.parent)
    return pages[0]
