"""One writer a folder at a time, and what killed writers leave behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blackswan.impl.folder import InUseError, sole_writer, whole_folder

HOLD = "import sys, time; from pathlib import Path; from blackswan.impl.folder import {name}; folder = Path(sys.argv[1])\n"
HOLD += "with {name}(folder) as made:\n    ({half}); print('inside', flush=True); time.sleep(60)"


def holding(name: str, folder: Path, half: str) -> "subprocess.Popen[str]":
    """Another process, inside the block."""
    command = [sys.executable, "-c", HOLD.format(name=name, half=half), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "inside\n"
    return process


def killed(process: "subprocess.Popen[str]") -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_writer_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    first = holding("sole_writer", tmp_path / "run", "(folder / '.partial-run.json.abc').write_text('{')")
    with pytest.raises(InUseError, match="another process is writing it"), sole_writer(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / ".partial-run.json.abc").exists()
    killed(first)
    with sole_writer(tmp_path / "run"), sole_writer(tmp_path / "run"):
        assert not (tmp_path / "run" / ".partial-run.json.abc").exists()


def test_a_killed_export_is_removed_by_the_next_and_one_that_goes_on_is_not(tmp_path: Path) -> None:
    dead, alive = (holding("whole_folder", tmp_path / "merged", "(made / 'half').write_text('x')") for _ in range(2))
    killed(dead)
    with whole_folder(tmp_path / "merged") as made:
        (made / "whole").write_text("x")
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == ["whole"]
    assert len(list(tmp_path.glob(".partial-*"))) == 1
    killed(alive)
    with whole_folder(tmp_path / "merged", replace=True) as made:
        (made / "again").write_text("x")
    assert list(tmp_path.glob(".partial-*")) == []


def test_files_can_be_read_by_all(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "made") as made:
        (made / "file").touch(0o600)
    assert (tmp_path / "made" / "file").stat().st_mode & 0o777 == 0o644
