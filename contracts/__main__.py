"""The contracts' own door: lint, list, show, check. Exit status 0: nothing found, 1: findings, 2: bad usage, 130: interrupted."""

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from blackswan.contracts import FLAVOURS, KINDS, Claim, ContractError, Range, Tolerance, Vocabulary, load, load_vocabulary
from blackswan.contracts.document import read
from blackswan.contracts.problems import KeyPath, shown_path, unknown
from blackswan.contracts.schema import shown

INTERRUPTED = 130
_WIDTH = 72
_LARGEST = 10**15
_LARGEST_SEED = 2**63 - 1
"""Rules do not compute with seeds, and `python -m impl train` takes as large ones."""
_BITS = 4096
"""Python writes no integer of more than 4,300 digits."""


class UsageError(Exception):
    """A command line that cannot be carried out."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m contracts") -> int:
    """Runs a command and returns its exit status."""
    try:
        options = parser(prog).parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except ContractError as error:
        print(f"{error}\n{_count(error)}", file=sys.stderr)
        return 1
    except (UsageError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _count(error: ContractError) -> str:
    number = len(error.problems)
    return f"{number} problem{'s' if number > 1 else ''}"


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of all commands."""
    found = argparse.ArgumentParser(prog=prog, description="Claims about QLoRA fine-tuning, and rules for its hyperparameters.")
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    lint = commands.add_parser("lint", help="check contract files")
    lint.add_argument("paths", nargs="*", metavar="PATH", type=Path, help="files or folders (default: the contracts of this folder)")
    lint.set_defaults(command=_lint)
    listing = commands.add_parser("list", help="list the claims")
    listing.add_argument("--kind", choices=KINDS)
    listing.add_argument("--severity", choices=("P0", "P1", "P2"))
    listing.set_defaults(command=_list)
    show = commands.add_parser("show", help="show everything about a claim")
    show.add_argument("claim", metavar="CLAIM")
    show.set_defaults(command=_show)
    check = commands.add_parser("check", help="hold a configuration to the hyperparameter rules")
    check.add_argument("config", metavar="CONFIG.yaml", type=Path)
    check.add_argument("--statistics", metavar="FILE.yaml", type=Path, help="p99_length, imbalance_ratio, minority_count")
    check.set_defaults(command=_check)
    return found


def _lint(options: argparse.Namespace) -> int:
    missing = [path for path in options.paths if not path.exists()]
    if missing:
        raise UsageError(f"{missing[0]}: no such file or folder")
    contracts = load(options.paths or None)
    print(f"{len(contracts)} contracts, {sum(len(contract.claims) for contract in contracts)} claims, no problems")
    return 0


