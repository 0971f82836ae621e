"""The command `python -m contracts`. Exit status 0: nothing found, 1: findings, 2: bad usage, 130: interrupted."""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.contracts import (
    FLAVOURS,
    KINDS,
    Claim,
    Contract,
    ContractError,
    Range,
    Tolerance,
    Vocabulary,
    load,
    load_operations,
    load_vocabulary,
)
from blackswan.contracts.document import read
from blackswan.contracts.problems import KeyPath, shown_path, unknown
from blackswan.contracts.vocabulary import use_folder

if TYPE_CHECKING:
    from blackswan.contracts.advice import Finding

INTERRUPTED = 130
_WIDTH, _LINE = 72, 140
_BITS = 4096
"""Python refuses to write integers of more than 4,300 digits."""


class UsageError(Exception):
    """A command line that cannot be carried out."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m contracts") -> int:
    """Runs a command and returns its exit status."""
    try:
        options = parser(prog).parse_args(arguments)
        use_folder(getattr(options, "contracts", None))
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except ContractError as error:
        print(f"{error}\n{_count(error)}", file=sys.stderr)
        return 1
    except (UsageError, ValueError, OSError) as error:
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
    calls = commands.add_parser("calls", help="print what a call of each operation receives and returns, as markdown")
    calls.set_defaults(command=_calls)
    for command in (lint, listing, show, calls):
        command.add_argument("--contracts", metavar="DIR", type=Path, help="read this folder of contracts of your own too")
    origins = commands.add_parser("origins", help="list the claims of the system that this one is modelled on, with ours or the refusal")
    origins.set_defaults(command=_origins)
    check = commands.add_parser("check", help="hold a configuration to the hyperparameter rules")
    check.add_argument("config", metavar="CONFIG.yaml", type=Path)
    check.add_argument("--statistics", metavar="FILE.yaml", type=Path, help="p99_length, imbalance_ratio, minority_count, sample_count")
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
    optional = {
        "backend": claim.backend,
        "formula": claim.formula,
        "correction": claim.correction,
        "cases": claim.cases,
        "check": claim.check,
    }
    yield from ((name, str(value)) for name, value in optional.items() if value is not None)
    if claim.check:
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


def _calls(_options: argparse.Namespace) -> int:
    from blackswan.contracts.calls import page

    print(page(load_operations()), end="")
    return 0


def _origins(_options: argparse.Namespace) -> int:
    from blackswan.contracts.origins import origins

    found, problems = origins(load())
    for origin in found:
        print(f"{origin.id}: {origin.statement}")
        answer = f"refused: {origin.refused}" if origin.refused else f"claims: {', '.join(origin.claims)}"
        print(textwrap.fill(answer, _LINE, initial_indent=" " * 4, subsequent_indent=" " * 6, break_on_hyphens=False))
    refused = sum(origin.refused is not None for origin in found)
    print(f"{len(found)} origins, {len(found) - refused} with claims, {refused} refused")
    if problems:
        raise ContractError(problems)
    return 0


def _check(options: argparse.Namespace) -> int:
    from blackswan.contracts.advice import advised, check, unjudged
    from blackswan.contracts.fields import CONFIG, STATISTICS, ConfigError

    config = _values(options.config, CONFIG)
    statistics = _values(options.statistics, STATISTICS) if options.statistics else {}
    contracts = {contract.name: contract for contract in load()}
    rules = [claim for contract in contracts.values() for claim in contract.claims if claim.rule]
    try:
        found = check(config, statistics, rules)
    except ConfigError as error:
        raise UsageError(f"the values cannot be used together: {error}") from error
    for finding in found:
        _print_finding(finding, contracts[finding.contract])
    errors = sum(finding.severity == "error" for finding in found)
    print(f"{len(found)} findings, {errors} of them errors" if found else "no findings")
    if found:
        left = [finding.rule for finding in check(advised(config, found), statistics, rules)]
        print(f"all recommendations together leave {', '.join(left) or 'no finding'}")
    for missing, names in _by_missing(unjudged(config, statistics, rules)).items():
        print(textwrap.fill(f"not judged, for want of {missing}: {', '.join(names)}", _LINE, subsequent_indent=" " * 6))
    return 1 if errors else 0


def _print_finding(finding: "Finding", contract: Contract) -> None:
    print(f"{finding.severity:<5} {finding.rule}: {finding.message}")
    for name, value in finding.recommendation.items():
        print(f"      recommended: {name}: {json.dumps(value)}")
    said = [("source", f"{contract.sources[key].cite}; {locator}") for key, locator in finding.sources.items()]
    for label, text in [*said, *([("note", finding.correction)] if finding.correction else [])]:
        print(textwrap.fill(f"{label}: {text}", _LINE, initial_indent=" " * 6, subsequent_indent=" " * 8))


def _by_missing(rules: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rule, missing in rules.items():
        found.setdefault(", ".join(missing), []).append(rule)
    return found


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
        if outside := list(_outside(name, value)):
            problems += [str(document.problem(key, message)) for key, message in outside]
            continue
        try:
            checked(name, value, fields=fields)
        except ConfigError as error:
            problems.append(str(document.problem((name,), str(error).removeprefix(f"{name}: "))))
    if problems:
        raise UsageError("the values cannot be used\n" + "\n".join(problems))
    return dict(document.data)


def _outside(name: str, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Integers that no message could show."""
    for key, item in [((name,), value), *(((name, index), item) for index, item in enumerate(value if isinstance(value, list) else ()))]:
        if isinstance(item, int) and item.bit_length() > _BITS:
            yield key, f"is a whole number of {item.bit_length()} bits; expected none of more than {_BITS}"


if __name__ == "__main__":
    sys.exit(main())
