"""The door to reports: `python -m reports render | compare | check | evidence`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

INTERRUPTED = 130
_HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None, prog: str = "python -m reports") -> int:
    """Runs a command; returns its exit status: 0 done, 1 something got worse (compare) or is not held and current (evidence), 2 bad input,
    or a file that cannot be written, 130 interrupted."""
    program = parser(prog)
    options = program.parse_args(arguments)
    if options.command is None:
        program.print_help()
        return 0
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"reports {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of all commands."""
    found = argparse.ArgumentParser(prog=prog, description="Verdict records in, pages out.")
    commands = found.add_subparsers(dest="command", metavar="COMMAND")

    render = commands.add_parser("render", help="write a run's pages", description="Writes a verdict file's pages, named like the file.")
    render.add_argument("file", type=Path, help="verdict file (JSON Lines)")
    render.add_argument(
        "--output", type=Path, default=None, metavar="DIR", help="default: reports/generated of a checkout, else blackswan-reports"
    )
    render.add_argument("--format", choices=("md", "json", "html", "all"), default="all", help="default: all")
    render.add_argument("--against-tree", action="store_true", help="mark verdicts STALE whose claim or code has changed in this checkout")
    render.set_defaults(run=_render)

    compare = commands.add_parser("compare", help="what changed between two runs", description="Exit status 1 when something got worse.")
    compare.add_argument("old", type=Path, help="verdict file")
    compare.add_argument("new", type=Path, help="verdict file")
    compare.set_defaults(run=_compare)

    check = commands.add_parser("check", help="validate verdict files", description="Exit status 2 when a file is not valid.")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE", help="verdict file")
    check.set_defaults(run=_check)

    evidence = commands.add_parser(
        "evidence",
        help="list kept runs, whether they are STALE, and which devices were never seen",
        description="Lists kept runs, whether they still speak about this checkout, the claims that none holds, and each kind of device: "
        "on which machine claims were asked there, or that it was never seen. Exit status 0 whatever it lists, but see --require-current.",
    )
    evidence.add_argument("--folder", type=Path, default=_HERE / "evidence", metavar="DIR", help="default: reports/evidence")
    evidence.add_argument("--require-current", action="store_true", help="exit status 1 where a claim is held by no current verdict")
    evidence.set_defaults(run=_evidence)
    return found


def _render(options: argparse.Namespace) -> int:
    from blackswan.reports.places import generated
    from blackswan.reports.render import FORMATS, write_pages

    formats = FORMATS if options.format == "all" else (options.format,)
    headline, pages = write_pages(options.file, options.output or generated(), formats, options.against_tree)
    print(headline)
    for path in pages:
        print(path)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from blackswan.reports.compare import compare, differences, results
    from blackswan.reports.records import read

    old, new = read(options.old), read(options.new)
    for run in (old, new):
        for note in run.notes:
            print(f"note: {run.path}: {note}")
    for difference in differences(old.header, new.header):
        print(f"note: the runs differ in {difference}")
    changes = compare(old, new)
    for change in changes:
        print(change)
    worse = sum(change.worse is True for change in changes)
    print(f"{len(changes)} changed, {worse} worse" if changes else "nothing changed")
    result = results(old, new)
    if result:
        print(result[1])
    return 1 if worse or (result and result[0]) else 0


def _check(options: argparse.Namespace) -> int:
    from blackswan.reports.records import RecordError, read
    from blackswan.reports.summary import summarise

    status = 0
    for path in options.files:
        try:
            run = read(path)
        except RecordError as error:
            print(f"reports check: {error}", file=sys.stderr)
            status = 2
        else:
            print(f"{path}: valid, {len(run.verdicts)} verdicts; {summarise(run).headline}")
            for note in run.notes:
                print(f"{path}: {note}")
    return status


def _evidence(options: argparse.Namespace) -> int:
    from blackswan.reports import staleness
    from blackswan.reports.evidence import collect, coverage, listing, seen

    if not options.folder.is_dir():
        raise FileNotFoundError(f"{options.folder}: no such folder")
    tree = staleness.current_tree(staleness.ROOT)
    kept = collect(options.folder, tree)
    print(listing(kept) if kept else f"{options.folder}: no verdict files")
    covered = coverage(kept, tree)
    for line in (*covered, *seen(kept)):
        print(line)
    current = bool(kept) and not any(entry.lacking for entry in covered)
    return 1 if options.require_current and not current else 0


if __name__ == "__main__":
    sys.exit(main())
