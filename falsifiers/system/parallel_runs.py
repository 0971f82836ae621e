"""A data-parallel run that loses a worker and is resumed, against one that does not."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most, value_inside
from blackswan.falsifiers.subjects.doors.training import Kill, Plan, Problem, Raised, Run
from blackswan.falsifiers.system.continued import FEATURES, KILLED, other_runs
from blackswan.falsifiers.system.run_problem import BATCH as BATCH_OF_ALL
from blackswan.falsifiers.system.run_problem import STATE, read_state, small_run, with_samples
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.state_damage import sealed_state
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

RUN, LOCK = "run.json", ".lock"
NO_UTF8 = os.fsdecode(b"\xe9")
"""A byte in the name of a folder that is no letter."""
WORKERS, EPOCHS, BATCH, SAVE_EVERY = 2, 2, 3, 2
LONG = ", more" * 11_000 + ", and an end"
"""More letters than 16 bits count."""
LETTERS = "xé日𝔘"
"""Characters of 1, 2, 3 and 4 bytes."""
POWERS = range(3, 14)
"""Texts of about so many bytes, as powers of two."""
SEVERAL, SEVERAL_CHUNK = 4, 13
"""So many workers have an order, and sum and compare so many elements at a time."""
MANY, LONG_VECTOR, SUMMED_IN = 16, 160_000_000, 3
"""So many workers sum what LoRA of rank 64 trains of a model of 7B: a sum has room beside its parts, and not the vectors of all workers."""
MOMENTS = (("read", "after the sum"), ("before the sum",), ("os.rename state/.partial-state.safetensors",))
"""A batch is about to be trained on, the workers' numbers to be summed or just summed, or the new state to replace the old one."""

PLACES = {
    "the beginning of a run": WORKERS,
    "samples of a batch": WORKERS,
    "a batch": WORKERS,
    "the mean": WORKERS,
    "a step": WORKERS,
    "an evaluation": WORKERS,
    "a state that is read": WORKERS,
    "an adapter": 1,
    "a state": 1,
}
"""Where workers agree that none of them failed, and how many of them may fail there: the first one alone writes."""
OTHERS = (
    *("MemoryError", "TypeError", "KeyError", "AttributeError", "AssertionError", "ImportError", "OutOfMemoryError", "SafetensorError"),
    *("NotImplementedError", "ReferenceError"),
)
"""Errors that the program does not raise itself, torch's and a library's among them."""

PARTING = 30.0
"""So many seconds do workers wait of which one fails; half of them are plenty to leave."""
PATIENCE = (60, 300)
"""So many seconds, from … to below, are workers told to wait: neither the program's default nor torch's."""


def killed_run_resumes(trial: Trial) -> list[Comparison]:
    """A worker is killed, in a third of the cases by Ctrl-C, in a step and at a moment that the seed chooses; it ends at once, and the
    other one for that reason; the run is resumed and ends.

    Against a run that was not interrupted: every tensor on every worker, and the samples of every step that counts. In that run every
    epoch takes each sample once, though one worker begins later than the other one; at most the steps since the last state are made again.
    So it is where one worker alone goes on.
    """
    problem, plan = _problem(trial), Plan(processes=WORKERS, save_every=SAVE_EVERY)
    with tempfile.TemporaryDirectory() as parent:
        whole = trial.trainer.fit(problem, Path(parent) / "whole", replace(plan, behind=True))
        if failed := _failures("whole run", whole):
            return failed
        kill, folder = _kill(trial, whole), Path(parent) / "killed"
        killed = trial.trainer.fit(problem, folder, replace(plan, kill=kill))
        alone = shutil.copytree(folder, Path(parent) / "alone")
        resumed = trial.trainer.fit(problem, folder, replace(plan, resume=True))
        by_one = trial.trainer.fit(problem, alone, replace(plan, resume=True, processes=0))
    found = [*_failures(f"run resumed after {kill}", resumed), *_failures(f"run of one worker after {kill}", by_one)]
    for rank, each in enumerate(killed.ranks):
        end = f"WorkerLost: rank {rank} of {WORKERS} lost" if rank != kill.rank else "KeyboardInterrupt" if kill.interrupt else KILLED
        if not each.ended.startswith(end) or _went_on(each.events, kill):
            found.append(broken(f"rank {rank} after {kill}", "another end, or a later one", end, each.ended or "ran to the end"))
    return found or [
        *_epochs_are_complete(whole, len(problem.training)),
        *_same_samples(whole, killed, resumed),
        *(replace(each, tensor=f"by one worker: {each.tensor}") for each in _same_samples(whole, killed, by_one)),
        *_same_end(whole, resumed),
    ]


