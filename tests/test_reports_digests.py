"""The digest of a folder: every byte of code, contracts and data counts, and nothing else."""

import subprocess
from pathlib import Path

import pytest

from blackswan.reports import digests, staleness
from blackswan.reports.digests import FOLDERS, DigestError, folder_digest, record_digest, tree_digests

COUNTED = [
    "contracts/a.py",
    "contracts/a-v1.yaml",
    "contracts/mutants.json",
    "falsifiers/data/checkpoint/a.safetensors",
    "falsifiers/data/corpus/a.jsonl",
    "impl/kernels/a.py",
]


@pytest.mark.parametrize("name", COUNTED)
def test_a_file_counts_by_its_bytes_and_its_place(tmp_path: Path, name: str) -> None:
    folder, file = tmp_path / name.partition("/")[0], tmp_path / name
    file.parent.mkdir(parents=True)
    found = {folder_digest(folder)}
    for content in (b"x = 1\n", b"x = 2\n"):
        file.write_bytes(content)
        found.add(folder_digest(folder))
    moved = file.with_stem("b-v2" if file.suffix == ".yaml" else "calibration" if file.suffix == ".json" else "b")
    file.rename(moved)
    found.add(folder_digest(folder))
    assert len(found) == 4
    moved.rename(file)
    file.write_bytes(b"x = 1\n")
    assert folder_digest(folder) in found


def test_every_tracked_file_counts_but_prose() -> None:
    """Whoever adds data of another name enters it, or the evidence outlives its change."""
    listed = subprocess.run(["git", "ls-files", "-z", *FOLDERS], cwd=staleness.ROOT, capture_output=True, check=True, text=True).stdout
    tracked = [name for name in listed.split("\0") if name and not name.endswith(".md")]
    assert len(tracked) > 100
    assert [name for name in tracked if not digests._counts(*name.split("/", 1))] == []


def test_two_files_that_change_places_count(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    digests = []
    for first, second in (("1", "2"), ("2", "1"), ("1", "2")):
        one.write_text(first)
        two.write_text(second)
        digests.append(folder_digest(tmp_path))
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    "name", ["export.json", "a-v1.yaml~", "a-v1.yaml.orig", ".a-v1.yaml", ".#a.py", ".ipynb_checkpoints/a.py", "notes.md", "data/a.json"]
)
def test_a_file_that_no_run_reads_does_not_count(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "contracts"
    folder.mkdir()
    (folder / "a-v1.yaml").write_text("contract: a\n")
    before = folder_digest(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert folder_digest(folder) == before


def test_caches_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = folder_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\0")
    assert folder_digest(tmp_path) == before


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match="absent: no such folder"):
        folder_digest(tmp_path / "absent")


def test_digests_of_this_checkout_can_be_taken() -> None:
    assert set(tree_digests(staleness.ROOT)) == set(FOLDERS)


def test_the_digest_of_a_record_is_of_what_it_says() -> None:
    assert record_digest({"a": 1, "b": [1.5, "é"]}) == record_digest({"b": [1.5, "é"], "a": 1, "digest": "x"})
    assert len({record_digest(record) for record in ({"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": None}, {})}) == 5
