"""The verdict file: what a resumed run keeps of it, one writer at a time, what it may replace, and where it cannot be written."""

import fcntl
import shutil
from pathlib import Path

import numpy as np
import pytest
from reports_factory import verdict, write
from terminal_processes import ENVIRONMENT, listing, records, serving, several, started

from blackswan.falsifiers.runner import verdict_file
from blackswan.falsifiers.runner.plugin import EXIT_NOTHING_HELD, EXIT_USAGE
from blackswan.falsifiers.runner.verdict import plain
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


def test_a_second_run_on_one_verdict_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    asked = ["--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts", str(write(file, verdict()))]
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        before = listing(tmp_path)
        refused = several([asked, [*asked, "--resume"]])
        assert listing(tmp_path) == before
    for run in refused:
        run.refuses(EXIT_USAGE, "is being written by another run")


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
from blackswan.falsifiers.runner.verdict_file import VerdictFile

class Full:
    def __init__(self, stream, room):
        self.stream, self.room, self.flush, self.close = stream, room, stream.flush, stream.close
    def write(self, text):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.stream.write(text)

write = VerdictFile._write

def short(self, record):
    path = self.campaign.verdict_file
    if path.stem.isdigit() and not isinstance(self._stream, Full):
        self._stream = Full(self._stream, int(path.stem))
    if path.stem == "page" and record["record"] == "end":
        path.with_suffix(".md").mkdir()
    write(self, record)

VerdictFile._write = short
"""


def test_what_cannot_be_written_is_one_line_and_falsifies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for so many records as the file is named after; beside another one there is a folder where its page is to be."""
    (tmp_path / "full.py").write_text(FULL)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    left = {"0": 0, "1": 1, "2": 2, "page": 3}
    asked = ["-p", "full", "--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts"]
    with serving() as run:
        for name, count in left.items():
            run([*asked, tmp_path / f"{name}.jsonl"]).refuses(3, "page.md" if name == "page" else "No space left")
            assert len(records(tmp_path / f"{name}.jsonl")) == count


def test_a_folder_that_takes_no_file_is_bad_input() -> None:
    (run,) = several([["--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts", "/proc/x.jsonl"]])
    run.refuses(EXIT_USAGE, "/proc/x.jsonl cannot be written")


def test_what_a_subject_says_ends_no_run_whatever_its_characters(tmp_path: Path) -> None:
    assert plain({"\udce9": [{1}, np.float32("nan"), np.arange(2)]}) == {"\\udce9": ["{1}", "nan", [0, 1]]}
    subject = tmp_path / "says.py"
    subject.write_text("def rms_norm(x, weight, eps):\n    raise ValueError('a folder named \\udce9 \\0')\n", encoding="utf-8")
    asked = ["--subject", f"{subject}:rms_norm", "--claim", "OP-RMSNORM", "--dtype", "float32", "--verdicts", str(tmp_path / "v.jsonl")]
    for processes in ("0", "1"):
        (run,) = several([[*asked, "-n", processes, "--junitxml", str(tmp_path / "junit.xml")]])
        assert run.status == 1, run
        (record,) = [one for one in records(tmp_path / "v.jsonl") if one["record"] == "verdict"]
        assert record["state"] == "FALSIFIED"
        assert "a folder named \\udce9 \0" in record["counterexample"]["metric"]
    with started("-m", "blackswan", "vet", *asked[1:]) as vetted:
        out, err = vetted.communicate(timeout=60)
    assert (vetted.returncode, err) == (1, "")
    assert "a folder named" in out
