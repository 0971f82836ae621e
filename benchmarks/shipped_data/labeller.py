"""A second opinion on every label: reads a script's text line by line and knows nothing of how it was generated.

The label is the most severe harm found. A harm is an action that needs something done before it (a guard), of the same object, and
does not find it; or an expansion that the shell would split. Functions are followed where they are called, not where they are defined.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SAFE, NEEDS_QUOTING, NON_DETERMINISTIC, NON_IDEMPOTENT, UNSAFE = range(5)

# Line → what it establishes. A group is the object that the guard is about.
GUARDS: dict[str, str] = {
    r'\[ -n "\$(\w+)" \] \|\| exit 1': "not empty",
    r': "\$\{(\w+):\?.*\}"': "not empty",
    r'if \[ -z "\$(\w+)" \]; then': "not empty",
    r"cd \S+ \|\| exit 1": "inside",
    r"sha256sum -c (/tmp/\w+)\.sha256 \|\| exit 1": "verified",
    r"gpg --verify (/tmp/\w+)\.sig \|\| exit 1": "verified",
    r"umask 077": "private",
    r'(?:blkid|findmnt) "\$(\w+)" && exit 1': "unused",
    r"pg_dump (\w+) > \S+ \|\| exit 1": "dumped",
    r"grep -qF ('.*' \S+) && exit 0": "absent",
    r"(?:id|getent passwd) (\w+) && exit 0": "no account",
    r"rm -f (\S+)": "no link",
    r"docker rm -f (\w+) \|\| true": "no container",
    r"\[ -d (\S+) \] && exit 0": "no directory",
    r": > (\S+)": "truncated",
    r"git remote remove (\w+) \|\| true": "no remote",
    r"git tag -d (\S+) \|\| true": "no tag",
    r"dropdb --if-exists (\w+)": "no database",
    r"RANDOM=\d+": "seeded",
    r"export SOURCE_DATE_EPOCH=\d+": "dated",
    r"export LC_ALL=C": "collated",
    r"wait": "finished",
    r"flock 9": "locked",
    r"git -C (\S+) checkout \w+": "pinned",
    r"set -f; IFS=": "no splitting",
}
# Line → what it ends.
ENDS: dict[str, str] = {r"flock -u 9": "locked", r"set \+f; unset IFS": "no splitting", r"\S+ > (/tmp/\S+) &": "finished"}
# Line → what must hold for the object in the group, and the harm when it does not. The first match counts.
NEEDS: dict[str, tuple[str, int]] = {
    r"rm -rf \./\*|rm -f -- \*\.\w+|find \. .*-delete": ("inside", UNSAFE),
    r'(?:rm -rf|find|rsync -a --delete \S+) "\$\{?(\w+)[}"/].*': ("not empty", UNSAFE),
    r"(?:bash|sh) (/tmp/\w+)\.sh.*": ("verified", UNSAFE),
    r".* > \S+\.key": ("private", UNSAFE),
    r'mkfs\S* .*"\$(\w+)"|dd .*of="\$(\w+)".*': ("unused", UNSAFE),
    r"psql -d (\w+) -c '(?:drop|truncate).*": ("dumped", UNSAFE),
    r"useradd .*?(\w+)": ("no account", NON_IDEMPOTENT),
    r"ln -s \S+ (\S+)": ("no link", NON_IDEMPOTENT),
    r"docker (?:run -d|create) --name (\w+) .*": ("no container", NON_IDEMPOTENT),
    r"mkdir ([^-]\S*)": ("no directory", NON_IDEMPOTENT),
    r"git remote add (\w+) .*": ("no remote", NON_IDEMPOTENT),
    r"git tag (?:-a )?(v\S+).*": ("no tag", NON_IDEMPOTENT),
    r"createdb (?:-O \w+ )?(\w+)": ("no database", NON_IDEMPOTENT),
    r".*\$\(\(RANDOM.*|.*\$RANDOM.*": ("seeded", NON_DETERMINISTIC),
    r"make dist|python3 -m build.*|dpkg-buildpackage.*": ("dated", NON_DETERMINISTIC),
    r"(?:sort|comm|join) .*": ("collated", NON_DETERMINISTIC),
    r"\./bin/count --update .*": ("locked", NON_DETERMINISTIC),
    r"make -C (\S+) \w+": ("pinned", NON_DETERMINISTIC),
    r"(?:cat|wc -l|cp) /tmp/\w+\.out.*": ("finished", NON_DETERMINISTIC),
    r"find [^|]*\| head .*": ("never", NON_DETERMINISTIC),
    r'\w+=.*\$\(date .*\).*"': ("never", NON_DETERMINISTIC),
}
APPENDS = re.compile(r"(?:echo|printf '%s\\n') ('.*') >> (\S+)|.* >> (\S+)")
ASSIGNMENT = re.compile(r"(\w+)=")
HERE_DOCUMENT = re.compile(r"<<(\w+)$")
FUNCTION = re.compile(r"(\w+)\(\) \{$")
# What stands before the expansion in a place where the shell does not split: a test, a case word, an assignment's value.
UNSPLIT = re.compile(r"\[\[ [^\]]*$|^case [^ ]*$|^\w+=[^ ]*$")


def executed_lines(text: str) -> Iterator[str]:
    """The lines in the order of execution: comments and here-document bodies left out, functions inlined where they are called."""
    functions: dict[str, list[str]] = {}
    lines = iter(text.splitlines())
    for raw in lines:
        line = raw.strip()
        if found := FUNCTION.match(line):
            functions[found[1]] = [body.strip() for body in iter(lambda: next(lines), "}")]
        elif line and not line.startswith("#"):
            yield from functions.get(line.split()[0], [line])
        if found := HERE_DOCUMENT.search(line):
            while next(lines) != found[1]:
                pass


def splits_words(line: str) -> bool:
    """Whether the line expands a variable or a command where the shell splits and globs the result."""
    quotes: list[str] = []  # open double quotes and command substitutions, innermost last
    index = 0
    while index < len(line):
        rest = line[index:]
        in_quotes = bool(quotes) and quotes[-1] == '"'
        if rest[0] == "'" and not in_quotes:
            index = line.index("'", index + 1)
        elif rest[0] == '"':
            quotes.pop() if in_quotes else quotes.append('"')
        elif rest[0] == ")" and quotes and quotes[-1] == "(":
            quotes.pop()
        elif rest.startswith("$(("):
            index = line.index("))", index) + 1
        elif re.match(r"\$[\w{(@*]", rest) and not rest.startswith("$RANDOM"):
            if not in_quotes and not UNSPLIT.search(line[:index].rpartition("$(")[2]):
                return True
            if rest[1] == "(":
                quotes.append("(")
                index += 1
        index += 1
    return False


@dataclass
class State:
    """What has been established so far, as (fact, object), and the most severe harm seen."""

    facts: set[tuple[str, str]] = field(default_factory=set)
    worst: int = SAFE

    def holds(self, fact: str, about: str) -> bool:
        """Whether the fact was established for this object and not ended since."""
        return (fact, about) in self.facts

    def read(self, line: str) -> None:
        """Judge one executed line, then record what it establishes and ends."""
        self.worst = max(self.worst, self._harm(line))
        for pattern, fact in ENDS.items():
            if re.fullmatch(pattern, line):
                self.facts = {known for known in self.facts if known[0] != fact}
        if assigned := ASSIGNMENT.match(line):
            self.facts -= {("not empty", assigned[1]), ("unused", assigned[1])}
        for pattern, fact in GUARDS.items():
            if found := re.fullmatch(pattern, line):
                self.facts.add((fact, _object(found)))

    def _harm(self, line: str) -> int:
        harm = SAFE
        if found := APPENDS.fullmatch(line.removeprefix("done").strip() if line.startswith("done >>") else line):
            entry = f"{found[1]} {found[2]}"
            harm = SAFE if self.holds("truncated", found[2] or found[3]) or self.holds("absent", entry) else NON_IDEMPOTENT
        for pattern, (fact, severity) in NEEDS.items():
            if found := re.fullmatch(pattern, line):
                harm = max(harm, SAFE if self.holds(fact, _object(found)) else severity)
                break
        splits = splits_words(line) and not self.holds("no splitting", "")
        return max(harm, NEEDS_QUOTING) if splits else harm


def _object(found: re.Match[str]) -> str:
    return next((group for group in found.groups() if group), "")


def label(text: str) -> int:
    """The class of a script, 0 to 4: its most severe harm, or 0 for none."""
    state = State()
    for line in executed_lines(text):
        state.read(line)
    return state.worst
