"""Commands that are killed, that meet values which are not finite, and that are given bad input."""

import fcntl
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_inside
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.commands import Said
from blackswan.falsifiers.subjects.doors.training import Kill, Rank
from blackswan.falsifiers.system.adapter_files import CONFIG as MODEL_CONFIG
from blackswan.falsifiers.system.adapter_files import TOKENIZER, WEIGHTS
from blackswan.falsifiers.system.checkpoint_parts import LLAMA3
from blackswan.falsifiers.system.command_problem import (
    CONFIG,
    MAX_SEQ_LEN,
    METRICS,
    ODD,
    RUN,
    STATE,
    STATISTICS,
    Small,
    metrics,
    number_of,
    options,
    small,
    texts_of,
    timed_metrics,
    tokenizer,
)
from blackswan.falsifiers.system.continued import KILLED
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial, reads_files


@reads_files
def killed_command_goes_on(trial: Trial, *, kills: int) -> list[Comparison]:
    """A command that is killed at its writes, a line of its metrics torn, and given again with --resume leaves what a whole run does.

    Before, it is interrupted, also in an epoch's last step. Two kills come before a state is written, so that steps are made again, and an
    epoch ends again; and the state is written after every so many steps.
    """
    rng = trial.rng("kills")
    every = int(rng.integers(3, 5))
    settings = {"multi_label": False, "batch_size": 1, "accumulation_steps": 2, "learning_rate": 0.02, "backend": "torch", "epochs": 3}
    settings["class_weights"] = [0.5, 2.0, 1.25, 1 / 3]
    with small(trial, "killed", settings) as problem:
        texts = texts_of(rng, 11)
        corpus = problem.corpus("corpus", texts, problem.labels(rng, 11))
        where = [f"--model={problem.base}", f"--corpus={corpus}", f"--save-every={every}", *options(problem.settings)]
        whole, folder = problem.folder / "whole", problem.folder / "killed"
        rank = trial.commands.killed(whole, None, "train", f"--output={whole}", *where)
        if rank.ended:
            return [broken("the whole run", "failed", "its end", rank.ended)]
        ours = [name for name in rank.events if "/.ledger.json." not in name]  # which is the host's, on a GPU
        if outside := [name for name in ours if name.startswith("flush ../")]:
            return [broken("the whole run", "files written outside of its folder", "none", ", ".join(outside[:3]))]
        found = same("steps between two states", *_between_states(whole, rank, every))
        found += same("names that were given to what is not on the disk", [], _not_flushed(rank.events))
        steps = [line["kind"] for line in metrics(whole)].index("epoch")
        interrupted = iter((2, steps))
        planned = _kills(rng, rank.events, steps, every, kills)
        for kill in (*planned, None):
            resume = ["--resume"] if (folder / RUN).is_file() else []
            rank = trial.commands.killed(folder, kill, "train", f"--output={folder}", *resume, *where)
            if kill and kill.interrupt:
                found += _interrupted(trial, folder, next(interrupted), rank.ended)
                found += _foreign_line(trial, folder, where) if kill is planned[0] else ()
                continue
            if rank.ended != (KILLED if kill else ""):
                if rank.ended or kill is None:
                    return [*found, broken("a continued run", "did not go on", "its end", rank.ended)]
                break
            if kill is not planned[3]:  # the epoch's line stays whole, though steps before it are made again
                _tear(trial, rng, folder)
        found += same("numbers of the lines of the metrics", *(list(map(number_of, metrics(each))) for each in (whole, folder)))
        found += same("metrics", metrics(whole), metrics(folder))
        found += _seconds_add_up(folder)
        for file in (CONFIG, STATISTICS, RUN):
            found += same(file, (whole / file).read_text(), (folder / file).read_text())
        found += same("state and adapters", *(trial.trainer.kept(each) for each in (whole, folder)))
        found += _started_again(trial, whole, folder, where)
        left = [sorted(path.name for path in each.iterdir()) for each in (whole, folder)]
    return [*found, *same("files of the run", *left)]


def _not_flushed(events: Sequence[str]) -> list[str]:
    """What gets its name before its content is on the disk, or whose name is not on the disk next: a power failure would leave neither."""
    odd = []
    for at, event in enumerate(events):
        if event.startswith("os.rename "):
            name = event.removeprefix("os.rename ")
            written = {each.removeprefix("open ") for each in events[:at] if each == f"open {name}" or each.startswith(f"open {name}/")}
            last = {each: max(place for place in range(at) if events[place] == f"open {each}") for each in written}
            odd += [each for each, opened in last.items() if f"flush {each}" not in events[opened:at]]
            odd += [name] if events[at + 1 : at + 2] != [f"flush {Path(name).parent}"] else []
    return odd


