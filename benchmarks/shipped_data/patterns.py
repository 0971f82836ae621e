"""The patterns that decide a script's label: each as a harmful and a harmless arrangement of the same words.

An *ordered* pattern is harmless when its guard comes before its action and harmful when it comes after. A *swapped* pattern moves a
detail (quotes, a flag, an `|| exit 1`) from one command to the other. Placeholders (@name) are the pools of `vocabulary.POOLS`.
"""

from dataclasses import dataclass

SAFE, NEEDS_QUOTING, NON_DETERMINISTIC, NON_IDEMPOTENT, UNSAFE = range(5)


@dataclass(frozen=True)
class Pattern:
    """Two arrangements of the same blocks; a block is one or more lines, or a tuple of variants to draw one from.

    `blocks` holds the blocks by letter, `harmless` and `harmful` the letters in order of execution; "a" is the action, the block that a
    script may also hide in a function.
    """

    name: str
    label: int
    blocks: dict[str, tuple[str, ...]]
    harmless: str
    harmful: str


def ordered(name: str, label: int, guard: tuple[str, ...], action: tuple[str, ...], setup: tuple[str, ...] = ()) -> Pattern:
    """Guard before action against action before guard, both after the set-up."""
    blocks = {"g": guard, "a": action} | ({"s": setup} if setup else {})
    start = "s" if setup else ""
    return Pattern(name, label, blocks, f"{start}ga", f"{start}ag")


def swapped(name: str, label: int, harmless: tuple[str, str], harmful: tuple[str, str], setup: tuple[str, ...] = ()) -> Pattern:
    """Two lines that exchange a detail and keep their order; the second one is the action."""
    blocks = {"x": (harmless[0],), "a": (harmless[1],), "y": (harmful[0],), "b": (harmful[1],)} | ({"s": setup} if setup else {})
    start = "s" if setup else ""
    return Pattern(name, label, blocks, f"{start}xa", f"{start}yb")


ARGUMENT = ('@filevar="$1"', "@filevar=$1", '@filevar="${1:-@path/data}"', "@filevar=$(tail -n 1 @path/queue)")
DIRECTORY = ('@dirvar="$1"', '@dirvar="${1:-}"', "@dirvar=$(cat @path/location)", "@dirvar=$(jq -r .dir @path/config.json)")
NOT_EMPTY = ('[ -n "$@dirvar" ] || exit 1', ': "${@dirvar:?not set}"', 'if [ -z "$@dirvar" ]; then\n  exit 1\nfi')
REMOVE = ('rm -rf "$@dirvar"/*', 'rm -rf "${@dirvar}/old"', 'find "$@dirvar" -type f -delete', 'rsync -a --delete @path/ "$@dirvar/"')

