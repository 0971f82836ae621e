from pathlib import Path

import pytest
from reports_factory import SOURCE

from blackswan.reports import staleness
from blackswan.reports.digests import FOLDERS, DigestError, folder_digest, source_digest, tree_digests

SAME = [
    SOURCE.replace("import math", "import math  # used below"),
    SOURCE.replace('"""Doc."""', '"""Another\n\n    doc."""'),
    SOURCE.replace("x * x + eps", "(x   *   x)\n        + eps"),
    SOURCE.replace('"""Module."""\n', ""),
    SOURCE.replace("\n", "\r\n"),
    SOURCE.replace("1e-6", "0.000001"),
]

OTHER = [
    SOURCE.replace("+ eps", "- eps"),
    SOURCE.replace("1e-6", "1e-5"),
    SOURCE.replace("x * x + eps", "x * (x + eps)"),
    SOURCE.replace("eps: float = 1e-6", "eps: float | None = None"),
    SOURCE.replace("math.sqrt", "math.cbrt"),
    SOURCE.replace("    return x", "    x = x\n    return x"),
    SOURCE.replace("x / math", "1 / math").replace("1 /", "1.0 /"),
    SOURCE + '"not a docstring"\n',
]

RICH = (
    SOURCE
    + '''

@decorated(1, *rest, key=-0.0, **more)
class A(B, metaclass=C):
    """Doc."""

    field: int = 3

    async def f(self, x, /, *, y: "int" = 2):
        async with x as z:
            yield [i async for i in z if (j := i) > 0x10]


def g(a, *b, **c):
    match a:
        case [1, *_] | {"k": v}:
            return lambda: f"{a!r:>{b}} {c=}" "tail" f"{a}" if v else not a
    return {**c, "x": ...}, a[1:2, ::3], b"y", 1j, None, True, 10**20
'''
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "norm.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("text", SAME)
def test_comments_docstrings_and_formatting_do_not_count(source: Path, text: str) -> None:
    assert text != SOURCE
    before = source_digest([source])
    source.write_bytes(text.encode())
    assert source_digest([source]) == before


def test_every_change_of_meaning_counts(source: Path) -> None:
    digests = {source_digest([source])}
    for text in OTHER:
        source.write_text(text)
        digests.add(source_digest([source]))
    assert len(digests) == len(OTHER) + 1


def test_constants_of_different_types_differ(source: Path) -> None:
    digests = set()
    for constant in ("1", "1.0", "True", "'1'", "b'1'", "None", "...", "1j"):
        source.write_text(f"x = {constant}\n")
        digests.add(source_digest([source]))
    assert len(digests) == 8


def test_digest_is_the_same_on_every_python_version(source: Path) -> None:
    """Recorded with Python 3.11, 3.12 and 3.13, whose syntax trees differ."""
    source.write_text(RICH)
    assert source_digest([source]) == "e813cee9409566736359e5e93dee03d1b4a0ea120ed46ac6e83753ca9c5f35bd"


def test_order_of_paths_does_not_matter_but_names_do(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("x = 1\n")
    two.write_text("x = 2\n")
    before = source_digest([one, two])
    assert source_digest([two, one]) == before
    one.write_text("x = 2\n")
    two.write_text("x = 1\n")
    assert source_digest([one, two]) != before


@pytest.mark.parametrize(("text", "expected"), [("x = (", "norm.py:1: is not Python"), ("x = '\0'", "is not Python")])
def test_file_that_is_not_python_is_named(source: Path, text: str, expected: str) -> None:
    source.write_text(text)
    with pytest.raises(DigestError, match=expected):
        source_digest([source])


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match=r"absent\.py: cannot be read"):
        source_digest([tmp_path / "absent.py"])
    with pytest.raises(DigestError, match="absent: no such folder"):
        folder_digest(tmp_path / "absent")


def test_yaml_counts_by_content(tmp_path: Path) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text("a: 1\nb: [1, 2]\n")
    before = folder_digest(tmp_path)
    file.write_text("# comment\nb:\n  - 1\n  - 2\na:   1\n")
    assert folder_digest(tmp_path) == before
    file.write_text("a: 1\nb: [2, 1]\n")
    assert folder_digest(tmp_path) != before
    file.write_text("a: [\n")
    with pytest.raises(DigestError, match=r"claims\.yaml: is not YAML"):
        folder_digest(tmp_path)


def test_other_files_and_caches_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = folder_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\0")
    (tmp_path / "derivation.md").write_text("dx = dy")
    assert folder_digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert folder_digest(tmp_path) != before


def test_digests_of_this_checkout_can_be_taken() -> None:
    assert set(tree_digests(staleness.ROOT)) == set(FOLDERS)