def _foreign_line(trial: Trial, folder: Path, where: Sequence[str]) -> Iterator[Comparison]:
    """A run does not go on where its metrics hold a line of something else, which stays; the message names file and line."""
    copy, lines = folder.with_name("foreign"), ["epoch 1", '{"loss": 1.0}', "[1]", '{"kind": "step", "epoch": 1}', '"step"']
    line = str(trial.rng("foreign").choice(lines))
    shutil.copytree(folder, copy)
    lines = (copy / METRICS).read_text().splitlines(keepends=True)
    (copy / METRICS).write_text(f"{lines[0]}{line}\n{''.join(lines[1:])}")
    before = (copy / METRICS).read_bytes()
    said = trial.commands.attempt("train", f"--output={copy}", "--resume", *where)
    yield from same("status of a run that goes on after a foreign line", 1, said.status)
    if f"{METRICS}:2" not in said.err:
        yield broken("message about a foreign line", "does not name it", f"{METRICS}:2", said.err[-300:])
    yield from same("metrics with a foreign line", before, (copy / METRICS).read_bytes())


def _started_again(trial: Trial, whole: Path, folder: Path, where: Sequence[str]) -> Iterator[Comparison]:
    """torchrun gives the same command again after a worker's death: it begins a run that had not begun, and goes on with one that had; of
    one that has come to its end it says the end again and changes nothing, as --resume does."""
    fresh, again = folder.with_name("fresh"), {"TORCHELASTIC_RESTART_COUNT": "1"}
    fresh.mkdir()
    for name in (CONFIG, STATISTICS, f".partial-{RUN}.abcdefgh", ".lock"):  # as a start leaves them that was killed at once
        (fresh / name).write_text("?")
    trial.commands.attempt("train", f"--output={fresh}", *where, environment=again)
    yield from same("names in its folder", *(sorted(path.name for path in each.iterdir()) for each in (whole, fresh)))
    yield from same("state and adapters of a run that was started again", *(trial.trainer.kept(each) for each in (whole, fresh)))
    before, said = content(folder), []
    for more, environment in (["--resume"], {}), ([], again):
        said.append(trial.commands.attempt("train", f"--output={folder}", *more, *where, environment=environment))
        changed = sorted(file for file, _ in content(folder).items() ^ before.items())
        yield from same(f"status of a run that is over, and what changes {more}", (0, []), (said[-1].status, changed))
    yield from same("what a run that is over says", said[0].out, said[1].out)


def _interrupted(trial: Trial, folder: Path, step: int, ended: str) -> Iterator[Comparison]:
    """After Ctrl-C in a step: status 2, and a message that names this step, whose line and whose state are written."""
    last = max(line["step"] for line in metrics(folder) if line["kind"] == "step")
    message = f"impl train: interrupted after step {last}; the same command with --resume goes on"
    if not (ended.startswith("status 2: ") and message in ended):
        yield broken("end after an interruption", "another one", f"status 2: {message}", ended[-300:] or "the end of the run")
    yield from same("last step of an interrupted run", step, last)
    yield from same("step of the state after an interruption", last, trial.trainer.kept(folder).progress["step"])


def _seconds_add_up(folder: Path) -> Iterator[Comparison]:
    """Those of an epoch contain its steps', whichever process made them."""
    lines = timed_metrics(folder)
    for epoch in (line for line in lines if line["kind"] == "epoch"):
        steps = [line["seconds"] for line in lines if line["kind"] == "step" and line["epoch"] == epoch["epoch"]]
        least = math.fsum(steps) * (1 - 1e-12)  # they are added one after the other
        yield value_inside(f"seconds of epoch {epoch['epoch']} and of its steps", epoch["seconds"], least, math.inf)


def _between_states(whole: Path, rank: Rank, every: int) -> tuple[list[int], list[int]]:
    """How many steps were made before each state, as they should be and as they were: a line of the metrics is a step's or an epoch's."""
    kinds = [line["kind"] for line in metrics(whole)]
    made, found, expected = 0, [], []
    for event in rank.events:
        if event == f"open {METRICS}":
            made += 1
        elif event.startswith("os.rename state/"):
            found.append(made)
    done, position = [0], 0
    for place, kind in enumerate(kinds, start=1):
        position += kind == "step"
        if kind == "epoch" or position % every == 0:
            done.append(place)
    expected = done
    return expected, found