def _went_on(events: Sequence[str], kill: Kill) -> bool:
    """Whether a worker that had Ctrl-C did anything then but remove a file that it was writing; of one that was killed nothing is known."""
    at = [place for place, event in enumerate(events) if event == kill.event][kill.times - 1 : kill.times]
    return kill.interrupt and any(not event.startswith(("os.remove", "flush")) for event in events[at[0] + 1 :]) if at else False


def mixed_workers_are_refused(trial: Trial) -> Iterator[Comparison]:
    """Two workers of which one was given another setting, architecture, sample or weight, two of each drawn, begin no run; both say so.

    Nor do they where a run is there already, where another process writes one, where the first worker has no place for a state or an
    adapter, or where the two would go on from different states, whatever letters the folder has. Both say what the first one found, by an
    error of the kind that one worker would raise.
    """
    problem, rng = small_run(trial, samples=(BATCH_OF_ALL, 3), quantize_nf4=True), trial.rng("others")
    every = other_runs(trial, problem, rng)
    kinds = {name.partition(".")[0]: [each for each in every if each.startswith(name.partition(".")[0])] for name in every}
    others = {str(name): every[str(name)][0] for names in kinds.values() for name in rng.permutation(names)[:2]}
    labels, misfit = [*problem.training.labels[:-1], problem.classes], "a label of no class"
    others[misfit] = with_samples(problem, "training", replace(problem.training, labels=labels))
    with tempfile.TemporaryDirectory(suffix=f" für zwei {NO_UTF8}") as parent:
        folders = [Path(parent) / str(len(others) + place) for place in range(6)]
        wanted = dict.fromkeys(others, "ValueError: rank 1: another") | {
            misfit: f"ValueError: rank 1 of 2: the training sample {len(labels)} "
        }
        wanted |= _found_by_the_first(folders[:4])
        wanted |= _states_that_differ(trial, problem, folders[4:])
        with (folders[1] / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            given = [*others.values(), *[problem] * len(folders)]
            said = [[_escaped(text) for text in texts] for texts in trial.trainer.mixed(problem, given, Path(parent))]
        unbegun = [Path(parent) / str(place) for place in range(len(others))] + folders[1:2]
        left = [path.name for folder in unbegun for path in folder.glob("*") if path.name != LOCK]
    yield from same("files of the runs", [], left)
    for rank, texts in enumerate(said):
        for (name, words), text in zip(wanted.items(), [*texts, *[""] * len(wanted)], strict=False):
            if words not in text:
                yield broken(f"{name}, rank {rank}", "not refused", words, text or "a step was made")
                return
    yield from same("workers that refused", 2, len(said))


def several_agree(trial: Trial) -> Iterator[Comparison]:
    """Workers whose tensor or text is not that of the first one are named, and no others; an error is told with all its lines. The first
    of two errors is told, and who has the other; one without a word is an error too, and one of a full disk has its number. A gradient is
    finite whose sum and norm are too large for float32.

    They sum in their order: float32 has other bits in another one; and float64 and large counts in their own dtype. A tensor differs by
    two signs in float64, by the sign of a zero, by two elements and by two whole chunks that are exchanged. Tensors in float16 and uint8,
    whose bytes four does not divide, differ in their last number. Texts of about as many bytes as powers of two arrive as they are, with
    a character of 1 to 4 bytes there at each of its places, long beside short. A long vector is summed in parts. What others give
    counts where a worker gives the same again.
    """
    rng = trial.rng("several")
    alike = np.broadcast_to(rng.standard_normal(4 * SEVERAL_CHUNK), (SEVERAL, 4 * SEVERAL_CHUNK))
    own = (rng.standard_normal((SEVERAL, 999)) * 10.0 ** rng.integers(-3, 4, (SEVERAL, 999))).astype(np.float32)
    precise, counted = rng.standard_normal((SEVERAL, 2)), rng.integers(2**40, 2**41, (SEVERAL, 3, 5))
    first, second, third = (int(rank) for rank in 1 + rng.permutation(SEVERAL - 1))
    signs, places, pieces, one, other = (alike.copy() for _ in range(5))
    signs[first, [3, 40]] *= -1
    places[second, [5, 7]] = places[second, [7, 5]]
    pieces[third] = np.roll(pieces[third].reshape(4, -1), 1, axis=0).reshape(-1)
    zero = np.zeros((SEVERAL, 5), np.float32)
    zero[second, 2] = -0.0
    one[first, 0], other[second, 0] = 7.0, 7.0
    half, byte = np.zeros((SEVERAL, 9), np.float16), np.zeros((SEVERAL, 7), np.uint8)
    half[first, -1], byte[third, -1] = 0.25, 1
    texts = ["one", "one", "one", "one"]
    texts[first] = texts[third] = "another"
    others = ", ".join(str(rank) for rank in sorted((first, third)))
    differ = [f"WorkerFailed: tensor {number} of rank {rank} differ" for number, rank in ((0, first), (0, second), (0, third), (0, second))]
    told = [f"WorkerFailed: tensor 0 of rank {', '.join(map(str, range(1, SEVERAL)))} differ", *differ]
    told += ["", f"WorkerFailed: tensor 1 of rank {first} differ"]
    told += [f"WorkerFailed: tensor 0 of rank {rank} differ" for rank in (first, third)]
    told += [f"ValueError: rank {others}: another text"]
    reasons = ["the first line\nand the second, that says what to do" + LONG, *(_text(POWERS[-1], LETTERS[-1], at) for at in range(4))]
    told += [f"ValueError: rank {SEVERAL - 1} of {SEVERAL}: {reason}" for reason in reasons]
    told.append(f"ValueError: rank {SEVERAL - 2} of {SEVERAL}: the first (also on rank {SEVERAL - 1})")
    told.append(f"OSError {errno.ENOSPC}: rank {SEVERAL - 1} of {SEVERAL}: ")
    told += [f"WorkerFailed: rank {SEVERAL - 1} of {SEVERAL}: ", ""]
    again = np.concatenate([own[:1], -own[1:]])  # the first worker gives what it gave before, and the others do not
    groups: list[list[Array]] = [[own, precise, counted, again], [signs], [places], [pieces], [zero]]
    groups += [[alike], [alike, one, other], [half], [byte]]
    totals = [*(reduce(np.add, each) for each in groups[0]), own, -own]
    sent: list[list[str]] = [texts, [texts[0], *map(str, range(1, SEVERAL))]]
    sent += [each for power in POWERS for each in rng.permutation(_texts(power)).reshape(-1, SEVERAL).tolist()]
    for rank, (said, summed, got) in enumerate(trial.trainer.agree(groups, sent, reasons, SEVERAL_CHUNK)):
        begun = [text[: len(expected)] if expected else text for text, expected in zip(said, told, strict=False)]
        yield from same(f"what rank {rank} of several is told", told, begun)
        yield from same(f"sums on rank {rank} of several", totals, summed)
        yield from same(f"texts of all on rank {rank} of several", sent, got)
    yield value_at_most("taken while many sum a long vector, in vectors", trial.memory.taken_by_a_sum(MANY, LONG_VECTOR), SUMMED_IN)


def _texts(power: int) -> list[str]:
    """Texts of 2ᵖᵒʷᵉʳ bytes and a little more or less: of characters of each width, of which each place in turn is there, or the end of
    one, where those bytes end; empty ones besides."""
    size = 1 << power
    across = [_text(power, letter, at) for width, letter in enumerate(LETTERS, 1) for at in range(width)]
    exact = [letter * (size // width) + "x" * (size % width) for width, letter in enumerate(LETTERS, 1)]
    return [*across, *exact, "x" * (size - 1), ""]


def _text(power: int, letter: str, at: int) -> str:
    """A text in which so many bytes of a character stand before the end of the first 2ᵖᵒʷᵉʳ bytes, and the rest after it."""
    count, lead = divmod((1 << power) - at, len(letter.encode()))
    return "x" * lead + letter * (count + 1) + "."


def failures_are_told(trial: Trial) -> Iterator[Comparison]:
    """An error on one rank, of whatever kind, reaches both with its reason, at each place of a run where they agree that none failed; and
    each waits for the other as long as it was told to. One that fails after a step, where nobody agrees, ends by its own error, and the
    other one as it has lost a worker, both at once: before half of the seconds that they would wait for each other."""
    rng, raised = trial.rng("told"), list[Raised]()
    seconds = float(rng.integers(*PATIENCE))
    yield from same("seconds that workers wait for what is sent", [seconds] * WORKERS, trial.trainer.patience(seconds))
    problem = small_run(trial, samples=(BATCH_OF_ALL, 3), quantize_nf4=True)
    with tempfile.TemporaryDirectory() as parent:
        for (place, ranks), kind in zip(PLACES.items(), rng.permutation(OTHERS).tolist(), strict=False):
            if "read" in place:
                trial.trainer.fit(problem, Path(parent) / str(len(raised)), Plan(save_every=1, stop_after=2))
            raised.append(Raised(place, kind, f"reason {len(raised)}", int(rng.integers(ranks))))
        told = trial.trainer.told(problem, raised, Path(parent))
        own = Raised("after a step", str(rng.choice(OTHERS)), "of its own", int(rng.integers(WORKERS)))
        ends = trial.trainer.parted(problem, own, Path(parent) / "parted", PARTING)
    for rank, texts in enumerate(told):
        for each, text in zip(raised, [*texts, *[""] * len(raised)], strict=False):
            start = f"WorkerFailed: rank {each.rank} of {WORKERS}: "
            if not (text.startswith(start) and each.message in text):
                yield broken(f"{each}, told to rank {rank}", "another end", f"{start}{each.message}", text or "a whole run")
                return
        yield from same(f"errors told to rank {rank}", len(raised), len(texts))
    for rank, (text, soon) in enumerate(ends):
        start, reason = (f"{own.kind}: ", own.message) if rank == own.rank else (f"WorkerLost: rank {rank} of {WORKERS} lost", "")
        if not (text.startswith(start) and reason in text):  # a KeyError puts its message in quotes
            yield broken(f"{own}, end of rank {rank}", "another end", f"{start}{reason}", text or "a whole run")
        yield from same(f"whether rank {rank} ends long before it has waited for the other, after {own}", True, soon)


def _found_by_the_first(folders: Sequence[Path]) -> dict[str, str]:
    """Makes folders in which no run begins, or cannot write its state or adapter, and gives the message that is expected of each."""
    for folder in folders:
        folder.mkdir()
    there, used, no_state, no_adapter = folders
    (there / RUN).write_text("{}")
    (no_state / "state").symlink_to("nowhere")
    (no_adapter / "last").mkdir()
    (no_adapter / "last" / "notes.txt").write_text("mine")
    first = {name: f"rank 0 of 2: {_escaped(str(folder))}" for name, folder in (("there", there), ("used", used), ("adapter", no_adapter))}
    return {
        "a run that is there": f"FileExistsError: {first['there']} holds a run",
        "a run that another process writes": f"ValueError: {first['used']}: another process",
        "no place for a state": "FileExistsError: rank 0 of 2: [Errno 17]",
        "no place for an adapter": f"FileExistsError: {first['adapter']}/last",
    }


def _states_that_differ(trial: Trial, problem: Problem, folders: Sequence[Path]) -> dict[str, str]:
    """Makes two folders with the state of a run after two steps, and for the second worker a copy of each in which the state differs.

    A bit of a tensor differs in the first copy, a key of the progress in the second. The messages that are expected come back.
    """
    rng, (tensor, key) = trial.rng("states"), folders
    trial.trainer.fit(problem, tensor, Plan(save_every=1, stop_after=2))
    held, progress = read_state(tensor / STATE)
    name = str(rng.choice([name for name in held if name != "step"]))
    other = {name: held[name].copy()}
    other[name].reshape(-1).view(np.uint8)[-2] ^= 1
    changes = ({"epoch": 0, "position": 1}, {"stale_epochs": 1}, {"finished": True}, {"best_loss": 0.0}, {"loss_sum": 1.0})
    changed = sealed_state(held, progress | changes[int(rng.integers(len(changes)))])
    shutil.copytree(tensor, key)
    for folder, state in ((tensor, sealed_state(held | other, progress)), (key, changed)):
        alone = folder.with_name(f"{folder.name} of rank 1")
        shutil.copytree(folder, alone)
        (alone / STATE).write_bytes(state)
    return {"another tensor": f"WorkerFailed: {name} of rank 1 differ", "another progress": "ValueError: rank 1: another"}


def _escaped(text: str) -> str:
    """Bytes that are no UTF-8 as a terminal can show them."""
    return text.encode(errors="backslashreplace").decode()


def _failures(name: str, run: Run) -> list[Comparison]:
    return [broken(f"{name}, rank {rank}", "failed", "the end", each.ended) for rank, each in enumerate(run.ranks) if each.ended]


def _trained(run: Run) -> list[tuple[int, int]]:
    """Step and place of each sample that the workers trained on, sorted; a sample's first token is its place."""
    return sorted((read.step, read.sample[0][0]) for read in run.reads if read.trained)


def _epochs_are_complete(whole: Run, count: int) -> list[Comparison]:
    steps = -(-count // BATCH)
    epochs = [sorted(place for step, place in _trained(whole) if (step - 1) // steps == epoch) for epoch in range(EPOCHS)]
    return [each for epoch, places in enumerate(epochs) for each in same(f"samples of epoch {epoch + 1}", list(range(count)), places)]


def _same_samples(whole: Run, killed: Run, resumed: Run) -> list[Comparison]:
    """The steps of the killed run count up to the first step of the resumed one."""
    first, second = _trained(killed), _trained(resumed)
    last = max(step for step, _ in first)
    start = min((step for step, _ in second), default=last + 1)
    counted = [*(each for each in first if each[0] < start), *second]
    return [
        value_inside(f"first step after a kill in step {last}", start, last + 1 - SAVE_EVERY, last + 1),
        *same("step and place of the samples that count", _trained(whole), counted),
    ]


def _same_end(whole: Run, resumed: Run) -> list[Comparison]:
    pairs = enumerate(zip(whole.ranks, resumed.ranks, strict=True))
    return [each for rank, (expected, got) in pairs for each in same(f"rank {rank} at the end", expected.state, got.state)]


def _problem(trial: Trial) -> Problem:
    """Seven to nine samples in effective batches of three, of which each worker takes one or two, or none; the trainer's own start."""
    count = int(trial.rng("samples").integers(7, 10))
    features = FEATURES[trial.seed % len(FEATURES)]
    drawn = small_run(trial, samples=(count, 3), batch_size=1, accumulation_steps=BATCH, epochs=EPOCHS, **features)
    return Problem(drawn.architecture, None, drawn.settings, drawn.training, drawn.validation)


def _kill(trial: Trial, whole: Run) -> Kill:
    """A moment of any worker that has it, after the first quarter of the run, where there is something to resume; each kind in its turn."""
    rng = trial.rng("kill")
    moment = str(rng.choice(MOMENTS[trial.seed % len(MOMENTS)]))
    ranks = [rank for rank, each in enumerate(whole.ranks) if moment in each.events]
    rank = int(rng.choice(ranks))
    count = whole.ranks[rank].events.count(moment)
    return Kill(moment, int(rng.integers(-(-count // 4), count)) + 1, rank, interrupt=trial.seed % 3 == 0)
