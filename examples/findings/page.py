"""Asks the subjects that ship, runs every reproduction of this folder, and writes FINDINGS.md: `python examples/findings/page.py`.

With names (`page.py transformers:TRAINER`) only those subjects are asked anew, with `--kept` none; held.json has what the others came to.
A reproduction's docstring has its title and then lines `Where: …`, the line of the installed package that is responsible or the
convention that the library follows, and `Explains SUBJECT, …: CLAIM, …`, the falsified claims that it explains.
"""

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELD, REPLAYS = HERE / "held.json", HERE / "replays"
STORED, LOSS = "intermediates=storage", "loss_dtype=storage"
SUBJECTS: dict[str, tuple[str, ...]] = {
    "torch": (STORED, LOSS, "reduction=weights", "eps=1e-6"),
    "torch:FOREACH": (),
    "torch:FUSED": (),
    "torch:COMPILED": (STORED,),
    "torch:OURS_COMPILED": (),
    "transformers": (STORED, LOSS, "lm_cross_entropy.loss_dtype=float32"),
    "transformers:EAGER": (STORED,),
    "transformers:MODEL": (),
    "transformers:MODEL_EAGER": (),
    "transformers:TRAINER": (),
    "transformers:TRAINER_ONE_BATCH": (),
    "peft": (STORED,),
    "peft:RSLORA": (STORED,),
    "bitsandbytes": (),
    "bitsandbytes:ADAMW_8BIT": (),
    "liger": (),
    "unsloth": (),
}
"""Each subject that `blackswan vet` is asked, with the conventions that are declared of it."""
OF_ITS_OWN = {
    "transformers:MODEL": "loss_dtype=storage",
    "transformers:MODEL_EAGER": "loss_dtype=storage",
    "transformers:TRAINER": "decay=weights",
    "transformers:TRAINER_ONE_BATCH": "decay=weights",
}
"""Conventions that a subject declares by itself."""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True)
class Finding:
    """A reproduction, by what its docstring says: `explains` has pairs of a subject and a claim."""

    script: Path
    title: str
    where: str
    explains: frozenset[tuple[str, str]]


def _finding(script: Path) -> Finding:
    title, _, rest = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n\n")
    said = [line.removesuffix(".").partition(": ") for line in rest.splitlines()]
    explains = {
        (subject, claim)
        for names, _, claims in said
        if names.startswith("Explains ")
        for subject in names.removeprefix("Explains ").split(", ")
        for claim in claims.split(", ")
    }
    return Finding(script, title, "".join(what for kind, _, what in said if kind == "Where"), frozenset(explains))


FINDINGS = {script.stem: _finding(script) for script in sorted(HERE.glob("*_*.py"))}


def explaining(subject: str, claim: str) -> list[str]:
    """The names of the findings that explain why a claim is falsified of a subject. Another subject's findings do not."""
    return [name for name, finding in FINDINGS.items() if (subject, claim) in finding.explains]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; 1 where a reproduction failed or does not say where, or a falsified claim is not analysed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"asked anew (default: all): {', '.join(SUBJECTS)}")
    parser.add_argument("--kept", action="store_true", help="ask none")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.subjects) - set(SUBJECTS)):
        parser.error(f"{unknown[0]}: expected one of {', '.join(SUBJECTS)}")
    found = json.loads(HELD.read_text(encoding="utf-8")) if HELD.exists() else {}
    for name in [] if given.kept else given.subjects or SUBJECTS:
        found[name] = asked(name)
        HELD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines, failed = reproductions()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    head = ["# Findings in published libraries", "", f"`python examples/findings/page.py` made this page on a CPU with {versions}.", ""]
    page = [*head, *table(found), *falsified(found), *lines]
    (HERE.parents[1] / "FINDINGS.md").write_text("\n".join(page), encoding="utf-8")
    return int(failed or bool(not_analysed(found)))


