"""The digest of a folder: every byte of code, contracts and data counts, and nothing else."""

from pathlib import Path

import pytest

from blackswan.reports import staleness
from blackswan.reports.digests import FOLDERS, DigestError, folder_digest, record_digest, tree_digests


@pytest.mark.parametrize("name", ["a.py", "a.yaml", "a.json", "data/a.jsonl", "data/a.safetensors", "kernels/a.cu"])
def test_a_file_counts_by_its_bytes_and_its_place(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    found = {folder_digest(tmp_path)}
    file.parent.mkdir(exist_ok=True)
    for content in (b"x = 1\n", b"x = 2\n"):
        file.write_bytes(content)
        found.add(folder_digest(tmp_path))
    file.rename(file.with_stem("b"))
    found.add(folder_digest(tmp_path))
    assert len(found) == 4
    file.with_stem("b").rename(file)
    file.write_bytes(b"x = 1\n")
    assert folder_digest(tmp_path) in found


def test_two_files_that_change_places_count(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    digests = []
    for first, second in (("1", "2"), ("2", "1"), ("1", "2")):
        one.write_text(first)
        two.write_text(second)
        digests.append(folder_digest(tmp_path))
    assert digests[0] == digests[2] != digests[1]


def test_notes_and_caches_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = folder_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\0")
    (tmp_path / "derivation.md").write_text("dx = dy")
    assert folder_digest(tmp_path) == before


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match="absent: no such folder"):
        folder_digest(tmp_path / "absent")


def test_digests_of_this_checkout_can_be_taken() -> None:
    assert set(tree_digests(staleness.ROOT)) == set(FOLDERS)


def test_the_digest_of_a_record_is_of_what_it_says() -> None:
    assert record_digest({"a": 1, "b": [1.5, "é"]}) == record_digest({"b": [1.5, "é"], "a": 1, "digest": "x"})
    assert len({record_digest(record) for record in ({"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": None}, {})}) == 5
