"""Asks the subjects that ship, runs every reproduction of this folder, and writes FINDINGS.md: `python examples/findings/page.py`.

Subjects on CUDA are asked where there is a GPU. With names (`page.py transformers:TRAINER "liger on cuda"`) only
those subjects are asked anew, with `--kept` none; held.json has what the others came to, and where.
A reproduction's docstring has its title and then lines `Where: …`, the line of the installed package that is responsible or the
convention that the library follows, `Needs: CUDA`, AVX512 or AVX512-BF16 where it shows only with that, and `Explains SUBJECT, …:
CLAIM, …`, the falsified claims that it explains. One that needs what is not here keeps what it printed before.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import distributions, version
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
    "bitsandbytes on cuda": ("--aligned",),
    "bitsandbytes:ADAMW_8BIT on cuda": (),
    "liger on cuda": (STORED, LOSS, "reduction=weights"),
    "unsloth:FROZEN on cuda": ("--contiguous", STORED),
    "unsloth:QKV on cuda": ("--contiguous", STORED),
    "unsloth:ONE_LENGTH on cuda": ("--contiguous", STORED),
}
"""Each subject that `blackswan vet` is asked, with its options, the conventions that are declared of it among them."""
OF_ITS_OWN = {
    "transformers:MODEL": "loss_dtype=storage",
    "transformers:MODEL_EAGER": "loss_dtype=storage",
    "transformers:TRAINER": "decay=weights",
    "transformers:TRAINER_ONE_BATCH": "decay=weights",
}
"""Conventions that a subject declares by itself."""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "unsloth")


@dataclass(frozen=True)
class Finding:
    """A reproduction, by what its docstring says: `explains` has pairs of a subject and a claim."""

    script: Path
    title: str
    where: str
    explains: frozenset[tuple[str, str]]
    needs: str


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
    return Finding(
        script,
        title,
        "".join(what for kind, _, what in said if kind == "Where"),
        frozenset(explains),
        "".join(what for kind, _, what in said if kind == "Needs"),
    )


FINDINGS = {script.stem: _finding(script) for script in sorted(HERE.glob("*_*.py"))}


def explaining(subject: str, claim: str) -> list[str]:
    """The names of the findings that explain why a claim is falsified of a subject. Another subject's findings do not."""
    return [name for name, finding in FINDINGS.items() if (subject, claim) in finding.explains]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; 1 where a reproduction failed or does not say where, or a falsified claim is not analysed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"asked anew (default: all): {', '.join(SUBJECTS)}")
    parser.add_argument("--kept", action="store_true", help="ask none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="subjects at a time (default: 1)")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.subjects) - set(SUBJECTS)):
        parser.error(f"{unknown[0]}: expected one of {', '.join(SUBJECTS)}")
    found = json.loads(HELD.read_text(encoding="utf-8")) if HELD.exists() else {"subjects": {}, "reproductions": {}}
    ask_subjects(found, [] if given.kept else given.subjects or [name for name in SUBJECTS if has_gpu() or not _on_gpu(name)], given.jobs)
    failed = run_reproductions(found)
    page = [*head(found["subjects"]), *table(found["subjects"]), *falsified(found["subjects"]), *reproductions(found["reproductions"])]
    (HERE.parents[1] / "FINDINGS.md").write_text("\n".join(page), encoding="utf-8")
    return int(failed or bool(not_analysed(found["subjects"])))


def has_gpu() -> bool:
    """Whether there is a GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def _is_here(need: str) -> bool:
    """Says whether this machine has what a reproduction needs: "", CUDA, AVX512 or AVX512-BF16. KeyError for another word."""
    import torch
    from bitsandbytes.functional import has_avx512bf16

    asked = {"": lambda: True, "CUDA": has_gpu, "AVX512": lambda: torch.backends.cpu.get_cpu_capability() == "AVX512"}
    return bool({**asked, "AVX512-BF16": has_avx512bf16}[need]())


def _on_gpu(name: str) -> bool:
    return name.endswith(" on cuda")


def _machine() -> str:
    """The device and the versions of the packages."""
    import torch

    device = torch.cuda.get_device_name() if has_gpu() else f"a CPU ({torch.backends.cpu.get_cpu_capability()})"
    found = {name: version(name) for name in PACKAGES if any(each.metadata["Name"].replace("_", "-") == name for each in distributions())}
    return f"{device} with " + ", ".join(f"{name} {number}" for name, number in found.items())


def ask_subjects(found: dict[str, Any], names: Sequence[str], jobs: int) -> None:
    """Asks those subjects, as many at a time, and keeps what each came to."""
    kept, processes = found["subjects"], max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        asking = {pool.submit(asked, name, processes): name for name in names}
        for answer in as_completed(asking):
            kept[asking[answer]] = answer.result()
            _keep(found)


def _keep(found: Mapping[str, Any]) -> None:
    HELD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def head(found: Mapping[str, Any]) -> list[str]:
    """The title, and where the subjects were asked."""
    machines = {each["machine"]: _on_gpu(name) for name, each in found.items()}
    lines = [
        f"`python examples/findings/page.py` asked subjects {'on cuda' if gpu else 'without a device'} on {at}."
        for at, gpu in machines.items()
    ]
    return ["# Findings in published libraries", "", *(line for each in lines for line in (each, ""))]


def asked(name: str, processes: int) -> dict[str, Any]:
    """Asks `blackswan vet` of a subject: the numbers of verdicts, why claims were not asked, and the falsified ones with a replay."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdicts.jsonl"
        command = [sys.executable, "-m", "blackswan", "vet", *_command(name), "-n", str(processes), "--verdicts", str(file)]
        ran = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603  # our own program
        if ran.returncode not in (0, 1, 5):
            raise SystemExit(f"{' '.join(command)} ended with status {ran.returncode}")
        records = [record for line in file.read_text(encoding="utf-8").splitlines() if (record := json.loads(line))["record"] == "verdict"]
        shutil.rmtree(_replays(name), ignore_errors=True)
        return {
            "machine": _machine(),
            "states": Counter(record["state"] for record in records),
            "lacks": sorted({record["reason"] for record in records if record["state"] == "NOT_RUN"}),
            "falsified": [_failure(name, record) for record in records if record["state"] not in ("HELD", "NOT_RUN")],
        }


def _command(name: str) -> list[str]:
    """The arguments of `blackswan vet`."""
    device = ["--device", "cuda"] if _on_gpu(name) else []
    options = [word for each in SUBJECTS[name] for word in ([each] if each.startswith("--") else ["--declare", each])]
    return [name.partition(" ")[0], *device, *options]


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
    return REPLAYS / name.replace(":", "-").replace(" ", "-")


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
    lines += ["| `blackswan vet` | held | falsified | not run | options |", "|---|---|---|---|---|"]
    for name in (each for each in SUBJECTS if each in found):
        states, unsteady = found[name]["states"], len(found[name]["falsified"]) - found[name]["states"].get("FALSIFIED", 0)
        count = f"{states.get('FALSIFIED', 0)}" + (f", {unsteady} flaky" if unsteady else "")
        own = [f"`{OF_ITS_OWN[name]}` by itself"] if name in OF_ITS_OWN else []
        subject, *options = _command(name)
        conventions = ", ".join([*([f"`{' '.join(options)}`"] if options else []), *own]) or "—"
        lines.append(f"| `{subject}` | {states.get('HELD', 0)} | {count} | {states.get('NOT_RUN', 0)} | {conventions} |")
    return [*lines, ""]


def falsified(found: Mapping[str, Any]) -> list[str]:
    """Lists each subject's falsified claims with their findings and replays, and the reasons why claims were not asked."""
    lines: list[str] = []
    for name in (each for each in SUBJECTS if each in found):
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


def run_reproductions(found: dict[str, Any]) -> bool:
    """Runs each reproduction that can run here and keeps the lines that it prints; whether one of them failed."""
    failed = False
    for name, finding in FINDINGS.items():
        if not _is_here(finding.needs):
            continue
        print(name, file=sys.stderr)
        ran = subprocess.run([sys.executable, str(finding.script)], capture_output=True, text=True, check=False)  # noqa: S603  # our own scripts
        said = [line for line in ran.stdout.splitlines() if "expected" in line]
        found["reproductions"][name] = said
        failed = failed or ran.returncode != 0 or not said or not finding.where
    _keep(found)
    return failed


def reproductions(said: Mapping[str, Sequence[str]]) -> list[str]:
    """Each reproduction with what it printed."""
    lines = ["## Reproductions", "", "Each finding is shown here without Blackswan.", ""]
    for name, finding in FINDINGS.items():
        lines += [f'<a id="{name}"></a>', f"### [{name}](examples/findings/{finding.script.name})", "", finding.title, ""]
        needs = f" It shows with {finding.needs} only." if finding.needs else ""
        lines += [f"Where: {finding.where or 'not analysed'}.{needs}", "", "```", *said.get(name, ["not run"]), "```", ""]
    return lines


if __name__ == "__main__":
    sys.exit(main())
