"""The main door by its command: exit statuses, one clear message for bad input and nothing written, planted breaks."""

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from falsifiers_claims import claim
from terminal_processes import ENVIRONMENT, PLAIN, ROOT, command, interrupted, listing, records, serving, several, started

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.runner import engine, options
from blackswan.falsifiers.runner.plugin import EXIT_NO_DEVICE, EXIT_NOTHING_HELD, EXIT_USAGE
from blackswan.reports.__main__ import main as check_reports

FOLDERS = ("contracts", "reference", "impl", "falsifiers", "reports")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, to break."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "generated", "evidence"))
    shutil.copytree(ROOT / "blackswan", copy / "blackswan", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


@pytest.fixture
def edited(tree: Path) -> Iterator[Any]:
    """Replaces text of a file of the copied tree, and puts it back afterwards."""
    kept: dict[Path, str] = {}

    def edit(file: str, old: str, new: str) -> Path:
        path = tree / file
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old!r} any more: plant another break"
        kept.setdefault(path, text)
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return path

    def restore() -> None:
        for path, text in kept.items():
            path.write_text(text, encoding="utf-8")

    edit.restore = restore  # type: ignore[attr-defined]  # the test also wants to put it back
    yield edit
    restore()


# good runs


def test_a_held_claim_is_success_from_any_folder_and_twice_in_a_row(tmp_path: Path) -> None:
    file = tmp_path / "new" / "verdicts.jsonl"
    first = command("--claim", "OP-RMSNORM", "--verdicts", file, folder=tmp_path)
    kept = records(file)
    (again,) = several([["--claim", "OP-RMSNORM", "--verdicts", str(file), "--dtype", "bfloat16"]])
    assert (first.status, again.status) == (0, 0), first.text + again.text
    assert [record["record"] for record in kept] == ["run", "verdict", "verdict", "end"]
    assert {record["dtype"] for record in kept if record["record"] == "verdict"} == {"float32", "bfloat16"}
    assert [record["record"] for record in records(file)] == ["run", "verdict", "end"], "a new run starts a new file"
    assert kept[-1]["exit_status"] == 0
    assert not kept[-1]["interrupted"]
    assert kept[0]["run"] != records(file)[0]["run"]
    assert check_reports(["check", str(file)]) == 0
    assert "decoder-operations" in first.text
    assert (tmp_path / "new" / "verdicts.md").is_file()


def test_claims_of_a_group_share_a_process(edited: Any, tree: Path) -> None:
    edited(
        "falsifiers/runner/campaign.py",
        "        check = self",
        '        return "one" if self.claim.operation == "linear" else None\n        check = self',
    )
    ran = command("-n2", "-vv", *(f"--claim={name}" for name in ("OP-LINEAR", "OP-SWIGLU")), tree=tree)
    grouped = [line for line in ran.text.splitlines() if "linear" in line and line.startswith("[gw")]
    assert len(grouped) == 3, ran.text
    assert len({line[:5] for line in grouped}) == 1, ran.text


def test_a_run_of_other_tests_alone_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    (run,) = several([["tests/test_import_rules.py", "-k", "table_names", "-n", "0", "--verdicts", str(file)]])
    assert run.status == 0, run.text
    assert "1 passed" in run.text
    assert not file.exists()


# bad input


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def model(folder: Path, damage: Any) -> str:
    shutil.copytree(CHECKPOINT, folder)
    damage(folder)
    return str(folder)


def truncated(name: str) -> Any:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-200])


def replay_file(folder: Path, name: str) -> str:
    path = folder / f"{name}.npz"
    next(iter(engine.cases(claim(), "float32", engine.Options(examples=1)))).save(path, name)
    return str(path)


BAD_MODELS: dict[str, tuple[Any, str]] = {
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor model.safetensors.index.json"),
    "truncated_tokenizer": (truncated("tokenizer.json"), "tokenizer.json: not a usable tokenizer"),
}
"""What else is wrong with a checkpoint CLS-CHECKPOINT-REFUSES asks of the same reader, and test_architecture of this door."""
GOOD_LINE = '{"input": "ls", "label": 1}\n'
BAD_CORPORA = {
    "empty": ("", "the corpus is empty"),
    "text_label": (GOOD_LINE * 2 + '{"input": "ls", "label": "safe"}', "text_label.jsonl:3: label is 'safe'"),
}
"""What else is wrong with a corpus CLS-CORPUS-REFUSES asks of the same reader."""


