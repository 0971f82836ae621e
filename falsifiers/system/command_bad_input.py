"""Input that no command can use: each is refused by its name with one exit status, and no file changes."""

import fcntl
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.system.adapter_files import CONFIG as MODEL_CONFIG
from blackswan.falsifiers.system.command_problem import (
    MAX_SEQ_LEN,
    Small,
    options,
    small,
    texts_of,
    tokenizer,
)
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.spoilt_models import NO_CONFIG, spoil_models
from blackswan.falsifiers.system.token_streams import write_shards
from blackswan.falsifiers.system.trial import Trial, reads_files

UNUSABLE = {
    "bad.jsonl": b'{"input": "ls", "label": 1}\n{"input": "rm", "label": 2}\n',
    "latin": b"ls\nrm \xff\n",
    "half.jsonl": b'{"input": "ls"}\n{"input": "rm \\uD800"}\n',
    "untitled.jsonl": b'{"input": "ls"}\n{"title": "rm"}\n',
    "null.jsonl": b'{"input": "ls"}\n{"text": null, "input": "rm"}\n',
    "text.jsonl": b'{"input": "ls"}\n{"text": "rm"}\n',
    "twice.jsonl": b'{"input": "ls"}\n{"input": "rm", "input": "id"}\n',
    "torn.jsonl": b'{"input": "ls"}\n{"input": "rm\n',
    "joined.jsonl": b'{"input": "ls"}\n{"input": "rm"}{"input": "id"}\n',
    "apart.jsonl": b'{"input": "ls"}\n{"input": "rm"} {"input": "id"}\n',
    "empty.jsonl": b"",
    "blank.jsonl": b'{"input": "ls"}\n\n{"input": "rm"}\n',
    "every.jsonl": b"".join(b'{"input": "ls", "label": %d}\n' % label for label in range(3)),
    "marked.jsonl": b'\xef\xbb\xbf{"input": "ls", "label": 1}\n',
    "[beside].tokenizer.json": b"{}",
    "[other].chat_template.jinja": b"",
}
"""Files that no command can use here; the second line is wrong where there are several, but for every.jsonl, which is right alone."""
HALF = "half.jsonl:2: character 4 is \\ud800"
"""Where half a character is, counted from 1."""
LEFT = "left "
OF_A_START = {"config.yaml", "statistics.yaml", ".lock", "run.json"}
"""What a start that was killed at once may leave, and what says that a run is there."""