def _list(options: argparse.Namespace) -> int:
    claims = [claim for contract in load() for claim in contract.claims]
    chosen = [claim for claim in claims if options.kind in (None, claim.kind) and options.severity in (None, claim.severity)]
    rows = [("CLAIM", "CONTRACT", "SEV", "KIND", "OPERATION", "STATEMENT")]
    rows += [
        (c.id, c.contract, c.severity, c.kind, c.operation or "-", textwrap.shorten(c.statement, _WIDTH, placeholder="…")) for c in chosen
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    return 0


def _show(options: argparse.Namespace) -> int:
    vocabulary = load_vocabulary()
    contracts = load(vocabulary=vocabulary)
    claims = {claim.id: (claim, contract) for contract in contracts for claim in contract.claims}
    if options.claim not in claims:
        raise UsageError(unknown("claim", options.claim, claims))
    claim, contract = claims[options.claim]
    print(f"{claim.id}  ({claim.severity} {claim.kind}, {contract.name} {contract.version})")
    print(f"{claim.location.file}:{claim.location.line}")
    cited = {name: contract.sources[name] for name in claim.sources}
    for name, value in [*_fields(claim, vocabulary), *((f"source {key}", f"{cited[key].cite}; {claim.sources[key]}") for key in cited)]:
        print(textwrap.fill(f"{value}", 120, initial_indent=f"{name:<14} ", subsequent_indent=" " * 15))
    return 0


def _fields(claim: Claim, vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    yield "statement", claim.statement
    optional = {"path": claim.path, "formula": claim.formula, "correction": claim.correction, "cases": claim.cases, "check": claim.check}
    yield from ((name, str(value)) for name, value in optional.items() if value is not None)
    if claim.check and not claim.system:
        yield "", vocabulary.checks[claim.check].doc
    yield from ((f"argument {name}", str(value)) for name, value in claim.arguments.items())
    if claim.operation:
        yield from _signature(claim.operation, vocabulary)
    yield from _domain(claim)
    if claim.tolerance:
        yield "tolerance", _tolerance(claim.tolerance)
    for name in claim.must_catch:
        mutant = vocabulary.mutants[name]
        yield "must catch", f"{name} ({', '.join(mutant.pedigree)}): {mutant.doc}"
    if claim.rule:
        yield from (("when", claim.rule.when), ("require", claim.rule.require), (claim.rule.severity, claim.rule.message))
        yield from (("recommend", f"{name} = {expression}") for name, expression in claim.rule.recommend.items())
        for kind, examples in (("holds", claim.examples.holds), ("violates", claim.examples.violates)):
            yield from ((kind, str({**example.config, **example.statistics})) for example in examples)
    if claim.origin:
        yield "origin", ", ".join(claim.origin)


def _signature(name: str, vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    signature = vocabulary.operations[name]
    yield "operation", f"{name}: {signature.doc}"
    for key, array in signature.inputs.items():
        shape = f"[{', '.join(array.shape)}] {array.dtype}" if not array.group else f"the parameters of a {array.group}"
        yield "  input", f"{key} {shape}{', optional' if array.optional else ''}"
    for key, scalar in signature.scalars.items():
        default = f" = {scalar.default}" if scalar.default is not None else ""
        yield "  scalar", f"{key}: {' | '.join(scalar.of) or scalar.type}{default}"
    for key, output in signature.outputs.items():
        yield "  output", f"{key} [{', '.join(output.shape)}] {output.dtype}" if not output.group else f"{key}: {output.group} parameters"
    if signature.gradients:
        yield "  gradients", ", ".join(signature.gradients)


def _domain(claim: Claim) -> Iterator[tuple[str, str]]:
    domain = claim.domain
    if claim.rule is None:
        devices = " and ".join(domain.device) or "any device"
        yield "domain", f"{domain.input} input; {', '.join(domain.dtype)}; on {devices}"
        if domain.input == "generated":
            yield from (("  flavour", f"{name}: {FLAVOURS[name]}") for name in domain.flavours)
    for kind, choices in (("size", domain.sizes), ("scalar", domain.scalars), ("presence of", domain.optional)):
        for name, choice in choices.items():
            yield f"  {kind}", f"{name}: {_choice(choice)}"
    yield from (("  require", condition) for condition in domain.require)
    for case in domain.boundary:
        values = {**case.sizes, **case.scalars, **case.optional}
        yield "  boundary", ", ".join([*(f"{name} = {value}" for name, value in values.items()), case.flavour])


def _choice(choice: Any) -> str:
    return f"{choice.min} to {choice.max}" if isinstance(choice, Range) else ", ".join(map(str, choice))


def _tolerance(tolerance: Tolerance) -> str:
    if tolerance.basis == "rounding":
        factors = (f"{dtype}: rms {f.rms:g}, row {f.row:g}, max {f.max:g}" for dtype, f in tolerance.factors.items())
        return f"rounding, multiples of the noise floor; {'; '.join(factors)}"
    if tolerance.basis == "literal":
        return f"{tolerance.value:g} {tolerance.unit} ({tolerance.source})"
    if tolerance.basis == "band":
        return f"{tolerance.low:g} to {tolerance.high:g}, n = {tolerance.n}, confidence {tolerance.confidence:g} ({tolerance.source})"
    return "exact"


def _check(options: argparse.Namespace) -> int:
    from blackswan.contracts.advice import check
    from blackswan.contracts.fields import CONFIG, STATISTICS

    config = _values(options.config, CONFIG)
    statistics = _values(options.statistics, STATISTICS) if options.statistics else {}
    found = check(config, statistics)
    for finding in found:
        print(f"{finding.severity:<5} {finding.rule}: {finding.message}")
        for name, value in finding.recommendation.items():
            print(f"      recommended: {name}: {value}")
    errors = sum(finding.severity == "error" for finding in found)
    print(f"{len(found)} findings, {errors} of them errors" if found else "no findings")
    return 1 if errors else 0


def _values(path: Path, fields: Any) -> dict[str, Any]:
    """The fields of a configuration file, each checked, with every problem at its line."""
    from blackswan.contracts.fields import ConfigError, checked

    if path.is_dir():
        raise UsageError(f"{shown_path(path)}: is a folder; expected a YAML file")
    try:
        document = read(path)
    except ContractError as error:
        raise UsageError(str(error)) from error
    problems = []
    for name, value in document.data.items():
        if outside := list(_outside(name, value, fields)):
            problems += [str(document.problem(key, message)) for key, message in outside]
            continue
        try:
            checked(name, value, fields=fields)
        except ConfigError as error:
            problems.append(str(document.problem((name,), str(error).removeprefix(f"{name}: "))))
    if problems:
        raise UsageError("the values cannot be used\n" + "\n".join(problems))
    return dict(document.data)


def _outside(name: str, value: Any, fields: Any) -> Iterator[tuple[KeyPath, str]]:
    """Numbers that the rules cannot compute with. Of an empty class the imbalance is infinite, and `python -m impl train` writes it so."""
    for key, item in [((name,), value), *(((name, index), item) for index, item in enumerate(value if isinstance(value, list) else ()))]:
        if isinstance(item, int) and item.bit_length() > _BITS:
            yield key, f"is a whole number of {item.bit_length()} bits; expected none beyond {_LARGEST:g}"
            return
    kind = fields[name].type if name in fields else None
    numbers: list[tuple[KeyPath, Any]] = [((name,), value)] if kind in ("int", "real") else []
    if kind == "reals" and isinstance(value, list):
        numbers = [((name, index), item) for index, item in enumerate(value)]
    largest = _LARGEST_SEED if name == "seed" else _LARGEST
    for key, number in numbers:
        if not isinstance(number, int | float) or isinstance(number, bool) or (name == "imbalance_ratio" and number == math.inf):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            yield key, f"is {shown(number)}; expected a finite number"
        elif abs(number) > largest:
            yield key, f"is {shown(number)}; expected a number from -{largest:g} to {largest:g}"


if __name__ == "__main__":
    sys.exit(main())
