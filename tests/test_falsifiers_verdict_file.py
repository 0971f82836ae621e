"""The verdict file: what a resumed run keeps of it, one writer at a time, what it may replace, and where it cannot be written."""

import fcntl
import shutil
from pathlib import Path

import pytest
from reports_factory import reseal
from terminal_processes import ENVIRONMENT, command, listing, records, several

from blackswan.falsifiers.runner import verdict_file
from blackswan.falsifiers.runner.plugin import EXIT_NOTHING_HELD, EXIT_USAGE
from blackswan.falsifiers.runner.verdict_file import writable
from blackswan.reports.render import write_pages


def test_a_resumed_run_that_attacks_nothing_is_success_only_where_everything_had_held(tmp_path: Path) -> None:
    target = ["--resume", "--verdicts", str(tmp_path / "verdicts.jsonl")]
    given = [
        (["--claim", "OP-RMSNORM"], 0),
        (["--claim", "OP-RMSNORM"], 0),
        (["--claim", "OP-RMSNORM", "--claim", "OP-SWIGLU", "-k", "zzz"], EXIT_NOTHING_HELD),
        (["--claim", "OP-SWIGLU", "-k", "OP-SWIGUL"], EXIT_NOTHING_HELD),
    ]
    runs = several([[*line, *target] for line, _ in given])
    for (line, status), run in zip(given, runs, strict=True):
        assert run.status == status, f"{line}: {run.text}"
    assert len(records(tmp_path / "verdicts.jsonl")) == 4, "what was not attacked is as it was"


def test_a_resumed_run_fails_as_long_as_its_file_holds_what_was_falsified(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    asked = ["--claim", "OP-RMSNORM", "--claim", "OP-SOFTMAX", "--dtype", "float32", "--verdicts", str(file)]
    several([asked])
    text = file.read_text().replace('"HELD", "reason": null', '"FALSIFIED", "reason": "by hand"', 1)
    file.write_text(text.replace('"HELD": 2, "FALSIFIED": 0', '"HELD": 1, "FALSIFIED": 1'))
    reseal(file)
    wrong = next(record["claim"] for record in records(file) if record.get("state") == "FALSIFIED")
    (right,) = {"OP-RMSNORM", "OP-SOFTMAX"} - {wrong}
    narrower, again = several([["--resume", "--verdicts", str(file), "--claim", right], [*asked, "--resume"]])
    assert narrower.status == 1, narrower.text
    assert f"this run fails: {wrong} in float32 FALSIFIED" in narrower.text
    assert again.status == 0, again.text
    assert {record["state"] for record in records(file) if record["record"] == "verdict"} == {"HELD"}


def test_a_second_run_on_one_verdict_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    asked = ["--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts", str(file)]
    several([asked])
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        before = listing(tmp_path)
        refused = several([asked, [*asked, "--resume"]])
        assert listing(tmp_path) == before
    for run in refused:
        assert run.status == EXIT_USAGE, run.text
        assert run.text.count("is being written by another run") == 1, run.text
        assert "Traceback" not in run.text
    assert several([asked])[0].status == 0


@pytest.mark.parametrize("beginning", ["", '{"record": "ru', '{"schema": 1, "record": "run"}\n', '{"record": "run", "schema": 1'])
def test_what_a_run_may_have_left_is_replaced(tmp_path: Path, beginning: str) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text(beginning, encoding="utf-8")
    if beginning.endswith("ru"):
        with pytest.raises(ValueError, match="is no verdict file"):
            writable(path)
    else:
        assert writable(path) == path


def test_kept_evidence_and_what_is_no_page_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "evidence" / "v.jsonl"
    several([["--claim", "OP-RESIDUAL", "--dtype", "float32", "--verdicts", str(kept)]])
    for page in kept.parent.glob("v.[!j]*"):
        page.unlink()
    write_pages(kept, tmp_path)
    shutil.copy(kept, tmp_path / "v.jsonl")
    assert writable(tmp_path / "v.jsonl"), "its own pages are made anew"
    link = tmp_path / "link.jsonl"
    link.symlink_to(kept)
    monkeypatch.setattr(verdict_file, "EVIDENCE", kept.parent)
    for path in (kept, link):
        with pytest.raises(ValueError, match="is kept evidence"):
            writable(path)
    for page in ("v.md", "v.json", "v.html"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(f" {text}", encoding="utf-8")
        with pytest.raises(ValueError, match=f"{page} is no page of a report"):
            writable(tmp_path / "v.jsonl")
        (tmp_path / page).write_text(text, encoding="utf-8")


FULL = """
import errno, os
import pytest
from blackswan.falsifiers.runner import verdict_file

class Full:
    def __init__(self, stream, room):
        self.stream, self.room = stream, room
    def write(self, text):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()
    def close(self):
        self.stream.close()

write = verdict_file.VerdictFile._write

def short(self, record):
    if "ROOM" in os.environ and not isinstance(self._stream, Full):
        self._stream = Full(self._stream, int(os.environ["ROOM"]))
    if "PAGE" in os.environ and record["record"] == "end":
        os.mkdir(os.environ["PAGE"])
    write(self, record)

verdict_file.VerdictFile._write = short
"""


@pytest.mark.parametrize("lines", [0, 1, 2, None], ids=["no run", "no verdict", "no end", "no page"])
def test_what_cannot_be_written_is_one_line_and_falsifies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int | None
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    file = tmp_path / "out.jsonl"
    monkeypatch.setitem(ENVIRONMENT, *(("PAGE", str(file.with_suffix(".md"))) if lines is None else ("ROOM", str(lines))))
    run = command("-p", "full", "--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts", file)
    assert run.status == 3, run.text
    assert "Traceback" not in run.text
    assert "INTERNALERROR" not in run.text
    assert run.text.count("blackswan: ") == 1, run.text
    assert ("No space left" if lines is not None else "out.md") in run.text
    assert len(records(file)) == (3 if lines is None else lines)


def test_a_folder_that_takes_no_file_is_bad_input() -> None:
    (run,) = several([["--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts", "/proc/x.jsonl"]])
    assert run.status == EXIT_USAGE, run.text
    assert "/proc/x.jsonl cannot be written" in run.text
    assert "INTERNALERROR" not in run.text
    assert "Traceback" not in run.text