def _kills(rng: Generator, events: Sequence[str], steps: int, every: int, count: int) -> list[Kill]:
    """Ctrl-C in the second step and in the last one of an epoch; kills between the epoch's line and its state, between those of the second
    epoch, whose last steps are then made again, and between two states; and kills at random events after the beginning, by their names."""
    line = f"open {METRICS}"
    saved = events.index("flush .partial-last")  # the epoch's adapter; its line and the state come next
    state = next(event for event in events[saved:] if event.startswith("os.rename state/"))
    again = sum(step % every == 0 for step in range(steps + 1, 2 * steps))  # states inside the second epoch
    first = [
        Kill(line, 2, interrupt=True),
        Kill(line, steps - 2, interrupt=True),
        Kill(state, 1),
        Kill(state, again + 2),
        Kill(line, every),
    ]
    names = sorted(
        {name for name in events if not name.startswith(("os.mkdir", f"open {CONFIG}", f"open {STATISTICS}")) and RUN not in name}
    )
    return [*first, *(Kill(str(name), 1) for name in rng.permutation(names)[: count - 2])]


def _tear(trial: Trial, rng: Generator, folder: Path) -> None:
    """Cuts a part of the last line off, in half of the cases, as a kill in the middle of its writing does: before its state is written."""
    if not (folder / STATE).is_file() or not (folder / METRICS).is_file():
        return
    content, made = (folder / METRICS).read_bytes(), trial.trainer.kept(folder).progress
    if not content.endswith(b"\n"):
        return
    last, start = metrics(folder)[-1], content.rstrip(b"\n").rfind(b"\n") + 1
    counted = last["step"] <= made["step"] if last["kind"] == "step" else last["epoch"] <= made["epoch"]
    if not counted and rng.integers(2):
        (folder / METRICS).write_bytes(content[: int(rng.integers(start + 1, len(content)))])


@reads_files
def non_finite_values_are_errors(trial: Trial) -> list[Comparison]:
    """A text on which the model computes NaN, in the first, a middle or the last batch, ends every command with an error that says so.

    Nothing that is not finite is printed or written, and the library raises an error too. Of two workers the message names those that
    computed it, and the call that it came from, as that of one worker does.
    """
    found: list[Comparison] = []
    fixed = {"multi_label": False, "lora_targets": "q_v", "quantize_nf4": False, "pooling": "mean", "epochs": 1}
    with small(trial, "non-finite", fixed, "llama") as problem:
        word = _poison(problem)
        rng = trial.rng("non-finite")
        clean = [f"rm {index}" for index in range(7)]
        labels = problem.labels(rng, 7)
        where = [f"--model={problem.base}", *options(problem.settings)]
        corpus, run = problem.corpus("clean", clean, labels), problem.folder / "run"
        trial.commands.run(
            "train", f"--corpus={corpus}", f"--validation={problem.corpus('other', clean, labels)}", f"--output={run}", *where
        )
        for place, at in (("first", 0), ("middle", 4), ("last", 6)):
            texts = [*clean[:at], word, *clean[at + 1 :]]
            bad = problem.corpus(place, texts, labels)
            out = f"--output={problem.folder / place}"
            asked = {
                "predict --corpus": ("predict", f"--adapter={run}", f"--corpus={bad}"),
                "predict TEXT": ("predict", f"--adapter={run}", *texts),
                "evaluate": ("evaluate", f"--adapter={run}", f"--corpus={bad}"),
                "evaluate --json": ("evaluate", f"--adapter={run}", f"--corpus={bad}", "--json"),
                "train, training": ("train", f"--corpus={bad}", f"--validation={corpus}", f"{out} 1", *where),
                "train, validation": ("train", f"--corpus={corpus}", f"--validation={bad}", f"{out} 2", *where),
            }
            for name, arguments in asked.items():
                found += _failed(name, place, trial.commands.attempt(*arguments))
            for path in problem.folder.glob(f"{place} */{METRICS}"):
                found += same(
                    f"numbers in {METRICS} that are not there <{place} batch>",
                    False,
                    bool(re.search("NaN|Infinity|null", path.read_text())),
                )
            for call in ("predict", "probabilities"):
                ask = partial(trial.commands.library, call, run / "last", texts)
                found.append(
                    trial.refuses(f"{call} of the library <{place} batch>", ask, "nan|not finite|non-finite", "FloatingPointError")
                )
            spoilt = problem.corpus("of every worker", [word] * 7, labels) if place == "middle" else bad
            arguments = ("train", f"--corpus={corpus}", f"--validation={spoilt}", f"{out} 3", *where)
            by_two = partial(trial.commands.by_workers, 2, problem.folder, [], [], *arguments)
            message = rf"status 1: [\s\S]*validation after epoch 1: {BY_TWO[place]}; origin: model\."
            found.append(trial.refuses(f"validation by two workers <{place} batch>", by_two, message, "RuntimeError"))
    return found


