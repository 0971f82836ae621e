"""Changes of `impl` since a commit of its checkout: where a claim was true then, they are the likeliest to be wrong."""

import ast
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

from blackswan.falsifiers.diagnosis.tracing import IMPL, module_of


@cache
def changed(since: str) -> frozenset[str]:
    """The functions, constants and fields of `impl` that are new or that differ from the commit, `impl.fit:fit`, also if not committed.

    Raises a ValueError where `impl` is in no checkout of git, and where the checkout knows no such commit.
    """
    _git("ls-files", "--error-unmatch", "__init__.py")
    files = _git("diff", "--name-only", "--diff-filter=d", "--relative", "-z", since, "--", "*.py").split("\0")
    files += _git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py").split("\0")
    known, found = set(_git("ls-tree", "-r", "--name-only", "-z", since).split("\0")), set[str]()
    for file in filter(None, files):
        if not (IMPL / file).is_file():  # a link that leads nowhere, such as an editor's lock
            continue
        before = _sources(_git("show", f"{since}:./{file}")) if file in known else {}
        now = _sources((IMPL / file).read_text(encoding="utf-8"))
        found |= {f"{module_of(IMPL / file)}:{name}" for name, source in now.items() if before.get(name) != source}
    return frozenset(found)


def _git(*command: str) -> str:
    try:
        ran = subprocess.run(["git", *command], cwd=IMPL, capture_output=True, check=False)  # noqa: S603, S607  the user's git
    except OSError as error:
        raise ValueError(f"git cannot be started: {error.strerror}") from None
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip() or f"git ended with {ran.returncode}"
        raise ValueError(said.splitlines()[0])
    return ran.stdout.decode()


def _sources(text: str) -> Mapping[str, Sequence[str]]:
    """The sources of every definition without its comments, by its dotted name: a property has one for reading and one for writing. None of
    a text that is no Python."""
    found = dict[str, list[str]]()
    with suppress(SyntaxError):
        for name, node in definitions(ast.parse(text)):
            found.setdefault(name, []).append(ast.unparse(node))
    return found


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions and methods, also those that a condition defines, and what a module or a class assigns, by dotted names."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{prefix}{child.name}", child
            case ast.ClassDef():
                yield from definitions(child, f"{prefix}{child.name}.")
            case ast.If() | ast.Try() | ast.With():
                yield from definitions(child, prefix)
            case ast.Assign(targets=[ast.Tuple(elts=names)]):
                yield from ((f"{prefix}{name.id}", child) for name in names if isinstance(name, ast.Name))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{prefix}{name}", child