PATTERNS: tuple[Pattern, ...] = (
    # An expansion that the shell splits and globs. Test, assignment, case word and here-document do neither.
    swapped(
        "test",
        NEEDS_QUOTING,
        ("[[ -e $@filevar ]] || exit 1", 'cp "$@filevar" @path'),
        ('[[ -e "$@filevar" ]] || exit 1', "cp $@filevar @path"),
        ARGUMENT,
    ),
    swapped(
        "assignment", NEEDS_QUOTING, ("@plainvar=$@filevar", 'gzip "$@plainvar"'), ('@plainvar="$@filevar"', "gzip $@plainvar"), ARGUMENT
    ),
    swapped(
        "document",
        NEEDS_QUOTING,
        ("cat > @path/state <<EOF\nfile = $@filevar\nEOF", 'touch "$@filevar"'),
        ('cat > @path/state <<EOF\nfile = "$@filevar"\nEOF', "touch $@filevar"),
        ARGUMENT,
    ),
    swapped(
        "loop",
        NEEDS_QUOTING,
        ("echo 'arguments follow'", 'for @filevar in "$@@"; do\n  @plainvar=$@filevar\n  mv "$@filevar" @path\ndone'),
        ("echo 'arguments follow'", 'for @filevar in "$@@"; do\n  @plainvar="$@filevar"\n  mv $@filevar @path\ndone'),
    ),
    Pattern(
        "no_glob",
        NEEDS_QUOTING,
        {"s": ARGUMENT, "g": ("set -f; IFS=",), "a": ("ls -l $@filevar", "md5sum $@filevar"), "r": ("set +f; unset IFS",)},
        "sgar",
        "sgra",
    ),
    # A result that depends on time, chance, locale or on who comes first.
    ordered(
        "seed",
        NON_DETERMINISTIC,
        ("RANDOM=@number",),
        ("@numvar=$((RANDOM % @number2))", 'sleep "$((RANDOM % @number2))"', 'echo "@numvar $RANDOM"'),
    ),
    swapped(
        "pipeline",
        NON_DETERMINISTIC,
        ("echo '@ext files of @app'", "find @path -name '*.@ext' | sort | head -n @number"),
        ("echo '@ext files of @app'", "find @path -name '*.@ext' | head -n @number | sort"),
    ),
    ordered(
        "epoch",
        NON_DETERMINISTIC,
        ("export SOURCE_DATE_EPOCH=1700000000",),
        ("make dist", "python3 -m build --wheel", "dpkg-buildpackage -b"),
    ),
    swapped(
        "date",
        NON_DETERMINISTIC,
        ('echo "at $(date +%s)" >&2', 'out="@app-$(git describe).tar"'),
        ('echo "at $(git describe)" >&2', 'out="@app-$(date +%s).tar"'),
    ),
    ordered(
        "wait",
        NON_DETERMINISTIC,
        ("wait",),
        ("cat /tmp/@job.out", "wc -l /tmp/@job.out", "cp /tmp/@job.out @path"),
        ("./bin/@job > /tmp/@job.out &",),
    ),
    Pattern(
        "lock",
        NON_DETERMINISTIC,
        {"s": ("exec 9> /var/lock/@app.lock",), "g": ("flock 9",), "a": ("./bin/count --update @path/counter",), "r": ("flock -u 9",)},
        "sgar",
        "sgra",
    ),
    # A second run fails or does more than the first.
    ordered("append", NON_IDEMPOTENT, ("grep -qF '@line' @conf && exit 0",), ("echo '@line' >> @conf", "printf '%s\\n' '@line' >> @conf")),
    ordered(
        "account",
        NON_IDEMPOTENT,
        ("id @user && exit 0", "getent passwd @user && exit 0"),
        ("useradd -m @user", "useradd -r -s /sbin/nologin @user"),
    ),
    ordered("link", NON_IDEMPOTENT, ("rm -f @path/current",), ("ln -s @path/@version @path/current",)),
    ordered(
        "container",
        NON_IDEMPOTENT,
        ("docker rm -f @app || true",),
        ("docker run -d --name @app @image:@version", "docker create --name @app @image:@version"),
    ),
    swapped(
        "mkdir", NON_IDEMPOTENT, ("cp @conf /tmp/@app.conf", "mkdir -p @path/@app"), ("cp -p @conf /tmp/@app.conf", "mkdir @path/@app")
    ),
    ordered("directory", NON_IDEMPOTENT, ("[ -d @path/@word ] && exit 0",), ("mkdir @path/@word",)),
    ordered(
        "truncate", NON_IDEMPOTENT, (": > @log",), ('for d in @path/*; do\n  du -s "$d" >> @log\ndone', "df -P >> @log", "hostname >> @log")
    ),
    ordered("remote", NON_IDEMPOTENT, ("git remote remove @remote || true",), ("git remote add @remote https://@host/@app.git",)),
    # Something is destroyed, executed or revealed before it is known to be right.
    ordered("remove", UNSAFE, NOT_EMPTY, REMOVE, DIRECTORY),
    Pattern(
        "reassigned",
        UNSAFE,
        {"s": DIRECTORY, "g": NOT_EMPTY, "r": ("@dirvar=$(cat @path/override)", '@dirvar="$2"'), "a": REMOVE},
        "srga",
        "sgra",
    ),
    ordered("enter", UNSAFE, ("cd @path || exit 1",), ("rm -rf ./*", "find . -name '*.@ext' -delete", "rm -f -- *.@ext")),
    swapped(
        "entered",
        UNSAFE,
        ("mkdir -p @path/@app\ncd @path/@app || exit 1", "rm -rf ./*"),
        ("mkdir -p @path/@app || exit 1\ncd @path/@app", "rm -rf ./*"),
    ),
    ordered(
        "verify",
        UNSAFE,
        ("sha256sum -c /tmp/@tool.sha256 || exit 1", "gpg --verify /tmp/@tool.sig || exit 1"),
        ("bash /tmp/@tool.sh", "sh /tmp/@tool.sh --quiet"),
        ("curl -fsSL https://@host/@tool.sh -o /tmp/@tool.sh",),
    ),
    ordered("secret", UNSAFE, ("umask 077",), ('echo "$@secretvar" > @path/@app.key', "printf '%s' \"$@secretvar\" > @path/@app.key")),
    ordered(
        "format",
        UNSAFE,
        ('blkid "$@devvar" && exit 1', 'findmnt "$@devvar" && exit 1'),
        ('mkfs.ext4 -q "$@devvar"', 'dd if=/dev/zero of="$@devvar" bs=1M'),
        ('@devvar="$1"', '@devvar="/dev/$1"'),
    ),
)