BY_TWO = {
    "first": r"rank 0 of 2: [^()]*",
    "middle": r"rank 0 of 2: [^()]* \(also on rank 1\)",
    "last": r"rank 1 of 2: [^()]*",
}
"""Whom the message names where a text of the first worker, of both or of the second one is computed as NaN."""


def _failed(name: str, place: str, said: Said) -> Iterator[Comparison]:
    yield from same(f"exit status of {name} <{place} batch>", 1, said.status)
    yield from same(f"numbers that {name} prints <{place} batch>", [], re.findall(r"(?i)\bnan\b|\binf\w*", said.out))
    if not re.search("(?i)nan|not finite|non-finite", said.err):
        yield broken(f"message of {name} <{place} batch>", "does not say why", "a value that is not finite", said.err[-300:])


def _poison(problem: Small) -> str:
    """Makes the scores of attention infinite where a token is, and nowhere else; gives a text that has it.

    It alone has a first component, which the weights of queries and keys multiply by 10²⁰.
    """
    clean = {token for index in range(7) for token in tokenizer().encode(f"rm {index}").ids}
    word = next(text for text in ODD if text and not clean & set(tokenizer().encode(text).ids))
    tensors = load_file(problem.base / WEIGHTS)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0] = 0.0
        elif name.endswith(("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")):
            value[0, 0] = 1e20
        elif name.endswith("layers.0.input_layernorm.weight"):
            value[0] = 1.0
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0.0
    embedding[tokenizer().encode(word).ids[0], 0] = 50.0
    save_file(tensors, problem.base / WEIGHTS)
    return word


UNUSABLE = {
    "bad.jsonl": b'{"input": "ls", "label": 1}\n{"input": "rm", "label": 2}\n',
    "latin": b"ls\n\xff\n",
    "half.jsonl": b'{"input": "ls"}\n{"input": "\\ud800"}\n',
    "untitled.jsonl": b'{"input": "ls"}\n{"title": "rm"}\n',
    "text.jsonl": b'{"input": "ls"}\n{"text": "rm"}\n',
    "twice.jsonl": b'{"input": "ls"}\n{"input": "rm", "input": "id"}\n',
    "torn.jsonl": b'{"input": "ls"}\n{"input": "rm\n',
    "empty.jsonl": b"",
    "marked.jsonl": b'\xef\xbb\xbf{"input": "ls", "label": 1}\n',
    "beside.tokenizer.json": b"{}",
}
"""Files that no command can use, the second line of those with several."""


