"""Who may import whom: the table of ARCHITECTURE.md, held against the imports of every file."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers", "bitsandbytes", "triton", "peft", "safetensors", "tokenizers"}


def rules() -> dict[str, str]:
    """Folder → the cell `may import`, from the table."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


FOLDERS = tuple(rules())


def allowed(folder: str) -> set[str]:
    """The folders that one may import besides itself, as its cell says."""
    cell = rules()[folder]
    named = set(re.findall(r"`(\w+)`", cell))
    if cell == "all":
        return set(FOLDERS)
    if cell.startswith("not "):
        return set(FOLDERS) - named - {"tests", "reports", "falsifiers"}
    return named


@cache
def nodes(path: Path) -> list[ast.AST]:
    """What imports, in a file."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return [node for node in found if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def imports(path: Path, source: str | None = None) -> Iterator[tuple[int, str]]:
    """Line and package of every import, wherever in the file it stands; relative and dynamic ones included. Below blackswan, the folder."""
    for node in nodes(path) if source is None else ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, _package(alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = path.relative_to(ROOT).parent.parts
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else node.module or ""
            yield from ((node.lineno, _package(f"{base}.{alias.name}")) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            yield node.lineno, _package(str(name.value)) if isinstance(name, ast.Constant) else "(dynamic)"


def _package(name: str) -> str:
    """`blackswan.impl.lora` is of the folder impl, `blackswan.cli` of blackswan itself, and everything else of its first part."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "blackswan" and rest.partition(".")[0] in FOLDERS else first


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def violations(folder: str, path: Path, source: str | None = None) -> list[str]:
    """Imports of the project's other folders that the table does not allow, and packages that the folder's cell leaves out."""
    may = allowed(folder) | {folder}
    free = may >= set(FOLDERS)
    found = [
        (line, name) for line, name in imports(path, source) if (name in FOLDERS or name == "(dynamic)") and name not in may and not free
    ]
    if folder == "reference":
        found += [(line, name) for line, name in imports(path, source) if not _in_reference(name)]
    if folder in ("contracts", "reports"):
        found += [(line, name) for line, name in imports(path, source) if name in HEAVY]
    return [f"{path.relative_to(ROOT)}:{line} imports {name}" for line, name in found]


def _in_reference(name: str) -> bool:
    return name in ("numpy", "ml_dtypes", "reference") or name in sys.stdlib_module_names


def test_the_table_names_every_package_and_is_read_right() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"tests"}
    assert packages <= set(FOLDERS)
    assert allowed("contracts") == set()
    assert allowed("reports") == {"contracts"}
    assert allowed("impl").isdisjoint({"reference", "falsifiers"})
    assert allowed("reference") == set()
    assert rules()["reference"] == "NumPy, ml_dtypes"
    assert allowed("falsifiers") == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_keep_to_the_table(folder: str) -> None:
    assert files(folder), f"no Python file in {folder}"
    assert [found for path in files(folder) for found in violations(folder, path)] == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("contracts", "import blackswan.reference"),
        ("contracts", "def f():\n    from torch import nn"),
        ("reference", "import torch"),
        ("reference", "from blackswan.impl.lora import x"),
        ("reference", "import scipy"),
        ("impl", "import blackswan.reference.table as t"),
        ("impl", "from blackswan import falsifiers"),
        ("contracts", "import blackswan.cli"),
        ("impl", "import importlib\nimportlib.import_module('blackswan.reference.table')"),
        ("impl", "__import__('refer' + 'ence')"),
        ("reports", "if True:\n    import blackswan.falsifiers.runner.verdict"),
        ("reports", "import safetensors"),
    ],
)
def test_a_forbidden_import_is_found(folder: str, source: str) -> None:
    assert violations(folder, ROOT / folder / "planted.py", source)


def test_impl_and_reference_meet_only_where_they_are_compared() -> None:
    both = {
        folder
        for folder in FOLDERS
        for path in files(folder)
        if {"impl", "reference"} <= {name for _, name in imports(path)} | ({folder} & {"impl", "reference"})
    }
    assert both <= {"falsifiers", "tests", "benchmarks"}
    assert "falsifiers" in both


@pytest.mark.parametrize("command", ["contracts list", "contracts lint", "reports --help"])
def test_commands_import_nothing_heavy(command: str) -> None:
    program = (
        "import runpy, sys\n"
        "module, *sys.argv[1:] = sys.argv[1:]\n"
        "try:\n    runpy.run_module(module, run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "heavy: []"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for types count as well; `from package import module` is an import of both."""
    interface = ROOT / "blackswan" / "__init__.py"  # every import names it, and it imports the public names when they are first used
    paths = [path for name in FOLDERS for path in files(name) if path != interface]
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    edges: dict[str, set[str]] = {module: set() for module in known}
    for module, path in known.items():
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            edges[module] |= {name.removeprefix("blackswan.") for name in names} & known.keys() - {module}
    while True:  # a module that imports none of the others that are left, or that none of them imports, is in no circle
        imported = set().union(*edges.values())
        free = {module for module, others in edges.items() if module not in imported or not others & edges.keys()}
        if not free:
            break
        edges = {module: others & edges.keys() for module, others in edges.items() if module not in free}
    assert not edges, f"these import one another: {', '.join(sorted(edges))}"