@reads_files
def bad_input_is_refused(trial: Trial) -> Iterator[Comparison]:
    """Each command refuses what it cannot use with status 4, names it on standard error, prints nothing else and changes no file.

    So it does where its output is there already, or another process writes it.
    """
    rng = trial.rng("bad input")
    with small(
        trial, "bad input", {"multi_label": False, "epochs": 1, "num_classes": 2, "class_weights": None, "batch_size": 1}
    ) as problem:
        texts, labels = [*(f"ls {letter}" for letter in "abcd"), *texts_of(rng, 5)], [1, 1, 1, 1, *problem.labels(rng, 5)]
        corpus, run = problem.corpus("corpus", texts, labels), problem.folder / "run"
        (problem.base / "chat_template.jinja").write_text("of chats")
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
        (problem.folder / "same.jsonl").hardlink_to(corpus)
        for name in ("nothing", "nothing.apr", "alone.tokenizer.json"):
            (problem.folder / name).symlink_to("nowhere")
        (problem.folder / "nowhere").symlink_to(problem.folder / "gone")
        _leave_a_part(run, problem.folder)
        write_shards(problem.folder / "beyond", [np.array([1, 2]), np.array([tokenizer().get_vocab_size()])])
        spoil_models(problem)
        trial.commands.run("tokenize", corpus, f"--model={problem.base}", f"--output={problem.folder / 'tokens'}", "--end-token=1")
        begun = (f"--tokens={problem.folder / 'tokens'}", f"--output={problem.folder / 'begun'}", "--warmup-fraction=0")
        trial.commands.run("pretrain", where[0], *begun)
        resumed = ("train", *where, f"--output={run}", "--resume")
        edited = {f"train, resumed as another run {name}": ((*resumed, f"--corpus={path}"), "data.") for name, path in corpora.items()}
        renumbered = f"--model={problem.folder / 'exchanged tokens'}"
        edited["train, resumed as another run with tokens exchanged"] = ((*resumed, renumbered), "data.")
        before = _content(problem.folder)
        for name, (arguments, message) in {**_unusable(problem, where, corpus, run), **edited}.items():
            said = trial.commands.attempt(*arguments, stdin=None if "no standard input" in name else UNUSABLE["latin"])
            yield from same(f"status of {name}", 4, said.status)
            if "another run" not in name:  # what a run is about is told before it is compared with the one that is there
                yield from same(f"what {name} prints", "", said.out)
            if message not in said.err:
                yield broken(f"message of {name}", "names something else", message, said.err[-300:])
            after = _content(problem.folder)
            yield from same(f"files and folders that {name} changes", [], sorted(file for file, _ in after.items() ^ before.items()))
            before = after
        (torn := problem.folder / "labels.jsonl").write_bytes(UNUSABLE["bad.jsonl"].replace(b"2}", b""))
        said = trial.commands.attempt("train", *where, f"--corpus={torn}", f"--output={problem.folder / 'new'}")
        found = said.status, "labels.jsonl:2" in said.err, "--num-classes" in said.err
        yield from same(
            "status of train on a torn file of labels, and whether it and settings of labels are named", (4, True, False), found
        )
        positions = json.loads((problem.base / MODEL_CONFIG).read_text())["max_position_embeddings"]
        trial.commands.run("summary", where[0], f"--max-seq-len={positions}")
        said = trial.commands.overtaken(run, late := problem.folder / "overtaken", "train", *where, "--lora-rank=7")
        yield from same("status of train where another process was quicker", (4, ""), (said.status, said.out))
        yield from same("what the quicker one has left", content(run), content(late))
        for place in ("largest.apr", "largest float16"):
            trial.commands.run("export", f"--model={problem.folder / 'largest'}", f"--output={problem.folder / place}", "--dtype=float16")
        tokens = (
            "pretrain",
            where[0],
            f"--tokens={problem.folder / 'tokens'}",
            f"--output={problem.folder / 'pretrained'}",
            "--warmup-fraction=0",
        )
        started = problem.folder / "started"
        writers = {run: ("train", *where, f"--output={run}", "--resume"), started: ("train", *where, f"--output={started}")}
        for folder, asked in (writers | {problem.folder / "pretrained": tokens}).items():
            folder.mkdir(exist_ok=True)
            with (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for half in (".partial-run.json.abcdefgh", ".partial-last.abcdefgh/half"):  # what the other process is writing
                    (folder / half).parent.mkdir(exist_ok=True)
                    (folder / half).write_text("half")
                before = content(folder)
                said = trial.commands.attempt(*asked)
            changed = sorted(file for file, _ in content(folder).items() ^ before.items())
            yield from same(f"files of another process that {asked[0]} changes", [], changed)
            yield from same(f"status of {asked[0]} where another process writes", 4, said.status)
            if "another process" not in said.err:
                yield broken(f"message of {asked[0]} where another process writes", "does not say so", "another process", said.err)
        yield from _without_rights(trial, problem, where[0])
        yield from _devices(trial, problem, where, run)
        yield from _on_the_host(trial, problem, f"--adapter={run}")
        yield from _environments(
            trial, ("train", *where, f"--corpus={problem.folder / 'none.jsonl'}", f"--output={problem.folder / 'new'}")
        )


def _content(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, and every folder as one that has nothing."""
    return content(folder) | {f"{path.relative_to(folder)}/": b"" for path in folder.rglob("*") if path.is_dir()}


def _without_rights(trial: Trial, problem: Small, model: str) -> Iterator[Comparison]:
    """An output for which there is no right is refused by the folder's name before what takes longer is read, here what is not there."""
    (folder := problem.folder / "of another user").mkdir()
    none = problem.folder / "none"
    for command, *given in (
        ("train", model, f"--corpus={none}"),
        ("merge", f"--adapter={none}"),
        ("export", f"--model={none}"),
        ("pretrain", model, f"--tokens={none}"),
    ):
        for output in (folder / "new", folder / "more" / "new.apr"):
            name = f"{command} into {output.name} without rights"
            said = trial.commands.not_allowed(folder, command, *given, f"--output={output}")
            yield from same(f"status and output of {name}", (4, ""), (said.status, said.out))
            if folder.name not in said.err:
                yield broken(f"message of {name}", "names something else", folder.name, said.err[-300:])
    yield from same("what commands without rights leave", [], [*folder.iterdir()])


WORKER = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}
"""At no port, so that nobody waits there."""


def _environments(trial: Trial, command: tuple[object, ...]) -> Iterator[Comparison]:
    """A worker whose environment is not what torchrun gives trains neither with others nor alone; the only one of a group reads on. A
    worker's GPU is that of its place on its host."""
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
    said = trial.commands.attempt(*command, "--device=cuda", environment=WORKER | {"RANK": "29", "WORLD_SIZE": "40", "LOCAL_RANK": "15"})
    yield from same("status of the 16th worker of a host", (6, ""), (said.status, said.out))
    if "cuda:15" not in said.err:
        yield broken("message of the 16th worker of a host", "names another device", "cuda:15", said.err[-300:])


Forms = dict[str, tuple[str, ...]]
"""Options that name a model, by what it is."""


def _devices(trial: Trial, problem: Small, where: Sequence[str], run: Path) -> Iterator[Comparison]:
    """Every command that computes, on every form of a model that it takes, ends with status 6 where its device is not there.

    It writes nothing then.
    """
    absent, merged = "xpu" if sys.platform == "darwin" else "mps", problem.folder / "merged"
    output = f"--output={problem.folder / 'new'}"
    base: Forms = {"a base": (where[0],)}
    adapters: Forms = {"a run": (f"--adapter={run}",), "its adapter": (f"--adapter={run / 'last'}",)}
    adapters["an adapter on a base"] = (*adapters["its adapter"], where[0])
    saved = adapters | {"a merged model, as an adapter": (f"--adapter={merged}",)}
    opened = saved | {"a merged model": (f"--model={merged}",)}
    forms: dict[str, tuple[Forms, tuple[str, ...]]] = {
        **{"evaluate": (opened, (where[1],)), "predict": (opened, ("ls",)), "merge": (adapters, (output,))},
        **{"summary": (saved | base, ()), "train": (base, (*where[1:], output))},
        "pretrain": (base | {"no weights": (where[0], "--random")}, (f"--tokens={problem.folder / 'tokens'}", output)),
    }
    before = content(problem.folder)
    for command, (models, rest) in forms.items():
        for form, model in models.items():
            said, name = trial.commands.attempt(command, *model, *rest, f"--device={absent}"), f"{command} of {form} on {absent}"
            yield from same(f"status and output of {name}", (6, ""), (said.status, said.out))
            if absent not in said.err:
                yield broken(f"message of {name}", "names something else", absent, said.err[-300:])
    yield from same(
        f"files that commands change on {absent}", [], sorted(file for file, _ in content(problem.folder).items() ^ before.items())
    )


def _on_the_host(trial: Trial, problem: Small, given: str) -> Iterator[Comparison]:
    """`auto` is the CPU where there is no GPU, and a warning says so; a message says where there is too little memory."""
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


def _leave_a_part(run: Path, folder: Path) -> None:
    """For each file and folder that the run has written a folder with a copy of that alone, but for those that a start leaves."""
    for number, path in enumerate(sorted(run.iterdir())):
        if path.name not in OF_A_START:
            left = folder / f"{LEFT}{number}" / path.name
            left.parent.mkdir()
            (shutil.copytree if path.is_dir() else shutil.copy)(path, left)


def _unusable(problem: Small, where: Sequence[str], corpus: Path, run: Path) -> dict[str, tuple[tuple[object, ...], str]]:
    """Commands, and a word of each refusal."""
    folder, adapter, above = problem.folder, f"--adapter={run}", problem.folder / "not" / "made"
    new = f"--output={above / 'new'}"
    train = ("train", *where, new)
    positions = json.loads((problem.base / MODEL_CONFIG).read_text())["max_position_embeddings"]
    return {
        "train into a run": (("train", *where, f"--output={run}"), "holds a run already"),
        "train into a folder in use": (("train", *where, f"--output={problem.base}"), "not empty"),
        **{
            f"train over another run's {left.name}": (("train", *where, f"--output={left.parent}"), f"not empty (it has {left.name})")
            for left in sorted(folder.glob(f"{LEFT}*/*"))
        },
        "train on a label that no class has": ((*train, f"--corpus={folder / 'bad.jsonl'}"), "bad.jsonl:2: label is 2"),
        "train on a label beyond the setting": ((*train, f"--corpus={folder / 'bad.jsonl'}"), "--num-classes 2, --no-multi-label"),
        "train on a file with a mark": ((*train, f"--corpus={folder / 'marked.jsonl'}"), "marked.jsonl:1"),
        "train on no corpus": ((*train, f"--corpus={folder / 'none.jsonl'}"), "none.jsonl"),
        "train with an unknown setting": ((*train, "--lora-rnk=2"), "--lora-rank"),
        "train with an unknown setting of a long value": ((*train, "--lora-tragets=q_proj,v_proj,o_proj"), "nearest is --lora-targets"),
        "train with a word too many": ((*train, "surplus"), "surplus"),
        "train with the beginning of an option": ((*train, "--lora-ran=2"), "--lora-rank"),
        "train with a setting out of range": ((*train, "--weight-decay=2"), "--weight-decay"),
        "train on what validates": ((*train, f"--validation={corpus}"), "--validation"),
        "train on what validates, by a link": ((*train, f"--validation={folder / 'link.jsonl'}"), "--validation"),
        "train on what validates, by another name of the file": ((*train, f"--validation={folder / 'same.jsonl'}"), "--validation"),
        "train on what validates, by a detour": ((*train, f"--validation={folder / 'base' / '..' / corpus.name}"), "--validation"),
        "train at a rate of 0": ((*train, "--epochs=1", "--batch-size=4", "--warmup-fraction=0.5"), "warmup"),
        "train on longer texts than the model's": ((*train, f"--max-seq-len={positions + 1}"), f"at most {positions} positions"),
        "train on a token without an embedding": ((*train, f"--model={folder / 'more tokens'}"), "ids of tokens go up to"),
        "train, resumed without a run": ((*train, "--resume"), "holds no run"),
        "train, resumed as another run": (("train", *where, f"--output={run}", "--resume", "--lora-rank=7"), "settings.lora_rank"),
        "train on a class without a text": (
            (*train, f"--validation={folder / 'every.jsonl'}", "--num-classes=3", "--class-weights=balanced"),
            "class 2",
        ),
        "evaluate on a label that no class has": (("evaluate", adapter, f"--corpus={folder / 'bad.jsonl'}"), "bad.jsonl:2: label is 2"),
        "evaluate without a model": (("evaluate", f"--corpus={corpus}"), "--adapter"),
        "evaluate a checkpoint": (("evaluate", f"--model={problem.base}", f"--corpus={corpus}"), "without a head"),
        "predict nothing": (("predict", adapter), "exactly one of"),
        "predict two things": (("predict", adapter, f"--corpus={corpus}", "ls"), "exactly one of"),
        "predict a line that is not UTF-8": (("predict", adapter, f"--input={folder / 'latin'}"), "latin:2: is not UTF-8: byte 0xff"),
        "merge into a link to nothing": (("merge", adapter, f"--output={folder / 'nowhere'}"), "exists"),
        "merge into a folder that is there": (("merge", adapter, f"--output={problem.base}"), "exists"),
        "export into a folder that is there": (("export", f"--model={problem.base}", f"--output={run}"), "exists"),
        "export beside another's tokenizer": (("export", f"--model={problem.base}", f"--output={folder / '[beside].apr'}"), "exists"),
        "export beside another's template": (("export", f"--model={problem.base}", f"--output={folder / '[other].apr'}"), "exists"),
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
        **{
            f"export a folder in {bits}": (("export", f"--model={problem.base}", new, f"--dtype={bits}"), "--dtype")
            for bits in ("q8", "q4")
        },
        "predict a text that is not UTF-8": (("predict", adapter, "\udce9"), "UTF-8"),
        "predict standard input that is not UTF-8": (("predict", adapter, "--input=-"), "standard input:2: is not UTF-8: byte 0xff"),
        "predict no standard input": (("predict", adapter, "--input=-"), "standard input: "),
        "predict half a character": (("predict", adapter, f"--corpus={folder / 'half.jsonl'}"), HALF),
        **{
            f"predict from {option} {file}": (("predict", adapter, f"--{option}={folder / file}"), f"{file}{line}")
            for option, line, files in (
                ("corpus", ":2", tuple(f"{each}.jsonl" for each in ("untitled", "text", "twice", "torn", "joined", "apart", "blank"))),
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
        "no command": ((), "required: COMMAND"),
        "summary of nothing": (("summary",), "--adapter"),
        "summary of the memory of an adapter on nothing": (("summary", "--memory", f"--adapter={folder / 'none'}"), "none"),
        **{
            f"tokenize {what}": (("tokenize", folder / file, f"--model={problem.base}", new, *given), message)
            for what, file, given, message in (
                ("without an end", "bad.jsonl", (), "eos_token_id"),
                ("with an end of no token", "bad.jsonl", (f"--end-token={tokenizer().get_vocab_size()}",), "the vocabulary has"),
                ("with an end below all tokens", "bad.jsonl", ("--end-token=-1",), "token 1 is -1"),
                ("with an end that 16 bits take for 1", "bad.jsonl", (f"--end-token={2**16 + 1}",), "the vocabulary has"),
                ("with an end that 16 bits take for 2", "bad.jsonl", (f"--end-token={2 - 2**16}",), "the vocabulary has"),
                ("with an end of several tokens", "bad.jsonl", ("--end-token=<|endoftext|>",), "--end-token"),
                ("with an end of two special tokens", "bad.jsonl", ("--end-token=<eos><eos>",), "--end-token"),
                ("with an end of no text", "bad.jsonl", ("--end-token=",), "--end-token"),
                ("with an end of an unknown word", "bad.jsonl", (f"--model={folder / 'few words'}", "--end-token=<eos>"), "--end-token"),
                ("with several ends", "bad.jsonl", (f"--model={folder / 'scaled'}",), "eos_token_id is [1, 3]"),
                ("with an end that is true and no number", "bad.jsonl", (f"--model={folder / 'true end'}",), "eos_token_id is True"),
                ("into a folder that is there", "bad.jsonl", ("--end-token=1", f"--output={run}"), "exists"),
                *((f"without an end, {name}", "bad.jsonl", (f"--model={folder / name}",), "config.json") for name in NO_CONFIG),
                ("text that is not UTF-8", "latin", ("--end-token=1",), "latin"),
                ("half a character", "half.jsonl", ("--end-token=1",), HALF),
                ("a file with a mark", "marked.jsonl", ("--end-token=1",), "marked.jsonl:1"),
                ("a line without a text", "untitled.jsonl", ("--end-token=1",), "untitled.jsonl:2"),
                ("a line whose text is null", "null.jsonl", ("--end-token=1",), "null.jsonl:2"),
                ("a line that is torn", "torn.jsonl", ("--end-token=1",), "torn.jsonl:2"),
                ("two lines in one", "joined.jsonl", ("--end-token=1",), "joined.jsonl:2"),
                ("two lines in one, and a blank", "apart.jsonl", ("--end-token=1",), "apart.jsonl:2"),
                ("a blank line", "blank.jsonl", ("--end-token=1",), "blank.jsonl:2"),
                ("a line with two texts", "twice.jsonl", ("--end-token=1",), "twice.jsonl:2"),
                ("nothing", "empty.jsonl", ("--end-token=1",), "empty"),
                ("into shards of nothing", "bad.jsonl", ("--end-token=1", "--shard-tokens=0"), "shard_tokens"),
            )
        },
        "evaluate an adapter as a model": (("evaluate", f"--model={run / 'last'}", f"--corpus={corpus}"), "is an adapter"),
        "predict from a file of a base": (("predict", f"--adapter={folder / 'model.apr'}", "ls"), "without a head"),
        "predict from a merged model on a base": (("predict", f"--adapter={folder / 'merged'}", where[0], "ls"), "leave the base"),
        **{
            f"export a merged model into {into}": (
                ("export", f"--model={folder / 'merged'}", f"--output={above / into}"),
                "is a merged model",
            )
            for into in ("new", "new.apr")
        },
        "summary of the memory of a merged model": (("summary", "--memory", f"--adapter={folder / 'merged'}"), "--memory"),
        **{
            f"export {what} as {place}": (("export", f"--model={folder / what}", f"--output={above / place}", "--dtype=float16"), message)
            for what, message, places in (
                ("scaled", "rope_scaling", ("new.apr",)),
                ("hardly scaled", "rope_scaling", ("new.apr",)),
                ("too large", "embed_tokens", ("new.apr", "new")),
                ("norm too large", "model.norm.weight", ("new.apr", "new")),
                ("no tokenizer", "tokenizer.json", ("new.apr", "new")),
            )
            for place in places
        },
        **{
            f"tokenize by {what}": (("tokenize", folder / "bad.jsonl", f"--model={folder / what}", new, "--end-token=1"), "tokenizer.json")
            for what in ("no tokenizer", "torn tokenizer", "drawing tokenizer")
        },
        **{
            f"summary of other settings, {option}": (("summary", adapter, option), word)
            for option, word in (
                ("--lora-rank=2", "--lora-rank"),
                ("--no-multi-label", "--multi-label"),
                ("--early-stop-patience=none", "--early-stop-patience"),
                ("--seed=0", "--seed"),
            )
        },
        **{
            f"pretrain without tokens on rows of {seq}": (
                ("pretrain", f"--model={problem.base}", f"--tokens={folder / 'none'}", new, f"--seq={seq}"),
                "none" if seq == positions else f"at most {positions} positions",
            )
            for seq in (positions, positions + 1)
        },
        **{
            f"pretrain {what}": (("pretrain", f"--model={model}", f"--tokens={folder / 'tokens'}", new, *given), message)
            for what, model, given, message in (
                ("on a token beyond the model's", folder / "fewer tokens", (), "the vocabulary has"),
                ("a model without a tokenizer", folder / "no tokenizer", (), "tokenizer.json"),
                ("into a file", problem.base, (f"--output={corpus}",), "is no folder"),
                ("and validate on nothing", problem.base, (f"--validation={folder / 'none'}",), "none"),
                ("and validate on no token of the model's", problem.base, (f"--validation={folder / 'beyond'}",), "the vocabulary has"),
                ("at a rate of 0, as its only run", problem.base, ("--batch=1000", "--epochs=1", "--warmup-fraction=1"), "rate of 0"),
                (
                    "on, by another seed",
                    problem.base,
                    (f"--output={folder / 'begun'}", "--resume", "--warmup-fraction=0", "--seed=1"),
                    "seed is 0",
                ),
                ("on, where there is no run", problem.base, ("--resume", "--warmup-fraction=0"), "no run to continue"),
            )
        },
    }