def asked(name: str) -> dict[str, Any]:
    """Asks `blackswan vet` of a subject: the numbers of verdicts, why claims were not asked, and the falsified ones with a replay."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdicts.jsonl"
        declared = [word for each in SUBJECTS[name] for word in ("--declare", each)]
        command = [sys.executable, "-m", "blackswan", "vet", name, *declared, "--verdicts", str(file)]
        ran = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603  # our own program
        if ran.returncode not in (0, 1, 5):
            raise SystemExit(f"{' '.join(command)} ended with status {ran.returncode}")
        records = [record for line in file.read_text(encoding="utf-8").splitlines() if (record := json.loads(line))["record"] == "verdict"]
        shutil.rmtree(_replays(name), ignore_errors=True)
        return {
            "states": Counter(record["state"] for record in records),
            "lacks": sorted({record["reason"] for record in records if record["state"] == "NOT_RUN"}),
            "falsified": [_failure(name, record) for record in records if record["state"] not in ("HELD", "NOT_RUN")],
        }


def _failure(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Claim, dtype, the worst number or what was wrong beside numbers; its case goes to the folder of replays."""
    worst = record["counterexample"]
    stored = Path(worst["replay"].rpartition(" ")[2])
    _replays(name).mkdir(parents=True, exist_ok=True)
    replay = _replays(name) / f"{record['claim']}-{record['dtype']}{stored.suffix}"
    shutil.copy(stored, replay)
    what = (
        worst["metric"]
        if worst["expected"] is None
        else f"{worst['tensor']}: expected {_short(worst['expected'])}, got {_short(worst['actual'])}"
    )
    return {
        "claim": record["claim"],
        "dtype": record["dtype"],
        "state": record["state"],
        "what": what,
        "replay": replay.relative_to(HERE).as_posix(),
    }


def _replays(name: str) -> Path:
    return REPLAYS / name.replace(":", "-")


def _short(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def not_analysed(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The subjects and their falsified claims that no reproduction explains."""
    failed = [(name, failure["claim"]) for name, each in found.items() for failure in each["falsified"]]
    return [pair for pair in failed if not explaining(*pair)]


def table(found: Mapping[str, Any]) -> list[str]:
    """A line a subject: numbers of verdicts, and what is declared of it."""
    lines = ["A verdict is of a claim in a dtype. Each subject is asked with the conventions that it follows, which are declared.", ""]
    lines += ["`blackswan vet NAME --declare … --replay FILE` asks a case again that falsified a claim.", ""]
    lines += ["| `blackswan vet` | held | falsified | not run | `--declare` |", "|---|---|---|---|---|"]
    for name, declared in SUBJECTS.items():
        states, unsteady = found[name]["states"], len(found[name]["falsified"]) - found[name]["states"].get("FALSIFIED", 0)
        count = f"{states.get('FALSIFIED', 0)}" + (f", {unsteady} flaky" if unsteady else "")
        own = [f"`{OF_ITS_OWN[name]}` by itself"] if name in OF_ITS_OWN else []
        conventions = ", ".join([*(f"`{each}`" for each in declared), *own]) or "—"
        lines.append(f"| `{name}` | {states.get('HELD', 0)} | {count} | {states.get('NOT_RUN', 0)} | {conventions} |")
    return [*lines, ""]


def falsified(found: Mapping[str, Any]) -> list[str]:
    """Lists each subject's falsified claims with their findings and replays, and the reasons why claims were not asked."""
    lines: list[str] = []
    for name in SUBJECTS:
        if failures := found[name]["falsified"]:
            lines += [f"### Falsified of `{name}`", "", "| claim | | finding | replay |", "|---|---|---|---|"]
            lines += [_row(name, failure) for failure in failures]
            lines += [""]
        if lacks := found[name]["lacks"]:
            lines += [f"`{name}` was not asked where:", "", *(f"- {reason}" for reason in lacks), ""]
    return lines


def _row(subject: str, failure: Mapping[str, str]) -> str:
    findings = ", ".join(f"[{each}](#{each})" for each in explaining(subject, failure["claim"])) or "not analysed"
    replay = f"[{failure['dtype']}](examples/findings/{failure['replay']})"
    flaky = "" if failure["state"] == "FALSIFIED" else f" ({failure['state'].lower()})"
    return f"| {failure['claim']} in {failure['dtype']}{flaky} | {failure['what'].replace('|', '/')} | {findings} | {replay} |"


def reproductions() -> tuple[list[str], bool]:
    """Runs each reproduction: gives its lines of the page, and whether one of them failed."""
    lines = ["## Reproductions", "", "Each finding is shown here without Blackswan.", ""]
    failed = False
    for name, finding in FINDINGS.items():
        print(name, file=sys.stderr)
        ran = subprocess.run([sys.executable, str(finding.script)], capture_output=True, text=True, check=False)  # noqa: S603  # our own scripts
        said = [line for line in ran.stdout.splitlines() if "expected" in line]
        failed = failed or ran.returncode != 0 or not said or not finding.where
        lines += [f'<a id="{name}"></a>', f"### [{name}](examples/findings/{finding.script.name})", "", finding.title, ""]
        lines += [f"Where: {finding.where or 'not analysed'}.", "", "```", *said, "```", ""]
    return lines, failed


if __name__ == "__main__":
    sys.exit(main())