@reads_files
def bad_input_is_refused(trial: Trial) -> list[Comparison]:
    """Each command refuses what it cannot use with status 4, names it on standard error, prints nothing else and changes no file.

    So it does where its output is there already, or another process writes it.
    """
    rng = trial.rng("bad input")
    found: list[Comparison] = []
    with small(
        trial, "bad input", {"multi_label": False, "epochs": 1, "num_classes": 2, "class_weights": None, "batch_size": 1}
    ) as problem:
        texts, labels = [*(f"ls {letter}" for letter in "abcd"), *texts_of(rng, 5)], [1, 1, 1, 1, *problem.labels(rng, 5)]
        corpus, run = problem.corpus("corpus", texts, labels), problem.folder / "run"
        where = [f"--model={problem.base}", f"--corpus={corpus}", *options(problem.settings)]
        trial.commands.run("train", *where, f"--output={run}")
        others = {f"of another text {place}": [*texts[:4], *each] for place, each in _with_another_text(texts[4:])}
        parts = trial.corpora.split(labels, 2, problem.settings["validation_fraction"], problem.settings["seed"])
        one, other = [place for place in parts.training if place < 4][:2]  # of one class and of one length
        exchanged = {one: texts[other], other: texts[one]}
        others["of two texts exchanged"] = [exchanged.get(place, text) for place, text in enumerate(texts)]
        corpora = {name: problem.corpus(name, each, labels) for name, each in others.items()}
        for name, written in UNUSABLE.items():
            (problem.folder / name).write_bytes(written)
        trial.commands.run("merge", f"--adapter={run}", f"--output={problem.folder / 'merged'}")
        (problem.folder / "link.jsonl").symlink_to(corpus)
        for name in ("nothing", "nothing.apr", "alone.tokenizer.json"):
            (problem.folder / name).symlink_to("nowhere")
        (problem.folder / "nowhere").symlink_to(problem.folder / "gone")
        shutil.copytree(run / "last", problem.folder / "others" / str(rng.choice(["last", "best", "state", METRICS])))
        _spoil_models(problem)
        trial.commands.run("tokenize", corpus, f"--model={problem.base}", f"--output={problem.folder / 'tokens'}", "--end-token=1")
        resumed = ("train", *where, f"--output={run}", "--resume")
        edited = {f"train, resumed as another run {name}": ((*resumed, f"--corpus={path}"), "data.") for name, path in corpora.items()}
        for name, (arguments, message) in {**_unusable(problem, where, corpus, run), **edited}.items():
            before = content(problem.folder)
            said = trial.commands.attempt(*arguments, stdin=UNUSABLE["latin"])
            found += same(f"status of {name}", 4, said.status)
            if "another run" not in name:  # what a run is about is told before it is compared with the one that is there
                found += same(f"what {name} prints", "", said.out)
            if message not in said.err:
                found.append(broken(f"message of {name}", "names something else", message, said.err[-300:]))
            changed = sorted(file for file, _ in content(problem.folder).items() ^ before.items())
            found += same(f"files that {name} changes", [], changed)
        for place in ("largest.apr", "largest float16"):
            trial.commands.run("export", f"--model={problem.folder / 'largest'}", f"--output={problem.folder / place}", "--dtype=float16")
        tokens = (
            "pretrain",
            where[0],
            f"--tokens={problem.folder / 'tokens'}",
            f"--output={problem.folder / 'pretrained'}",
            "--warmup-fraction=0",
        )
        (problem.folder / "pretrained").mkdir()
        for folder, asked in {run: ("train", *where, f"--output={run}", "--resume"), problem.folder / "pretrained": tokens}.items():
            with (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                said = trial.commands.attempt(*asked)
            found += same(f"status of {asked[0]} where another process writes", 4, said.status)
            if "another process" not in said.err:
                found.append(broken(f"message of {asked[0]} where another process writes", "does not say so", "another process", said.err))
        found += [*_devices(trial, problem, where, run), *_on_the_host(trial, problem, f"--adapter={run}")]
        found += _environments(trial, ("train", *where, f"--corpus={problem.folder / 'none.jsonl'}", f"--output={problem.folder / 'new'}"))
    return found


WORKER = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}
"""At no port, so that nobody waits there."""


