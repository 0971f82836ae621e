"""The ledger of device memory, among threads, processes, the dead and damaged files."""

import contextlib
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blackswan.impl import ledger as module
from blackswan.impl.ledger import DeviceMemory, InsufficientMemory, Ledger, ledger_folder, reserve

CARD, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
GIB = 2**30


def book(folder: Path, free: int = 10 * GIB, total: int = 10 * GIB, own: int = 0) -> Ledger:
    return Ledger(folder, lambda device: DeviceMemory(f"card {device.index}", free, total, own))


def test_a_refusal_says_what_is_needed_and_there(tmp_path: Path) -> None:
    with book(tmp_path).acquire(CARD, 4 * GIB):
        with pytest.raises(InsufficientMemory) as refused:
            book(tmp_path, free=8 * GIB).acquire(CARD, 7 * GIB)
        assert len(book(tmp_path).entries()) == 1
    error = refused.value
    assert (error.needed, error.free, error.total, error.reserved, error.available) == (7 * GIB, 8 * GIB, 10 * GIB, 4 * GIB, 6 * GIB)
    assert str(error).startswith("cuda:0: 7.00 GiB needed, 6.00 GiB available: 8.00 GiB of 10.00 GiB are free, 4.00 GiB are reserved by")
    assert f"(process {os.getpid()}: 4.00 GiB)" in str(error)


def test_an_error_in_the_block_releases_and_a_negative_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        book(tmp_path).acquire(CARD, -1)
    with pytest.raises(KeyError), book(tmp_path).acquire(CARD, GIB):
        raise KeyError
    assert book(tmp_path).entries() == []


def test_the_cpu_needs_no_reservation(tmp_path: Path) -> None:
    with reserve(torch.device("cpu"), 2**60) as reservation:
        assert reservation is None
    with reserve(CARD, GIB, book(tmp_path)) as reservation:
        assert reservation.bytes == GIB


@pytest.mark.parametrize("content", [b"", b"[{", b'[{"id": "a"}]', b"\xff\xfe", b"[null]", b'{"a": 1}'])
def test_a_damaged_ledger_is_begun_anew_with_a_warning(tmp_path: Path, content: bytes) -> None:
    (tmp_path / module.FILE).write_bytes(content)
    with pytest.warns(UserWarning, match=r"ledger.json: not a ledger .* its reservations are lost"):
        reservation = book(tmp_path).acquire(CARD, GIB)
    assert [entry.bytes for entry in book(tmp_path).entries()] == [GIB]
    reservation.release()


def test_a_half_written_file_of_a_killed_process_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / f".{module.FILE}.123").write_text('[{"id"')
    with book(tmp_path).acquire(CARD, GIB):
        assert len(book(tmp_path).entries()) == 1


def test_threads_do_not_oversubscribe(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def granted(_: int) -> bool:
        start.wait()
        with contextlib.suppress(InsufficientMemory):
            book(tmp_path).acquire(CARD, 3 * GIB)
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(granted, range(8))) == 3
    assert sum(entry.bytes for entry in book(tmp_path).entries()) == 9 * GIB


def test_the_folder_can_be_named_and_is_the_users_own_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.FOLDER_VARIABLE, str(tmp_path / "common"))
    assert ledger_folder() == tmp_path / "common"
    monkeypatch.delenv(module.FOLDER_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ledger_folder() == tmp_path / f"blackswan-{os.getuid()}"
    Ledger(memory=lambda _: DeviceMemory("card", GIB, GIB)).acquire(CARD, 1).release()
    assert (tmp_path / f"blackswan-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_who_may_use_the_folder_may_use_the_files(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common").chmod(0o777)
    book(tmp_path / "common").acquire(CARD, 1).release()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "common").iterdir()} == {0o666}


def test_the_device_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a figure of the program: the numbers are those of the card, its key does not depend on its place in the list."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 7))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"uuid": "ab-12"})())
    assert module.device_memory(CARD) == module.device_memory(OTHER) == DeviceMemory("cuda-ab-12", 5, 7, 2)
