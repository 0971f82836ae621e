"""`python -m benchmarks.attackers round-1`: plants each bug of a round into a copy of the checkout and runs the falsifiers on it; with
`random` in its place, changes that are drawn (see `chance`); with `seen`, what the claims give to each function (see `seen`); with
`places`, where claims fail on the changes of all rounds is written for the ranking of suspects.

Results go to results.json beside the patches; patches that are there are not run again without `--again`. What stands after `--` goes to
pytest, and such results to a file of their own. Bugs that show on a GPU only are NOT RUN without one, or asked on a CPU with `--near`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.attackers import places
from benchmarks.attackers.round import BROKEN, FOUND, MISSED, NOT_RUN, Bug, attack, commit, false_claims

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Runs what is left of a round, and prints the table of all of it; or attacks at random."""
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are asked, and traced, on a CPU too; Triton looks for it when it is imported
    if sys.argv[1:2] in (["random"], ["seen"]):
        from benchmarks.attackers import chance, seen  # imports torch

        return (chance if sys.argv[1] == "random" else seen).main(sys.argv[2:])
    if sys.argv[1:] == ["places"]:
        return places.main()
    options = _options()
    if options.near and options.pytest:
        raise command.CannotRun(f"{' '.join(options.pytest)}: --near does not ask pytest; expected --near or options for pytest")
    path = (
        FOLDER / options.round / ("_".join(["results", *(["near"] if options.near else []), *options.pytest]).replace("/", "-") + ".json")
    )
    bugs = [Bug.read(patch) for patch in sorted(path.parent.glob("*.patch"))]
    chosen = [bug for bug in bugs if not options.only or bug.path.name.partition("-")[0] in options.only]
    if not chosen:
        raise command.CannotRun(f"{path.parent}: no such patch; expected a round with *.patch files, and numbers of these")
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"unpatched": {}, "patches": {}}
    _run(chosen, options, path, results)
    _print(bugs, results["patches"])
    return 0


def _options() -> argparse.Namespace:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attackers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("round", help="folder of patches, e.g. round-1; or `random`, `seen` (they have options of their own) or `places`")
    parser.add_argument("--only", metavar="NN", action="append", help="this patch only; may be repeated")
    parser.add_argument("--jobs", metavar="N", type=int, choices=range(1, 65), default=1, help="patches at a time (default: 1)")
    parser.add_argument(
        "--near",
        metavar="DIR",
        type=Path,
        help="ask claims that execute changed lines, the quickest for a minute, then the others; DIR keeps which",
    )
    parser.add_argument("--again", action="store_true", help="run patches that have a result too")
    return parser.parse_args(sys.argv[1:at], argparse.Namespace(pytest=sys.argv[at + 1 :]))


def _run(chosen: list[Bug], options: argparse.Namespace, path: Path, results: dict[str, Any]) -> None:
    """Runs the patches that are due, and writes each outcome when it is there."""
    import torch

    gpu, known = torch.cuda.is_available(), results["patches"]
    due = [bug for bug in chosen if options.again or known.get(bug.path.name, {"outcome": NOT_RUN})["outcome"] == NOT_RUN]
    able = [bug for bug in due if bug.device == "cpu" or gpu or options.near]
    for bug in (bug for bug in due if bug not in able):
        _write(path, results, bug, bug.outcome(NOT_RUN, reason="no CUDA device"))
    keys = {device: " ".join([commit(), device, *options.pytest]) for device in sorted({bug.device for bug in able})}
    for device, key in keys.items() if options.near is None else ():
        if key not in results["unpatched"]:
            print(f"first the checkout without a patch, on {device}", file=sys.stderr, flush=True)
            results["unpatched"][key] = false_claims(options.pytest, device)
    asked = _near(options, results["unpatched"]) or (lambda bug: attack(bug, options.pytest, results["unpatched"][keys[bug.device]]))
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(asked, bug): bug for bug in able}
        for count, done in enumerate(as_completed(running), start=1):
            _write(path, results, running[done], done.result())
            print(f"{count}/{len(able)} {running[done].path.stem}: {done.result()['outcome']}", file=sys.stderr, flush=True)


def _near(options: argparse.Namespace, unpatched: dict[str, list[str]]) -> Callable[[Bug], dict[str, Any]] | None:
    """With --near, a function that asks a bug's nearest claims, which are traced first. Claims that are false on a GPU are noted."""
    if options.near is None:
        return None
    from benchmarks.attackers import chance, near  # imports torch

    traced = chance.traces(chance.asked_on_cpu([]), options.near, options.jobs)
    key = f"{commit()} kernels"
    if near.has_gpu() and key not in unpatched:
        print("first the checkout without a patch, on the GPU", file=sys.stderr, flush=True)
        unpatched[key] = near.false_on_a_gpu()
    return lambda bug: near.attack(bug, traced, unpatched.get(key, ()))


def _write(path: Path, results: dict[str, Any], bug: Bug, outcome: dict[str, Any]) -> None:
    """Adds an outcome; that of the first try stays beside those of later ones."""
    earlier = results["patches"].get(bug.path.name, {}).get("first")
    outcome["first"] = outcome["outcome"] if earlier in (None, NOT_RUN, BROKEN) else earlier
    results["patches"] = dict(sorted({**results["patches"], bug.path.name: outcome}.items()))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _print(bugs: list[Bug], patches: dict[str, Any]) -> None:
    print(f"{'bug':<40} {'outcome':<8} {'place said':<18} {'seconds':>7}  first false claims; blamed")
    found = {bug.path.stem: patches[bug.path.name] for bug in bugs if bug.path.name in patches}
    for name, outcome in found.items():
        what = ", ".join(outcome.get("claims", ())) + f"; {outcome.get('culprit', '')}{outcome.get('reason', '')[-90:]}"
        print(f"{name:<40} {outcome['outcome']:<8} {outcome.get('said', ''):<18} {outcome.get('seconds', 0):>7.0f}  {what.strip('; ')}")
    firsts = [outcome["first"] for outcome in found.values()]
    count, asked = firsts.count(FOUND), sum(first in (FOUND, MISSED) for first in firsts)
    share = f"{count / asked:.0%}" if asked else "none"
    print(f"found on the first try: {count} of {asked} ({share}); {len(bugs) - asked} of {len(bugs)} not run, broken or still to run")


if __name__ == "__main__":
    command.start(main)