def _environments(trial: Trial, command: tuple[object, ...]) -> Iterator[Comparison]:
    """A worker whose environment is not what torchrun gives trains neither with others nor alone; the only one of a group reads on."""
    given = {f"no {name}": ({key: value for key, value in WORKER.items() if key != name}, name) for name in WORKER}
    changes = [(name, value) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") for value in ("", "-1", "1.5", "one", "²")]
    for name, value in (*changes, ("RANK", "2"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "0")):
        given[f"{name}={value}"] = {**WORKER, name: value}, name
    given["WORLD_SIZE=1"] = {**WORKER, "WORLD_SIZE": "1"}, "none.jsonl"
    for name, (environment, message) in given.items():
        said = trial.commands.attempt(*command, environment=environment)
        yield from same(f"status and output of a worker with {name}", (4, ""), (said.status, said.out))
        if message not in said.err:
            yield broken(f"message of a worker with {name}", "names something else", message, said.err[-300:])


def _devices(trial: Trial, problem: Small, where: Sequence[str], run: Path) -> Iterator[Comparison]:
    """Every command that computes ends with status 6 where its device is not there, and writes nothing."""
    absent = "xpu" if sys.platform == "darwin" else "mps"
    given, new = f"--adapter={run}", f"--output={problem.folder / 'new'}"
    commands: dict[str, tuple[str, ...]] = {"train": (*where, new), "evaluate": (given, where[1]), "predict": (given, where[1])}
    commands |= {"merge": (given, new), "summary": (given,), "pretrain": (where[0], f"--tokens={problem.folder / 'tokens'}", new)}
    before = content(problem.folder)
    for name, asked in commands.items():
        said = trial.commands.attempt(name, *asked, f"--device={absent}")
        yield from same(f"status and output of {name} on {absent}", (6, ""), (said.status, said.out))
        if absent not in said.err:
            yield broken(f"message of {name} on {absent}", "names something else", absent, said.err[-300:])
    yield from same(
        f"files that commands change on {absent}", [], sorted(file for file, _ in content(problem.folder).items() ^ before.items())
    )


def _on_the_host(trial: Trial, problem: Small, given: str) -> Iterator[Comparison]:
    """Where there is no GPU, `auto` is the CPU, which is said; more memory than an address has is not there, which is said too."""
    import torch

    if torch.cuda.is_available():
        return
    said = trial.commands.attempt("summary", given, "--device=auto")
    yield from same("status and lines of summary on auto", (0, 1), (said.status, len(said.err.splitlines())))
    if "impl summary: warning: " not in said.err:
        yield broken("message of summary on auto", "does not warn", "impl summary: warning: …", said.err[-300:])
    said = trial.commands.attempt("summary", f"--model={problem.base}", f"--lora-rank={2**45}")
    yield from same("status and output of summary without memory", (1, ""), (said.status, said.out))
    if "memory is not enough" not in said.err:
        yield broken("message of summary without memory", "does not say so", "memory is not enough", said.err[-300:])


def _with_another_text(texts: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The texts with one of them another one of as many tokens, each in turn that has such a neighbour; its place, from 1."""
    for place, text in enumerate(texts):
        ids = tokenizer().encode(text).ids
        for last in "abcdefghijklmnopqrstuvwxyz":
            other = tokenizer().encode(text[:-1] + last).ids
            if len(other) == len(ids) and other[:MAX_SEQ_LEN] != ids[:MAX_SEQ_LEN]:
                yield place + 1, [*texts[:place], text[:-1] + last, *texts[place + 1 :]]
                break


def _spoil_models(problem: Small) -> None:
    """Models in folders of their own: with a token that has no embedding, with frequencies scaled as Llama 3's, with a weight that float16
    does not hold or just holds, without a tokenizer or with a part of it.
    """
    for name in ("scaled", "too large", "largest", "no tokenizer", "torn tokenizer"):
        shutil.copytree(problem.base, problem.folder / name)
    config = problem.folder / "scaled" / MODEL_CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_parameters": LLAMA3, "eos_token_id": [1, 3]}))
    shutil.copytree(problem.base, problem.folder / "fewer tokens")
    config = problem.folder / "fewer tokens" / MODEL_CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 2}))
    shutil.copytree(problem.base, problem.folder / "more tokens")
    tokens = json.loads((problem.base / TOKENIZER).read_text())
    one = {"id": tokenizer().get_vocab_size(), "content": "<more>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens["added_tokens"].append(one | flags)
    (problem.folder / "more tokens" / TOKENIZER).write_text(json.dumps(tokens))
    for name, number in (("too large", 65520.0), ("largest", 65504.0)):
        tensors = load_file(problem.folder / name / WEIGHTS)
        tensors["model.embed_tokens.weight"].reshape(-1)[-1] = number
        save_file(tensors, problem.folder / name / WEIGHTS)
    (problem.folder / "no tokenizer" / TOKENIZER).unlink()
    torn = problem.folder / "torn tokenizer" / TOKENIZER
    torn.write_bytes(torn.read_bytes()[:-9])


def _unusable(problem: Small, where: Sequence[str], corpus: Path, run: Path) -> dict[str, tuple[tuple[object, ...], str]]:
    """Commands, and a word of each refusal."""
    folder, adapter, new = problem.folder, f"--adapter={run}", f"--output={problem.folder / 'new'}"
    train = ("train", *where, new)
    positions = json.loads((problem.base / MODEL_CONFIG).read_text())["max_position_embeddings"]
    return {
        "train into a run": (("train", *where, f"--output={run}"), "holds a run already"),
        "train into a folder in use": (("train", *where, f"--output={problem.base}"), "not empty"),
        "train over another's adapter": (("train", *where, f"--output={folder / 'others'}"), "not empty"),
        "train on a label that no class has": ((*train, f"--corpus={folder / 'bad.jsonl'}"), "bad.jsonl:2: label is 2"),
        "train on a label beyond the setting": ((*train, f"--corpus={folder / 'bad.jsonl'}"), "--num-classes 2, --no-multi-label"),
        "train on a file with a mark": ((*train, f"--corpus={folder / 'marked.jsonl'}"), "marked.jsonl:1"),
        "train on no corpus": ((*train, f"--corpus={folder / 'none.jsonl'}"), "none.jsonl"),
        "train with an unknown setting": ((*train, "--lora-rnk=2"), "--lora-rank"),
        "train with a word too many": ((*train, "surplus"), "surplus"),
        "train with the beginning of an option": ((*train, "--lora-ran=2"), "--lora-rank"),
        "train with a setting out of range": ((*train, "--weight-decay=2"), "--weight-decay"),
        "train on what validates": ((*train, f"--validation={corpus}"), "--validation"),
        "train on what validates, by a link": ((*train, f"--validation={folder / 'link.jsonl'}"), "--validation"),
        "train on what validates, by a detour": ((*train, f"--validation={folder / 'base' / '..' / corpus.name}"), "--validation"),
        "train at a rate of 0": ((*train, "--epochs=1", "--batch-size=4", "--warmup-fraction=0.5"), "warmup"),
        "train on longer texts than the model's": ((*train, f"--max-seq-len={positions + 1}"), f"at most {positions} positions"),
        "train on a token without an embedding": ((*train, f"--model={folder / 'more tokens'}"), "fewer than there are tokens"),
        "train, resumed without a run": ((*train, "--resume"), "holds no run"),
        "train, resumed as another run": (("train", *where, f"--output={run}", "--resume", "--lora-rank=7"), "settings.lora_rank"),
        "train on a class without a text": ((*train, "--num-classes=3", "--class-weights=balanced"), "class 2"),
        "evaluate on a label that no class has": (("evaluate", adapter, f"--corpus={folder / 'bad.jsonl'}"), "bad.jsonl:2: label is 2"),
        "evaluate without a model": (("evaluate", f"--corpus={corpus}"), "--adapter"),
        "evaluate a checkpoint": (("evaluate", f"--model={problem.base}", f"--corpus={corpus}"), "without a head"),
        "predict nothing": (("predict", adapter), "exactly one of"),
        "predict two things": (("predict", adapter, f"--corpus={corpus}", "ls"), "exactly one of"),
        "predict a line that is not UTF-8": (("predict", adapter, f"--input={folder / 'latin'}"), "latin:2"),
        "merge into a link to nothing": (("merge", adapter, f"--output={folder / 'nowhere'}"), "exists"),
        "merge into a folder that is there": (("merge", adapter, f"--output={problem.base}"), "exists"),
        "export into a folder that is there": (("export", f"--model={problem.base}", f"--output={run}"), "exists"),
        "export beside another's tokenizer": (("export", f"--model={problem.base}", f"--output={folder / 'beside.apr'}"), "exists"),
        **{
            f"{name} into a link to nothing": ((*arguments, f"--output={folder / 'nothing'}{suffix}"), message)
            for name, arguments, suffix, message in (
                ("train", ("train", *where), "", "is a link"),
                ("merge", ("merge", adapter), "", "nothing exists"),
                ("export", ("export", f"--model={problem.base}"), "", "nothing exists"),
                ("export as a file", ("export", f"--model={problem.base}"), ".apr", "nothing.apr exists"),
                ("tokenize", ("tokenize", folder / "bad.jsonl", f"--model={problem.base}", "--end-token=1"), "", "nothing exists"),
                ("pretrain", ("pretrain", f"--model={problem.base}", f"--tokens={folder / 'tokens'}"), "", "is a link"),
            )
        },
        "export beside a link to nothing": (("export", f"--model={problem.base}", f"--output={folder / 'alone.apr'}"), "exists"),
        "export a folder in fewer bits": (("export", f"--model={problem.base}", new, "--dtype=q8"), "--dtype"),
        "predict a text that is not UTF-8": (("predict", adapter, "\udce9"), "UTF-8"),
        "predict standard input that is not UTF-8": (("predict", adapter, "--input=-"), "standard input:2"),
        **{
            f"predict from {option} {file}": (("predict", adapter, f"--{option}={folder / file}"), f"{file}{line}")
            for option, line, files in (
                ("corpus", ":2", ("half.jsonl", "untitled.jsonl", "text.jsonl", "twice.jsonl", "torn.jsonl")),
                ("corpus", ":1", ("marked.jsonl",)),
                ("corpus", "", ("none.jsonl", "base")),
                ("input", "", ("none.txt", "base")),
            )
            for file in files
        },
        "predict from no folder": (("predict", f"--adapter={folder / 'none'}", "ls"), "none: no such folder"),
        "train with states after no step": ((*train, "--save-every=0"), "--save-every"),
        "train, patient without validation": ((*train, "--validation-fraction=0", "--early-stop-patience=1"), "early_stop_patience"),
        "train into a file": (("train", *where, f"--output={corpus}"), "is no folder"),
        "summary of nothing": (("summary",), "--adapter"),
        "summary of the memory of an adapter on nothing": (("summary", "--memory", f"--adapter={folder / 'none'}"), "none"),
        **{
            f"tokenize {what}": (("tokenize", folder / file, f"--model={problem.base}", new, *given), message)
            for what, file, given, message in (
                ("without an end", "bad.jsonl", (), "eos_token_id"),
                ("with an end of no token", "bad.jsonl", (f"--end-token={tokenizer().get_vocab_size()}",), "the vocabulary has"),
                ("with an end below all tokens", "bad.jsonl", ("--end-token=-1",), "token 1 is -1"),
                ("with several ends", "bad.jsonl", (f"--model={folder / 'scaled'}",), "eos_token_id is [1, 3]"),
                ("into a folder that is there", "bad.jsonl", ("--end-token=1", f"--output={run}"), "exists"),
                ("text that is not UTF-8", "latin", ("--end-token=1",), "latin"),
                ("half a character", "half.jsonl", ("--end-token=1",), "half.jsonl:2"),
                ("a file with a mark", "marked.jsonl", ("--end-token=1",), "marked.jsonl:1"),
                ("a line without a text", "untitled.jsonl", ("--end-token=1",), "untitled.jsonl:2"),
                ("a line that is torn", "torn.jsonl", ("--end-token=1",), "torn.jsonl:2"),
                ("a line with two texts", "twice.jsonl", ("--end-token=1",), "twice.jsonl:2"),
                ("nothing", "empty.jsonl", ("--end-token=1",), "empty"),
                ("into shards of nothing", "bad.jsonl", ("--end-token=1", "--shard-tokens=0"), "shard_tokens"),
            )
        },
        "evaluate an adapter as a model": (("evaluate", f"--model={run / 'last'}", f"--corpus={corpus}"), "is an adapter"),
        "predict from a file of a base": (("predict", f"--adapter={folder / 'model.apr'}", "ls"), "without a head"),
        "predict from a merged model on a base": (("predict", f"--adapter={folder / 'merged'}", where[0], "ls"), "leave the base"),
        "export a merged model": (("export", f"--model={folder / 'merged'}", new), "merged"),
        "summary of the memory of a merged model": (("summary", "--memory", f"--adapter={folder / 'merged'}"), "--memory"),
        **{
            f"export {what} as {place}": (("export", f"--model={folder / what}", f"--output={folder / place}", "--dtype=float16"), message)
            for what, message, places in (
                ("scaled", "rope_scaling", ("new.apr",)),
                ("too large", "embed_tokens", ("new.apr", "new")),
                ("no tokenizer", "tokenizer.json", ("new.apr", "new")),
            )
            for place in places
        },
        **{
            f"tokenize by {what}": (("tokenize", folder / "bad.jsonl", f"--model={folder / what}", new, "--end-token=1"), "tokenizer.json")
            for what in ("no tokenizer", "torn tokenizer")
        },
        "summary of other settings": (("summary", adapter, "--lora-rank=2"), "--lora-rank"),
        "pretrain without tokens": (("pretrain", f"--model={problem.base}", f"--tokens={folder / 'none'}", new), "none"),
        **{
            f"pretrain {what}": (("pretrain", f"--model={model}", f"--tokens={folder / 'tokens'}", new, *given), message)
            for what, model, given, message in (
                ("on a token beyond the model's", folder / "fewer tokens", (), "the vocabulary has"),
                ("a model without a tokenizer", folder / "no tokenizer", (), "tokenizer.json"),
                ("into a file", problem.base, (f"--output={corpus}",), "is no folder"),
                ("and validate on nothing", problem.base, (f"--validation={folder / 'none'}",), "none"),
                ("at a rate of 0, as its only run", problem.base, ("--batch=1000", "--epochs=1", "--warmup-fraction=1"), "rate of 0"),
                ("on, where there is no run", problem.base, ("--resume", "--warmup-fraction=0"), "no run to continue"),
            )
        },
    }