def bad_lines(folder: Path) -> list[tuple[list[str], str]]:
    """Arguments, and what the one message must hold."""
    taken = write(folder / "taken", "a file")
    case = replay_file(folder, "OP-RMSNORM")
    selections = (["--claim", "OP-RMSNORM"], ["--operation", "rms_norm"], ["--dtype", "float32"])
    found = [
        (["--claim", "OP-RMSNROM"], "did you mean 'OP-RMSNORM'"),
        (["--claim", ""], "--claim: unknown claim ''"),
        (["--operation", "rmsnorm"], "did you mean 'rms_norm'"),
        (["--device", "gpu"], "'gpu'"),
        (["--device", "cuda:-1"], "cuda:-1"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--effort", "high"], "invalid choice: 'high'"),
        *((["--limit", limit], f"'{limit}': expected seconds above 0 and up to 1,000,000") for limit in ("0", "nan")),
        (["--dtype", "float64"], "--dtype float64: OP-RMSNORM can be attacked in float32, bfloat16 only"),
        (["--operation", "softmax"], "--operation softmax: OP-RMSNORM is on rms_norm"),
        *((["--replay", case, *other], f"{other[0]}: --replay attacks the one case") for other in selections),
        (["--seed", "x"], "--seed"),
        (["--verdicts", str(folder)], "cannot be written"),
        (["--verdicts", f"{taken}/verdicts.jsonl"], "cannot be written"),
        (["--verdicts", str(folder / "v.JSON")], "expected another suffix, such as v.jsonl"),
        (["--verdicts", "/dev/full"], "/dev/full cannot be written"),
        (["--verdicts", write(folder / "nf4.py", "import torch\n")], "nf4.py is no verdict file"),
        (["--corpus", (corpus := write(folder / "c.jsonl", GOOD_LINE)), "--verdicts", corpus], "c.jsonl is no verdict file"),
        (["--verdicts", str(Path(write(folder / "README.md", "# Blackswan\n")).with_suffix(".jsonl"))], "README.md is no page"),
        (["--verdicts", str(Path(write(folder / "m.json" / "x", "")).parent.with_suffix(".jsonl"))], "m.json is no page of a report"),
        (["--resume", "--replay", replay_file(folder, "OP-RMSNORM")], "--resume goes on with a run, and --replay"),
        (["--model", str(folder / "nowhere")], "nowhere: no such folder"),
        (["--model", taken], "no such folder"),
        (["--corpus", str(folder / "nowhere.jsonl")], "nowhere.jsonl: no such file"),
        (["--corpus", str(folder)], "no such file"),
        (["--replay", str(folder / "nowhere.npz")], "nowhere.npz: no such file"),
        (["--replay", str(CORPUS_HELDOUT)], "heldout.jsonl: not a replay file"),
        (["--replay", replay_file(folder, "OP-RMSNORN")], "unknown claim 'OP-RMSNORN'"),
        (["--replay", replay_file(folder, "OP-LINEAR")], "a case of rms_norm, but OP-LINEAR is a claim on linear"),
    ]
    found += [(["--model", model(folder / f"model_{name}", damage)], words) for name, (damage, words) in BAD_MODELS.items()]
    return found + [(["--corpus", write(folder / f"{name}.jsonl", text)], words) for name, (text, words) in BAD_CORPORA.items()]


def test_bad_input_is_one_message_status_4_and_nothing_written(tmp_path: Path) -> None:
    lines = bad_lines(tmp_path)
    before = listing(tmp_path)
    target = ["--verdicts", str(tmp_path / "out" / "verdicts.jsonl")]
    runs = several(
        [[*target, *line] if {"--claim", "--replay"} & {*line} else ["--claim", "OP-RMSNORM", *target, *line] for line, _ in lines]
    )
    for (_, words), run in zip(lines, runs, strict=True):
        run.refuses(EXIT_USAGE, words)
    assert listing(tmp_path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here: tests of its absence mean nothing")
def test_an_absent_device_stops_the_run_at_once(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    given = [["--device", "cuda"], ["--device", "cuda:1"], ["--require", "cuda"], ["--device", "auto", "--require", "cuda"]]
    *runs, listed = several(
        [[*line, "--verdicts", str(file)] for line in [*given, ["--device", "auto", "--claim", "OP-POOL", "--co", "-v"]]]
    )
    assert listed.status == 0, listed.text
    assert "note: device auto: no CUDA device is available, using the CPU" in listed.text
    for run in runs:
        run.refuses(EXIT_NO_DEVICE, "cuda")
    assert listing(tmp_path) == {}


# the copied tree


def test_bad_contracts_are_one_message_with_file_and_line(tree: Path, edited: Any, tmp_path: Path) -> None:
    contract = "contracts/decoder-operations-v1.yaml"
    edited(contract, "kind: parity", "kind: partiy")
    edited(contract, "operation: linear", "operation: liner")
    edited("contracts/lora-v1.yaml", "title:", "title: [")
    path = tree / "contracts" / "unreadable-v1.yaml"
    path.write_bytes(b"contract: \xff\xfe\n")
    try:
        with serving(tree) as run:
            ended = run(["--verdicts", tmp_path / "verdicts.jsonl"])
    finally:
        path.unlink()
    words = ("'partiy'", "parity", "'liner'", "did you mean 'linear'", "decoder-operations-v1.yaml:", "lora-v1.yaml:", "unreadable-v1.yaml")
    ended.refuses(EXIT_USAGE, *words)
    assert listing(tmp_path) == {}


def test_what_only_a_gpu_could_show_is_not_run_and_nothing_held_is_no_success(tree: Path, edited: Any, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    text = (tree / "contracts" / "decoder-operations-v1.yaml").read_text(encoding="utf-8")
    start = text.index("      use: rms_norm", text.index("- id: OP-RMSNORM\n"))
    line = text[start : text.index("    tolerance", start)].rstrip()
    edited("contracts/decoder-operations-v1.yaml", line, f"      device: [cuda]\n{line}")
    with serving(tree) as run:
        only = run(["--claim", "OP-RMSNORM", "--verdicts", file])
        assert only.status == EXIT_NOTHING_HELD, only.text
        assert "not run: 2 × the claim is about cuda" in only.text
        mixed = run(["--claim", "OP-RMSNORM", "--claim", "OP-SOFTMAX", "--verdicts", file])
        assert mixed.status == 0, mixed.text
        assert [record["state"] for record in records(file) if record["record"] == "verdict"].count("NOT_RUN") == 2
        nothing = run(["-k", "no_such_test", "-n", "0", "--verdicts", tmp_path / "none.jsonl"])
        assert nothing.status == EXIT_NOTHING_HELD
    assert not (tmp_path / "none.jsonl").exists()


def planted(tree: Path, name: str, code: str) -> Path:
    """A plug-in of a user, which every process of a run imports."""
    path = tree / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    return path


SHARED = ("--claim", "OP-RMSNORM", "--claim", "OP-RESIDUAL", "--claim", "OP-SOFTMAX", "--dtype", "float32")


def test_claims_are_shared_out_and_one_file_holds_the_verdicts(tmp_path: Path) -> None:
    shared = command(*SHARED, "-n", "2", "--verdicts", tmp_path / "shared.jsonl")
    (alone,) = several([[*SHARED, "-n", "0", "--verdicts", str(tmp_path / "alone.jsonl")]])
    assert (shared.status, alone.status) == (0, 0), shared.text + alone.text
    found = [{record["claim"]: record for record in records(tmp_path / f"{name}.jsonl")[1:-1]} for name in ("shared", "alone")]
    for one in (*found[0].values(), *found[1].values()):
        del one["seconds"], one["digest"]  # which is of the seconds too
    assert found[0] == found[1]
    for words in ("decoder-operations     3", "verdicts: "):
        assert words in shared.text
        assert words in alone.text
    assert "3 passed" in shared.text


def test_the_cores_are_shared_by_default_where_there_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "cores", lambda: 16)
    wanted = [options.processes(*given) for given in ((377, "cpu"), (377, "cuda"), (40, "cpu"), (9, "cpu"))]
    assert wanted == [16, options.MOST_ON_A_GPU, 5, 0]


MARKS = {
    "pytest.mark.xfail(reason='not today')": ("FALSIFIED", 1),
    "pytest.mark.xfail(raises=ValueError)": ("FALSIFIED", 1),
    "pytest.mark.xfail(run=False, reason='not today')": ("NOT_RUN", EXIT_NOTHING_HELD),
    "pytest.mark.skip(reason='not today')": ("NOT_RUN", EXIT_NOTHING_HELD),
}
MARKING = """
import pytest
from blackswan.impl.operations import OPERATIONS

OPERATIONS["residual_add"] = lambda x, branch: branch * 1.0

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(MARK)
"""


def test_marks_of_a_users_conftest_make_no_false_claim_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one in one process, and the first of them shared out."""
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    lines = []
    for number, mark in enumerate(MARKS):
        planted(tmp_path, f"marking{number}", MARKING.replace("MARK", mark))
        asked = ["--claim", "OP-RESIDUAL", "--dtype", "float32", "--verdicts", str(tmp_path / f"{number}.jsonl")]
        lines.append(["-p", f"marking{number}", *asked])
    with serving() as run:
        runs = [run([*line, "-n", "0"]) for line in lines]
    for number, (run, (state, status)) in enumerate(zip(runs, MARKS.values(), strict=True)):
        file = tmp_path / f"{number}.jsonl"
        assert (run.status, run.verdict(file)["state"], records(file)[-1]["exit_status"]) == (status, state, status), run.text
    shared = command(*lines[0], "-n", "1")
    assert (shared.status, shared.verdict(tmp_path / "0.jsonl")["state"]) == (1, "FALSIFIED"), shared.text


HANGING = """
import os, time
from blackswan.impl.operations import OPERATIONS

OPERATIONS["residual_add"] = lambda x, branch: time.sleep(300)
OPERATIONS["softmax"] = lambda x: os.kill(os.getpid(), 11)
"""


def test_a_claim_that_hangs_or_kills_its_process_is_vacuous_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path, "hanging", HANGING)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    file = tmp_path / "verdicts.jsonl"
    run = command("-p", "hanging", *SHARED, "--limit", "10", "--verdicts", file)
    assert run.status == 1, run.text
    found = {record["claim"]: (record["state"], record["reason"]) for record in records(file)[1:-1]}
    assert found["OP-RMSNORM"] == ("HELD", None)
    for name, reason in (("OP-RESIDUAL", "no verdict within 10 s"), ("OP-SOFTMAX", "the attacking process died")):
        assert found[name][0] == "VACUOUS"
        assert reason in found[name][1]


def test_ctrl_c_leaves_a_readable_verdict_file(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    asked = ["--verdicts", str(file), "--effort", "deep", "--claim", "OP-RESIDUAL", "--claim", "CLS-STEP", "-n", "1"]
    process = started("-m", "pytest", "falsifiers", *PLAIN, *asked, environment=ENVIRONMENT)
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline and '"verdict"' not in (file.read_text() if file.exists() else ""):
        time.sleep(0.1)
    status, _ = interrupted(process)
    found = records(file)
    assert status == pytest.ExitCode.INTERRUPTED
    assert [found[0]["record"], found[-1]["record"]] == ["run", "end"]
    assert (found[-1]["interrupted"], found[-1]["exit_status"]) == (True, 2)
    verdicts = [record for record in found if record["record"] == "verdict"]
    assert verdicts
    assert sum(found[-1]["totals"].values()) == len(verdicts)


def test_the_first_failure_is_the_elementary_one(tree: Path, edited: Any, tmp_path: Path) -> None:
    edited("impl/operations/layers.py", "widen(weight), eps)", "widen(weight), 1e-3)")
    file = tmp_path / "verdicts.jsonl"
    run = command("-x", "-n", "0", "--verdicts", file, tree=tree)
    assert run.status == 1, run.text
    last = [record for record in records(file) if record["record"] == "verdict"][-1]
    assert (last["operation"], last["state"]) == ("rms_norm", "FALSIFIED"), last


BREAKS = {
    "OP-POOL": ("impl/operations/layers.py", 'if mode == "mean":', 'if mode == "median":', "pool"),
    "FWD-DECODER": ("impl/projection.py", "None if bias is None else", 'None if bias is None or "v_proj" in path else', "v_proj"),
}


def test_planted_breaks_are_found_named_and_replayed_until_they_are_mended(tree: Path, edited: Any, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    for path, old, new, _ in BREAKS.values():
        edited(path, old, new)
    files = {name: tmp_path / f"replay-{name}.jsonl" for name in BREAKS}
    replays = {}
    with serving(tree) as run:
        broken = run([*(part for name in BREAKS for part in ("--claim", name)), "--dtype", "float32", "--verdicts", file])
        assert broken.status == 1, broken.text
        assert "Traceback" not in broken.text
        found = {record["claim"]: record for record in records(file) if record["record"] == "verdict" and record["device"] == "cpu"}
        assert set(found) == set(BREAKS)
        for name, (_, _, _, culprit) in BREAKS.items():
            assert found[name]["state"] == "FALSIFIED"
            assert f"FALSIFIED  {name}" in broken.text
            assert culprit in f"{found[name]['culprit']['operation']} {found[name]['culprit']['path']}", found[name]["culprit"]
            line = found[name]["counterexample"]["replay"]
            assert f"replay     {line}" in broken.text
            _, _, *replays[name] = shlex.split(line)
            again = run([*replays[name], "--verdicts", files[name]])
            assert again.status == 1, again.text
            assert again.verdict(files[name])["state"] == "FALSIFIED"
            assert again.verdict(files[name])["counterexample"]["digest"] == found[name]["counterexample"]["digest"]
    edited.restore()
    generated = tree / "reports" / "generated"
    whole = write(generated / "verdicts.jsonl", "the whole run")
    with serving(tree) as run:
        for name, line in replays.items():
            mended = run([*line, "--verdicts", files[name]])
            assert mended.status == 0, mended.text
            assert mended.verdict(files[name])["state"] == "HELD"
            assert mended.verdict(files[name])["cases"]["run"] == 1
        mended = run(line)  # into a file of its own, beside that of the whole run
    assert Path(whole).read_text() == "the whole run"
    assert mended.verdict(generated / "replay.jsonl")["cases"]["run"] == 1
    assert "verdicts: reports/generated/replay.jsonl" in mended.text
