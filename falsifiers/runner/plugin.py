"""`pytest falsifiers`: options, targets shared out to processes, verdicts gathered in one file, header, closing table, exit status."""

import argparse
import faulthandler
import os
import re
import shlex
import time
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blackswan import contracts
from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.changes import changed
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.runner import environment, options, terminal
from blackswan.falsifiers.runner.campaign import Campaign, Selection, targets
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.known_failures import load as load_known_failures
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.validate_case import stored_case
from blackswan.falsifiers.runner.verdict import State, plain
from blackswan.falsifiers.runner.verdict_file import UnwrittenError, VerdictFile, writable
from blackswan.falsifiers.runner.vet import asked_of
from blackswan.falsifiers.subjects.isolated import Isolated
from blackswan.falsifiers.subjects.named import Named
from blackswan.falsifiers.subjects.unloadable import Unloadable
from blackswan.reports import places

EXIT_USAGE, EXIT_NOTHING_HELD, EXIT_NO_DEVICE = 4, 5, 6
CAMPAIGN = pytest.StashKey[Campaign]()
CONTRACTS = pytest.StashKey[list[contracts.Contract]]()
STORED = pytest.StashKey[tuple[Claim, Case]]()
NOTES = pytest.StashKey[list[warnings.WarningMessage]]()
NOT_RUN, KNOWN_FAILURE = "not run", "known failure"
VERDICT = "blackswan verdict"
"""The user property of a report that carries the record of a verdict from the process that reached it to the one that writes it."""
CRASHED = "???"
"""The name that pytest-xdist gives the phase of a test in which its process ended."""
_ASKED = re.compile(r"test_claims\.py::test_(?:holds|replay)\[(.*)\](?:@[^]]*)?$", re.DOTALL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the main door."""
    options.add(parser.getgroup("falsifiers", "Blackswan").addoption)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Shares the claims out to all cores, one at a time and in their order, where the command line does not say how."""
    option = config.option
    if hasattr(config, "workerinput") or option.help or option.version:
        return
    options.known_profile(config.getoption("--hypothesis-profile", None))
    if not hasattr(option, "numprocesses"):
        if option.limit is not None:
            raise pytest.UsageError("--limit ends a process of pytest-xdist; expected no -p no:xdist beside it")
        return
    if option.numprocesses is None and not option.tx and option.dist == "no" and not (option.collectonly or option.usepdb):
        option.numprocesses = options.processes(_targets(config), option.device)
    if option.limit is not None and not option.tx:
        option.numprocesses = option.numprocesses or 1
    if option.numprocesses and option.dist == "no":
        option.dist, option.maxschedchunk = "load", option.maxschedchunk or 1
    if option.numprocesses:  # processes that each use all cores wait for each other: on two cores a run takes four times as long
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _targets(config: pytest.Config) -> int:
    option = config.option
    if option.replay is not None:
        return 1
    try:
        chosen = Selection(option.claim, option.operation, option.dtype)
        return len(targets(_contracts(config), chosen, option.device.split(":")[0]))
    except contracts.ContractError:  # which pytest_configure reports
        return 0


def _contracts(config: pytest.Config) -> list[contracts.Contract]:
    if CONTRACTS not in config.stash:
        config.stash[CONTRACTS] = contracts.load()
    return config.stash[CONTRACTS]


def pytest_configure(config: pytest.Config) -> None:
    """Prepares the campaign; bad input stops here, before anything is written or attacked."""
    if config.option.help or config.option.version:
        return
    shared = getattr(config, "workerinput", None)
    try:
        campaign = config.stash[CAMPAIGN] = _campaign(config)
        if shared is not None:
            campaign.held = {tuple(key) for key in shared["blackswan_held"]}
            return
        file = VerdictFile(campaign, config.option.replay)
        if config.option.resume:
            file.resume()
    except (contracts.ContractError, ValueError, OSError) as error:
        pytest.exit(f"blackswan: {error}", returncode=EXIT_USAGE)
    config.pluginmanager.register(Recorder(config, file), "blackswan recorder")


def _campaign(config: pytest.Config) -> Campaign:
    """The campaign of the options. ContractError, ValueError or OSError says what cannot be used. An absent device ends the run."""
    option, worker = config.option, hasattr(config, "workerinput")
    loaded = _contracts(config)
    selection = Selection(option.claim, option.operation, option.dtype)
    options.known_names(selection, loaded)
    real_input = RealInput(option.model, option.corpus)
    path = option.verdicts or places.generated() / ("replay.jsonl" if option.replay else "verdicts.jsonl")
    if not worker:
        real_input.check()
        writable(path)
    if option.replay is not None:
        options.one_case(option)
        config.stash[STORED] = stored_case(loaded, option.replay)
    known_failures = load_known_failures([claim for contract in loaded for claim in contract.claims])
    subject = _subject(config)
    if option.subject:
        loaded = asked_of(subject, loaded)
    effort = Options(option.effort, option.seed)
    campaign = Campaign(subject, loaded, effort, selection, real_input, path, option.require, known_failures)
    if option.subject and option.since:
        raise ValueError("--since is about changes of impl, and --subject attacks other code; expected only one of them")
    campaign.changed = _changed(option.since)
    if option.subject:
        named = ["--subject", option.subject, *(f"--operation={name}" for name in option.operation)]
        campaign.command = f"{places.attack_command()} {shlex.join(named)}"
    if option.replay is None and not any(campaign.targets()):
        raise options.nothing_to_attack(selection, loaded)
    return campaign


def _changed(since: str | None) -> Collection[str]:
    """Names of what differs in `impl` from the commit, or from the last one where none is named; none where there is no checkout."""
    try:
        return changed("HEAD" if since is None else since)
    except ValueError as error:
        if since is not None:
            raise ValueError(f"--since {since}: {error}; expected a commit of the checkout that holds impl") from None
        return ()


def _subject(config: pytest.Config) -> Any:
    """The implementation on the device that was asked for; the run ends with a status of its own where that is not there."""
    option = config.option
    if option.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks for it when it is imported
    try:
        from blackswan.falsifiers.subjects.implementation import Implementation
        from blackswan.impl.device import DeviceUnavailable
    except ImportError as error:
        if not (error.name or "").startswith("blackswan.impl"):  # a library that is missing says nothing about `impl`
            raise
        config.stash[NOTES] = []
        return Unloadable(option.device, error)

    try:
        with warnings.catch_warnings(record=True) as config.stash[NOTES]:
            warnings.simplefilter("always")
            subject = Isolated(_named(option)) if option.subject else Implementation(option.device)
    except DeviceUnavailable as error:
        pytest.exit(f"blackswan: {error}", returncode=EXIT_NO_DEVICE)
    if "cuda" in option.require and not subject.device.startswith("cuda"):
        pytest.exit(f"blackswan: --require cuda, but this run's device is {subject.device}; add --device cuda", returncode=EXIT_NO_DEVICE)
    return subject


def _named(option: argparse.Namespace) -> Named:
    operations = option.operation
    return Named(option.subject, operations[0] if len(operations) == 1 else None, option.device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a target; with --replay only the stored case."""
    campaign, replayed = metafunc.config.stash[CAMPAIGN], metafunc.config.option.replay
    if "target" in metafunc.fixturenames:
        found = [] if replayed else list(campaign.targets())
        metafunc.parametrize("target", [pytest.param(target, id=str(target)) for target in found])
    if "stored" in metafunc.fixturenames:
        stored = [metafunc.config.stash[STORED]] if replayed else []
        metafunc.parametrize("stored", stored, ids=lambda pair: f"{pair[0].id} {pair[1].digest}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drops the placeholder that pytest makes of an empty parameter set: it is no verdict."""
    items[:] = [item for item in items if "NOTSET" not in item.name]


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest) -> Campaign:
    """The run's campaign."""
    return request.config.stash[CAMPAIGN]


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Hands on the record of a test's verdict. Pytest's own `record_property` warns where one process writes JUnit's XML."""
    return lambda record: request.node.user_properties.append((VERDICT, record))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Ends this process where a claim takes longer than --limit, for native code heeds no signal; the recorder says so."""
    limit = item.config.option.limit
    if limit is None or not hasattr(item.config, "workerinput"):
        return (yield)
    # The verdict is reached by then: the search for a culprit may not lose it.
    item.config.stash[CAMPAIGN].before_diagnosis = faulthandler.cancel_dump_traceback_later
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def record_of(report: Any) -> dict[str, Any] | None:
    """The record of the verdict that a test reached, where it reached one."""
    found: dict[str, Any] | None = dict(getattr(report, "user_properties", ())).get(VERDICT)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Makes valid UTF-8 of what one process tells another about a test, whatever its subject said: pytest-xdist sends nothing else."""
    return plain((yield))


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """NOT_RUN and known failures are outcomes of their own; a false claim failed, whatever marks its test has."""
    record = record_of(report)
    if record is None or getattr(report, "when", None) != "call":
        return None
    if report.outcome == "skipped" and record["state"] == State.FALSIFIED and record["known_failure"]:
        return KNOWN_FAILURE, "K", ("KNOWN FAILURE", {"yellow": True})
    if report.outcome == "skipped" and record["state"] == State.NOT_RUN:
        return NOT_RUN, "N", ("NOT RUN", {"yellow": True})
    if record["state"] in (State.FALSIFIED, State.VACUOUS, State.FLAKY):
        return "failed", "F", (record["state"], {"red": True})
    return None


class Recorder:
    """In the process that pytest was started in: writes each verdict, wherever it was reached, and decides how the run ended."""

    def __init__(self, config: pytest.Config, file: VerdictFile) -> None:
        self.config, self.file, self.campaign = config, file, file.campaign
        self.targets = {str(target): target for target in file.campaign.targets()}
        self.started: dict[str, float] = {}
        self.deselected = False
        self.outcome = ""

    def pytest_report_header(self) -> list[str]:
        """Subject, device, dtypes, versions, seed, effort, real input."""
        campaign, display = self.campaign, environment.display_path
        subject, options, real_input = campaign.subject, campaign.options, campaign.real_input
        versions = environment.versions(subject.device)
        shown = (f"{name} {versions[name]}" for name in ("python", "numpy", "torch", "bitsandbytes", "cuda") if versions.get(name))
        dtypes = sorted({target.dtype for target in campaign.targets()})
        name = environment.device_name(subject.device)
        where = f"{subject.device} ({name})" if name else subject.device
        return [
            f"blackswan: subject {subject.name} on {where} in {', '.join(dtypes) or 'no dtype'}",
            f"  {', '.join(shown)}",
            f"  seed {options.seed}, effort {options.effort}, claims of {len(campaign.contracts)} contracts",
            *([f"  resumed: {len(self.file.records)} verdicts that held are kept"] if self.file.records else []),
            f"  model {display(real_input.model)}, corpus {display(real_input.corpus)}",
            *(f"  note: {note.message}" for note in self.config.stash[NOTES]),
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Claims of a group go to one process, the largest group first; None, for the order of pytest-xdist, where there is no group."""
        groups = {name: target.group for name, target in self.targets.items() if target.group}
        if not groups or config.option.dist != "load":
            return None
        from xdist.scheduler import LoadScopeScheduling

        class Grouped(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
            def _split_scope(self, nodeid: str) -> str:
                asked = _ASKED.search(nodeid)
                return groups.get(asked[1], nodeid) if asked else nodeid

        return Grouped(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a process what held before, so that all attack the same."""
        node.workerinput["blackswan_held"] = [list(key) for key in self.campaign.held]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Remembers that a test was left out, by `-k` for one."""
        self.deselected = self.deselected or bool(items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Opens the verdict file when the first claim is attacked; a run of other tests alone leaves it as it is."""
        if not _ASKED.search(nodeid):
            return
        self.started[nodeid] = time.monotonic()
        if self.file.is_open:
            return
        try:
            self.file.open()
        except UnwrittenError as error:
            pytest.exit(f"blackswan: {error}", returncode=pytest.ExitCode.INTERNAL_ERROR)
        except (ValueError, OSError) as error:
            reason = f"--verdicts: {self.file.path} cannot be written: {error.strerror}" if isinstance(error, OSError) else error
            pytest.exit(f"blackswan: {reason}", returncode=EXIT_USAGE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the verdict that a test reached; of a claim whose attack was skipped or broke, the verdict that says so."""
        asked = _ASKED.search(report.nodeid)
        record = record_of(report) if report.when == "call" else None
        if record is None and asked and not (report.when != "call" and report.passed) and report.when != "teardown":
            record = self._without_verdict(asked[1], report)
        if record is None or not self.file.is_open:
            return
        try:
            self.file.add(record)
        except UnwrittenError as error:
            pytest.exit(f"blackswan: {error}", returncode=pytest.ExitCode.INTERNAL_ERROR)

    def _without_verdict(self, name: str, report: pytest.TestReport) -> dict[str, Any] | None:
        target = self.targets.get(name)
        if target is None:
            return None
        limit, spent = self.config.option.limit, time.monotonic() - self.started.get(report.nodeid, time.monotonic())
        state = State.VACUOUS
        if report.when == CRASHED:
            late = limit is not None and spent >= limit
            reason = f"no verdict within {limit:g} s; its process was ended" if late else "the attacking process died"
        elif report.skipped:
            state, reason = State.NOT_RUN, f"the test was skipped: {_said(report)}"
        else:
            reason = f"the attack broke: {_said(report)}"
        return self.campaign.record(self.campaign.without_attack(target, state, reason))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The exit status follows from the verdicts; the verdict file is closed and the report rendered."""
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        if self.file.is_open:
            self.file.keep_the_rest()
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or (interrupted and self._stopped_at_a_failure()):
            session.exitstatus = self._status(exitstatus)
        try:
            self.file.close(int(session.exitstatus), interrupted)
            if self.started:
                self.outcome = f"verdicts: {places.shown(self.file.path)}; report: {places.shown(self._report())}"
        except (UnwrittenError, OSError, ValueError) as error:
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            reason = f"{error.strerror}: {error.filename2 or error.filename}" if isinstance(error, OSError) and error.strerror else error
            self.outcome = f"blackswan: the report of {places.shown(self.file.path)} is not whole: {reason}"

    def _stopped_at_a_failure(self) -> bool:
        """Whether `-x` ended the run, which pytest-xdist does as Ctrl-C would."""
        most: int = self.config.option.maxfail or 0
        return 0 < most <= len(self.file.failures)

    def _status(self, exitstatus: int) -> int:
        records = self.file.records.values()
        if self.file.failures:
            return pytest.ExitCode.TESTS_FAILED
        if not self.started:  # no claim was attacked: all had held, or none was chosen, or the run was one of other tests
            all_had_held = bool(records) and not self.targets and not self.deselected
            return pytest.ExitCode.OK if all_had_held and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED else exitstatus
        return pytest.ExitCode.OK if any(record["state"] == State.HELD for record in records) else EXIT_NOTHING_HELD

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table, what was not run and why, the time by stage, and where the report is."""
        records = list(self.file.records.values())
        if not records or self.config.option.collectonly:
            return
        terminalreporter.section("verdicts")
        known, fail = terminal.known(records), terminal.failures(self.file.failures)
        for line in (*terminal.table(records), *terminal.not_run(records), *known, *fail, terminal.time_spent(records), self.outcome):
            terminalreporter.write_line(line)

    def _report(self) -> Path:
        from blackswan.reports.render import write_pages

        _, pages = write_pages(self.file.path, self.file.path.parent)
        return pages[0]


def _said(report: pytest.TestReport) -> str:
    """The last line of what pytest says of a test that did not pass."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return said.strip().splitlines()[-1].removeprefix("E ").strip() if said.strip() else "for no reason that it gives"
