"""Models as the commands write them: merged, exported, and pre-trained from a corpus of texts; read here without `impl`."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan import reference
from blackswan.falsifiers.numeric import apr_format
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare, value_inside
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.files import Tokens
from blackswan.falsifiers.system import config_files
from blackswan.falsifiers.system.adapter_files import CONFIG, HEAD, TOKENIZER, WEIGHTS, base_weight, read_adapter
from blackswan.falsifiers.system.apr_spellings import CLASSES
from blackswan.falsifiers.system.checkpoint_parts import as_in_a_cache
from blackswan.falsifiers.system.command_problem import LONG, ODD, Small, options, piped, small, texts_of, tokenizer
from blackswan.falsifiers.system.commands import Answers
from blackswan.falsifiers.system.same import NO_LETTER, same, same_tensors
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.table import Array

TOKENIZER_CONFIG = "tokenizer_config.json"
APR_NAME = "of a tokenizer.json [chat]"
"""The name of a model, in which a file's beside it occurs too, and a pattern that it does not match."""
BESIDE_THE_TOKENIZER: Mapping[str, str] = {
    **{TOKENIZER_CONFIG: '{"model_max_length": 512}', "special_tokens_map.json": "{}", "added_tokens.json": "{}"},
    **{"vocab.json": '{"a": 0}', "merges.txt": "a b\n", "tokenizer.model": "\x00\x01", "chat_template.jinja": "{{ text }}"},
    "generation_config.json": '{"temperature": 0.5, "eos_token_id": 6, "pad_token_id": 6}',
}
"""Files of a checkpoint that belong to its tokenizer, and that other programs read."""
END, OTHER_END = 3, 5
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
OF_A_CLASSIFIER: Mapping[str, Any] = {
    **{"architectures": ["LlamaForSequenceClassification"], "num_labels": 2, "torch_dtype": "float16", "dtype": "float16"},
    **{"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}},
}
"""What a classifier of transformers says in its config.json, and a language model that is made of its weights does not."""
SHARD, SEQ = 7, 9
"""Documents are shorter and longer than a shard; one fills it."""
LONGER = 70_000
"""Tokens of a document."""
FINE, COARSE = 0.5e-4 + 1e-9, 0.5e-2


@reads_files
def models_are_whole(trial: Trial) -> Iterator[Comparison]:
    """A merged model has the updates in its weights, all else as in the base, whose files are links, and every file of the tokenizer.

    An exported one has the base's tensors, rounded to the dtype asked for, its special tokens and its tokenizer, as a folder and as an .apr
    file, and so has what is made of that, also without a standard output; with the .apr file for its base, which is gone, an adapter
    answers alike.
    """
    rng = trial.rng("models")
    quantised = {"multi_label": False, "epochs": 1, "quantize_nf4": True, "double_quantize": bool(rng.integers(2)), "dtype": "bfloat16"}
    with small(trial, "quantised", quantised) as problem:
        yield from _merged_after_training(trial, problem, texts_of(rng, 3))
    with small(trial, "models", {"multi_label": False, "epochs": 1}) as problem:
        _complete(
            problem.base,
            {"bos_token_id": 7, "eos_token_id": END, "initializer_range": 0.5, "_name_or_path": f"mod{NO_LETTER}le", **OF_A_CLASSIFIER},
        )
        as_in_a_cache(problem.base)
        texts = texts_of(rng, 6)
        labels = problem.labels(rng, 6)
        run, merged = problem.folder / "l\u00e4uft", problem.folder / "gef\u00fcgt"  # which a terminal may have no letters for
        problem.corpus("corpus", texts, labels)
        with chdir(problem.folder):  # what a run was given by names that hold here only is found from everywhere
            given = ("--model=base", "--corpus=corpus.jsonl", f"--output={run.name}", *options(problem.settings))
            said = trial.commands.run("train", *given, encoding="ascii:surrogateescape")
        yield from same("letters of names that are shown by escapes", 3, said.out.count(r"l\xe4uft"))
        for encoding, output in (("utf-8", merged.with_name("verf\u00fcgt")), ("ascii", merged)):
            said = trial.commands.run("merge", f"--adapter={run / 'last'}", f"--output={output}", encoding=encoding)
            line = f"{output} holds the merged model and its head\n".encode(encoding, "backslashreplace").decode(encoding)
            yield from same(f"what merge prints in {encoding}", line, said.out)
        yield from merged_tensors(problem, run / "last", merged)
        yield from _kept_config("merged model", problem, merged)
        yield from _files("merged model", problem.base, merged)
        for dtype in (None, "float32", "float16", "bfloat16"):
            folder = problem.folder / f"exported {dtype}"
            chosen = [] if dtype is None else [f"--dtype={dtype}"]
            trial.commands.run("export", f"--model={problem.base}", f"--output={folder}", *chosen)
            yield from _exported("exported folder", problem, folder, dtype or "float32")
            yield from _kept_config(f"exported folder <{dtype}>", problem, folder)
        narrow, wide = problem.folder / "exported bfloat16", problem.folder / "exported again"
        trial.commands.run("export", f"--model={narrow}", f"--output={wide}", "--dtype=float32")
        widened = {key: value.astype(np.float32) for key, value in load_file(narrow / WEIGHTS).items()}
        stored = load_file(wide / WEIGHTS)
        yield from same("tensors of 16 bits, exported in 32", widened, stored)
        yield from same("dtypes of what is exported in 32 bits", {"float32"}, {value.dtype.name for value in stored.values()})
        yield from _exported_in_one_dtype(trial, problem, narrow)
        apr, back = problem.folder / "files" / "more" / f"{APR_NAME}.apr", problem.folder / "folders" / "back"
        said = trial.commands.run("export", f"--model={problem.base}", f"--output={apr}")
        yield from same("what export prints", f"{apr} holds the model\n", said.out)
        yield from same("beginning of the .apr file", b"APR", apr.read_bytes()[:3] if apr.is_file() else None)
        trial.commands.run("export", f"--model={apr}", f"--output={back}")
        trial.commands.run("export", f"--model={apr}", f"--output={apr.with_name('again.apr')}", encoding=None)
        trial.commands.run("export", f"--model={apr}", f"--output={apr.with_name('half.apr')}", "--dtype=bfloat16")
        halves = apr_format.read(apr.with_name("half.apr"))[2].values()
        rounded = {name: value.astype(STORAGE["bfloat16"]) for name, value in problem.model.decoder.items()}
        yield from same("tensors of an .apr file <bfloat16>", rounded, {each.name: apr_format.array(each) for each in halves})
        for beside in ("apr", TOKENIZER, *BESIDE_THE_TOKENIZER):
            files = (apr.with_name(f"{name}.{beside}") for name in (APR_NAME, "again"))
            yield from same(f".{beside} of an .apr file that is made of one", *(path.read_bytes() for path in files))
        yield from _exported("folder of an .apr file", problem, back, "float32")
        yield from _beside_other_models(trial, apr, problem.folder / "beside others")
        wanted = Answers.of(problem, run / "last", texts, labels, np.asarray(0))
        problem.base.rename(problem.folder / "moved")
        trial.commands.run("merge", f"--adapter={run / 'last'}", f"--model={apr}", f"--output={problem.folder / 'again'}")
        yield from same("what is merged where the base was", *(load_file(each / WEIGHTS) for each in (merged, problem.folder / "again")))
        yield from _files("merged .apr file", merged, problem.folder / "again")
        lines = trial.commands.run("predict", f"--adapter={run / 'last'}", f"--model={apr}", "--", *texts).out.splitlines()
        shown = np.asarray([json.loads(line)["probabilities"] for line in lines])
        asked = (f"--model={apr}", "--", *texts)
        by_run, by_part = (trial.commands.run("predict", f"--adapter={each}", *asked).out for each in (run, run / "best"))
        yield from same("what a run's folder answers on a base that is named", by_part, by_run)
    yield trial.near("probabilities with the .apr file for the base", wanted.probabilities, shown)


def _beside_other_models(trial: Trial, apr: Path, folder: Path) -> list[Comparison]:
    """What an .apr file is exported to has its tokenizer.json, and of the files that belong to other models in its folder none."""
    folder.mkdir()
    model = folder / f"{APR_NAME}.apr"
    for path in (apr, apr.with_name(f"{APR_NAME}.{TOKENIZER}")):
        shutil.copyfile(path, folder / path.name)
    for other in ("", f"{APR_NAME}.v2.", "other.", APR_NAME, f"{APR_NAME}-"):
        for name, text in BESIDE_THE_TOKENIZER.items():
            (folder / f"{other}{name}").write_text(text)
    written = folder / "written"
    for output in (written / "folder", written / "new.apr"):
        trial.commands.run("export", f"--model={model}", f"--output={output}")
    found = sorted(path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file())
    files = [*(f"folder/{name}" for name in (CONFIG, WEIGHTS, TOKENIZER)), "new.apr", f"new.{TOKENIZER}"]
    return same("files that are made of one among other models' files", files, found)


def _merged_after_training(trial: Trial, problem: Small, texts: Sequence[str]) -> list[Comparison]:
    """Every projection is merged as it was in training: in NF4, made of weights in another dtype than the file's.

    The base is an .apr file, and its name a link to a file of another name, as in Hugging Face's cache. It is exported by that name as any
    other. What was merged is not trained.
    """
    run, merged, apr = (problem.folder / name for name in ("new/runs/run", "models/merged", f"mod{NO_LETTER}le.apr"))
    _complete(problem.base, {"bos_token_id": 0, "eos_token_id": [END, OTHER_END]})
    trial.commands.run("export", f"--model={problem.base}", f"--output={apr}")
    apr.rename(problem.folder / "blob")
    apr.symlink_to("blob")
    where = [f"--model={apr.name}", f"--corpus={problem.corpus('corpus', texts, [0, 1, 2])}", f"--output={run}"]
    with chdir(problem.folder):
        trial.commands.run("train", *where, *options({**problem.settings, "validation_fraction": 0.0}))
    trial.commands.run("merge", f"--adapter={run}", f"--output={merged}")
    found = list(merged_tensors(problem, run / "last", merged))
    for output in (problem.folder / "of a link", again := problem.folder / "again.apr"):
        trial.commands.run("export", f"--model={apr}", f"--output={output}")
    found += _exported("folder of a link", problem, problem.folder / "of a link", "float32")
    for path in (apr, apr.with_name(f"{apr.stem}.{TOKENIZER}")):
        made = again.with_name(path.name.replace(apr.stem, "again"))
        found += same(f"{made.name}, of a link", path.read_bytes(), made.read_bytes() if made.is_file() else b"")
    count, written = sum(value.size for value in problem.model.decoder.values()), (run / "config.yaml").read_text().splitlines()
    found += same(
        "parameters of an .apr file", f"model_params: {count}", next((line for line in written if "model_params" in line), "no line")
    )
    shown = trial.commands.run("summary", f"--adapter={merged}").out
    held = re.search(r"base weights in (.*)", shown)
    found += same("summary of a merged model, dtype of its base weights", problem.settings["dtype"], held and held[1])
    told = [line.rpartition(", ")[2] for line in shown.splitlines() if line.startswith(("LoRA:", "steps:"))]
    found += same("summary of a merged model", ["steps:      none: a merged model is not trained", "merged into the base weights"], told)
    for call, *given in (("fit", texts, None), ("train_batch",), ("accumulate",), ("apply_gradient_vector",), ("save",), ("merge",)):
        ask = partial(trial.commands.library, call, merged, *(given or [texts]), *([problem.folder / "none"] if given else []))
        found.append(trial.refuses(f"{call} of a merged model", ask, "merged model: its updates", "ValueError"))
    return found


def _complete(base: Path, config: Mapping[str, Any]) -> None:
    """Adds files of a tokenizer, and keys of a configuration, to a checkpoint."""
    for name, text in BESIDE_THE_TOKENIZER.items():
        (base / name).write_text(text)
    (base / CONFIG).write_text(json.dumps(json.loads((base / CONFIG).read_text()) | config))


def _files(name: str, base: Path, folder: Path) -> list[Comparison]:
    """The tokenizer and what lies beside it, in files of their own."""
    files = (TOKENIZER, *BESIDE_THE_TOKENIZER)
    shared = [path.name for path in folder.iterdir() if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1)]
    return same(f"files of a {name} that have another name", [], shared) + [
        each
        for file in files
        for each in same(f"{file} of a {name}", *(part.read_bytes() if part.is_file() else b"" for part in (base / file, folder / file)))
    ]


def merged_tensors(problem: Small, adapter: Path, folder: Path) -> Iterator[Comparison]:
    """Weights, head, architecture and special tokens."""
    stored, trained = load_file(folder / WEIGHTS), read_adapter(adapter, problem.model.scalars)
    yield from same("tensors of a merged model", sorted(problem.model.decoder), sorted(stored))
    scale = problem.settings["lora_alpha"] / problem.settings["lora_rank"]
    model = replace(problem.model, trained_in=problem.settings["dtype"])
    for name, value in problem.model.decoder.items():
        path = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or not (problem.settings["quantize_nf4"] or f"{path}.lora_A.weight" in trained):
            yield from same("weights without an update in a merged model", value, stored[name])
            continue
        base, update = base_weight(model, path), np.zeros(())
        if f"{path}.lora_A.weight" in trained:
            update = scale * trained[f"{path}.lora_B.weight"] @ trained[f"{path}.lora_A.weight"]
        size = float(np.abs(base).max() + np.abs(update).max())
        limit = Errors.flat(2 * (problem.settings["lora_rank"] + 2) * UNIT_ROUNDOFF["float32"] * size)
        yield compare("weights with an update in a merged model", base + update, stored[name], limit, UNIT_ROUNDOFF["float32"])
    head = {name: value.astype(np.float32) for name, value in trained.items() if name.startswith("score.")}
    yield from same("head of a merged model", head, load_file(folder / HEAD))
    yield from _language_model("merged model", problem, folder)


def _kept_config(name: str, problem: Small, folder: Path) -> list[Comparison]:
    """A new folder's config.json keeps what the base's says beside the architecture."""
    base, config = (json.loads((each / CONFIG).read_text()) for each in (problem.base, folder))
    others = {key: value for key, value in config_files.others(base).items() if key not in OF_A_CLASSIFIER}
    return same(f"keys of the base in {CONFIG} of a {name}", others, {key: config.get(key) for key in others})


def _language_model(name: str, problem: Small, folder: Path) -> Iterator[Comparison]:
    """A config.json says the architecture and the special tokens of the base, and a language model's class and dtype."""
    base, config = (json.loads((each / CONFIG).read_text()) for each in (problem.base, folder))
    yield from same(f"architecture in {CONFIG} of a {name}", *map(config_files.said, (base, config)))
    yield from same(
        f"special tokens and positions in {CONFIG} of a {name}", *({key: each.get(key) for key in KEPT} for each in (base, config))
    )
    dtypes = {value.dtype.name for value in load_file(folder / WEIGHTS).values()}
    said = {key: value for key, value in config.items() if key in OF_A_CLASSIFIER}
    expected = {"architectures": [CLASSES[problem.model.scalars["family"]]], "dtype": dtypes.pop()}
    yield from same(f"class and dtype in {CONFIG} of a {name}", expected, said)


def _exported(name: str, problem: Small, folder: Path, dtype: str) -> Iterator[Comparison]:
    """Tensors, configuration and tokenizer of an exported folder."""
    stored = load_file(folder / WEIGHTS)
    expected = {key: value.astype(STORAGE[dtype]) for key, value in problem.model.decoder.items()}
    yield from same(f"tensors of an {name} <{dtype}>", sorted(expected), sorted(stored))
    yield from same(f"dtypes of an {name} <{dtype}>", [STORAGE[dtype].name], sorted({value.dtype.name for value in stored.values()}))
    odd = [key for key, value in expected.items() if key in stored and value.tobytes() != stored[key].tobytes()]
    yield from same(f"tensors of other bits in an {name} <{dtype}>", [], odd)
    yield from _language_model(f"{name} <{dtype}>", problem, folder)
    yield from _files(f"{name} <{dtype}>", problem.base, folder)


@reads_files
def pretraining_is_counted_anew(trial: Trial) -> Iterator[Comparison]:
    """Shards hold all tokens of each text and the token that ends it, in their order; what `pretrain` prints is counted from these and from
    the checkpoints that it writes. The tokenizer would add tokens to a text, and may come with an .apr file; one has many tokens.
    """
    rng = trial.rng("pretraining")
    with small(trial, "pretraining", {}) as problem:
        _complete(problem.base, {"eos_token_id": END})
        _closing(problem.base / TOKENIZER)
        texts = [str(text) for text in rng.permutation([*ODD, LONG, "a\nb\r\n", "\n"])]
        kinds = [str(each) for each in rng.permutation(["text", "input", "both"] * len(texts))]
        lines = [
            json.dumps({"input": "ls", "text": text} if kind == "both" else {kind: text}) for kind, text in zip(kinds, texts, strict=False)
        ]
        (problem.folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
        other = "\ufeff" + "".join(f"{text}\r\n" for text in ("a\rb", *texts[:4]))
        (problem.folder / "other.txt").write_bytes(other.encode())
        train = [token for text in texts for token in (*tokenizer().encode(text).ids, END)]
        held_out = [*tokenizer().encode(other).ids, OTHER_END]
        yield from _shards(trial, "JSONL", problem, "corpus.jsonl", train)
        yield from _shards(trial, "text", problem, "other.txt", held_out, f"--end-token={OTHER_END}")
        trial.commands.run("export", f"--model={problem.base}", f"--output={problem.folder / 'base.apr'}")
        yield from _shards(trial, "text by an .apr file", problem, "other.txt", [*held_out[:-1], END], model="base.apr")
        yield from _of_many_tokens(trial, problem)
        yield from _of_long_documents(trial, problem)
        yield from _of_many_documents(trial, problem, int(rng.integers(2049, 4096)))
        yield from _pretrained(trial, problem, train, held_out)
        yield from _pretrained_in_pairs(trial, problem, len(train))


def _closing(path: Path) -> None:
    """Makes a tokenizer add a token before and after a text, for other uses than a stream of documents."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    found = Tokenizer.from_file(str(path))
    found.post_processor = TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", found.token_to_id("<eos>"))])
    found.save(str(path))


def _exported_in_one_dtype(trial: Trial, problem: Small, narrow: Path) -> Iterator[Comparison]:
    """A checkpoint in 16 bits whose norms alone have 32 is exported as if all had 16, or 32, and without a dtype as it is."""
    mixed = problem.folder / "of two dtypes"
    shutil.copytree(narrow, mixed)
    tensors = load_file(narrow / WEIGHTS)
    save_file({name: value.astype(np.float32) if "norm" in name else value for name, value in tensors.items()}, mixed / WEIGHTS)
    for dtype in ("bfloat16", "float32"):
        one = problem.folder / f"of {dtype} alone"
        trial.commands.run("export", f"--model={mixed}", f"--output={one}", f"--dtype={dtype}")
        expected, stored = {name: value.astype(STORAGE[dtype]) for name, value in tensors.items()}, load_file(one / WEIGHTS)
        yield from same(f"tensors of two dtypes, exported in {dtype}", expected, stored)
        yield from same(f"dtypes of what is exported in {dtype}", {dtype}, {value.dtype.name for value in stored.values()})
    trial.commands.run("export", f"--model={mixed}", f"--output={problem.folder / 'as it is'}")
    yield from same_tensors(*(load_file(folder / WEIGHTS) for folder in (mixed, problem.folder / "as it is")))


def _of_many_tokens(trial: Trial, problem: Small) -> Iterator[Comparison]:
    """The first and the last tokens arrive in shards where the vocabulary has as many as 16 bits count, and one more.

    The token of id 0 ends documents: once as the option says, alone in the last shard, and once as the model does. An id below the last one
    may have no token.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    for size, given in ((2**16, ["--end-token=0"]), (2**16 + 1, [])):
        model = problem.folder / f"{size} tokens"
        model.mkdir()
        encoder = Tokenizer(WordLevel({str(word): word for word in range(size - 1)}, "0"))
        encoder.add_special_tokens([str(size - 1)])  # beyond the words, as those of real tokenizers are
        encoder.pre_tokenizer = WhitespaceSplit()
        encoder.save(str(model / TOKENIZER))
        (model / CONFIG).write_text(json.dumps({"eos_token_id": END if given else 0}))
        ids = [0, 1, 2**15 - 1, 2**15, size - 2, size - 1]
        (problem.folder / "numbers.txt").write_text(" ".join(map(str, ids)))
        shard = len(ids) if given else SHARD
        yield from _shards(trial, model.name, problem, "numbers.txt", [*ids, 0], *given, model=model.name, vocab=size, shard=shard)
    model = problem.folder / "an id without a token"
    model.mkdir()
    encoder = Tokenizer(WordLevel({str(word): word for word in (0, 1, 3)}, "0"))
    encoder.pre_tokenizer = WhitespaceSplit()
    encoder.save(str(model / TOKENIZER))
    (problem.folder / "words.txt").write_text("1 3")
    yield from _shards(trial, model.name, problem, "words.txt", [1, 3, 0], "--end-token=0", model=model.name, vocab=4)


def _of_long_documents(trial: Trial, problem: Small) -> Iterator[Comparison]:
    """Documents of more tokens than a shard has, and than 16 bits count, between short ones; and a file of more than 2¹⁷ characters.
    One of more than 2²⁰ is one text for a tokenizer that puts a token before each.
    """
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Prepend

    texts = ["ls", "}" * LONGER, "id", "{" * LONGER]
    (problem.folder / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = [token for text in texts for token in (*tokenizer().encode(text).ids, END)]
    yield from _shards(trial, "long documents", problem, "long.jsonl", expected, shard=LONGER // 2)
    text = "ls -la\n" * (LONGER // 3)  # more than 2¹⁷ bytes
    (problem.folder / "long.txt").write_text(text)
    yield from _shards(trial, "a long text", problem, "long.txt", [*tokenizer().encode(text).ids, END], shard=LONGER * 2)
    (problem.folder / "longer.txt").write_text(text := text * 7)  # more than 2²⁰ bytes
    (model := problem.folder / "putting before").mkdir()
    encoder = Tokenizer.from_str(tokenizer().to_str())
    encoder.normalizer = Prepend("{")
    encoder.save(str(model / TOKENIZER))
    (model / CONFIG).write_text(json.dumps({"eos_token_id": END}))
    expected = [*encoder.encode(text).ids, END]
    yield from _shards(trial, "a long text with a beginning", problem, "longer.txt", expected, model=model.name, shard=LONGER * 2)


def _of_many_documents(trial: Trial, problem: Small, count: int) -> Iterator[Comparison]:
    """Thousands of documents, which a program may work off in pieces, are all there, each once and in its place. The
    file is a link to one whose name does not say what it holds. So are documents of a pipe, which can be read once."""
    texts = [f"ls {place % 97}" for place in range(count)]
    known = {text: [*tokenizer().encode(text).ids, END] for text in {*texts}}
    (problem.folder / "many.jsonl").symlink_to("many")
    (problem.folder / "many").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    yield from _shards(trial, "many documents", problem, "many.jsonl", [token for text in texts for token in known[text]], shard=LONGER)
    with piped(b'{"text": "ls"}\n{"text": "ls 1"}\n') as name:
        (problem.folder / "piped.jsonl").symlink_to(name)
        expected = [*tokenizer().encode("ls").ids, END, *known["ls 1"]]
        yield from _shards(trial, "documents of a pipe", problem, "piped.jsonl", expected)


def _shards(
    trial: Trial,
    name: str,
    problem: Small,
    corpus: str,
    expected: Sequence[int],
    *given: str,
    model: str = "base",
    vocab: int | None = None,
    shard: int = SHARD,
) -> Iterator[Comparison]:
    folder = problem.folder / (f"{corpus} tokens" if model == "base" else f"shards/by {model}")
    asked = [problem.folder / corpus, f"--model={problem.folder / model}", f"--output={folder}", f"--shard-tokens={shard}", *given]
    said = trial.commands.run("tokenize", *asked)
    index = json.loads((folder / "index.json").read_text())
    pieces = [np.fromfile(folder / each["file"], {"uint16": "<u2", "uint32": "<u4"}[index["dtype"]]) for each in index["shards"]]
    yield from same(f"tokens of the shards <{name}>", list(expected), np.concatenate(pieces).tolist())
    vocab = vocab or tokenizer().get_vocab_size()
    yield from same(f"dtype of the shards <{name}>", "uint16" if vocab <= 2**16 else "uint32", index["dtype"])
    sizes = [min(shard, len(expected) - start) for start in range(0, len(expected), shard)]
    yield from same(f"tokens of each shard <{name}>", sizes, [each["tokens"] for each in index["shards"]])
    digests = [hashlib.sha256((folder / each["file"]).read_bytes()).hexdigest() for each in index["shards"]]
    yield from same(f"digests of the shards <{name}>", digests, [each["sha256"] for each in index["shards"]])
    yield from same(f"line about the shards <{name}>", f"{folder}: {len(expected)} tokens of a vocabulary of {vocab}\n", said.out)


def _pretrained(trial: Trial, problem: Small, train: Sequence[int], held_out: Sequence[int]) -> Iterator[Comparison]:
    """The lines of a run whose batch is the whole stream, so that each of its epochs is one step."""
    output, rate = problem.folder / "pretrained", 0.01
    rows = -(-(len(train) - 1) // (SEQ - 1))
    options = {"model": problem.base, "tokens": problem.folder / "corpus.jsonl tokens", "validation": problem.folder / "other.txt tokens"}
    settings = {"batch": rows + 1, "seq": SEQ, "epochs": 2, "micro-batch": 3, "learning-rate": rate, "schedule": "constant", "seed": 5}
    given = [f"--{name}={value}" for name, value in {**options, "output": output, **settings, "warmup-fraction": 0.0}.items()]
    said = trial.commands.run("pretrain", *given)
    scalars, out = problem.model.scalars, said.out.splitlines()
    first = f"{scalars['family']}, {scalars['layers']} layers; {len(train):,} tokens, 2 steps"
    yield from same("first line of pretrain", first, out[0])
    epochs = [re.fullmatch(r"epoch (\d)/2: held-out loss ([\d.]+), (.*) holds the model", line) for line in out[1:]]
    folders = [output / "checkpoints" / f"step-{step:08d}" for step in (1, 2)]
    yield from same(
        "epochs of pretrain", [("1", str(folders[0])), ("2", str(folders[1]))], [each and (each[1], each[3]) for each in epochs]
    )
    for folder, line in zip(folders, epochs, strict=True):
        loss = _loss(load_file(folder / WEIGHTS), scalars, _rows(held_out))["loss"]
        yield _shown(trial, "held-out loss of an epoch of pretrain", float(loss), float(line[2]) if line else math.nan, FINE)
        yield from same("tokenizer of a checkpoint of pretrain", (problem.base / TOKENIZER).read_bytes(), (folder / TOKENIZER).read_bytes())
        yield from _language_model("checkpoint of pretrain", problem, folder)
    random = problem.folder / "from random weights"
    trial.commands.run("pretrain", *given, f"--output={random}", "--epochs=1", "--random")
    yield from _language_model("checkpoint of pretrain from random weights", problem, random / "checkpoints" / folders[0].name)
    step = re.search(r"^step 1/2: loss ([\d.]+), gradient norm ([-\d.e+]+), learning rate ([-\d.e+]+)$", said.err, re.MULTILINE)
    if step is None:
        yield broken("first step of pretrain", "no such line", "step 1/2: loss …, gradient norm …, learning rate …", said.err[-300:])
        return
    start = _loss(problem.model.decoder, scalars, _rows(train), norm=True)
    yield _shown(trial, "loss of the first step of pretrain", float(start["loss"]), float(step[1]), FINE)
    norm = float(start["norm"])
    yield _shown(trial, "gradient norm of the first step of pretrain", norm, float(step[2]), COARSE * norm)
    yield from same("learning rate of the first step of pretrain", rate, float(step[3]))


def _pretrained_in_pairs(trial: Trial, problem: Small, count: int) -> Iterator[Comparison]:
    """A run from an .apr file on pairs of tokens, in the order of the seed 0, and without held-out tokens: each hundredth of its steps has
    a line too."""
    output, tokens = problem.folder / "more" / "runs" / "in pairs", problem.folder / "corpus.jsonl tokens"
    epochs = math.ceil(101 / (count - 1))
    given = {"model": problem.folder / "base.apr", "tokens": tokens, "output": output, "batch": 1, "seq": 2, "epochs": epochs}
    said = trial.commands.run("pretrain", *(f"--{name}={value}" for name, value in given.items()))
    steps = epochs * (count - 1)
    last = output / "checkpoints" / f"step-{steps:08d}"
    yield from same("last line without held-out tokens", f"epoch {epochs}/{epochs}: {last} holds the model", said.out.splitlines()[-1])
    yield from same("tokenizer of a run from an .apr file", (problem.base / TOKENIZER).read_bytes(), (last / TOKENIZER).read_bytes())
    shown = re.findall(r"^step (\d+)/(\d+): loss ([\d.]+)", said.err, re.MULTILINE)
    due = [(str(step), str(steps)) for step in (1, *range(100, steps + 1, 100))]
    yield from same("steps of pretrain that are shown", due, [each[:2] for each in shown])
    order = trial.pretrainer.epoch(Tokens(tokens, tokenizer().get_vocab_size(), 1, 2, 0), 0)
    loss = _loss(problem.model.decoder, problem.model.scalars, (order.input_ids[:1], order.mask[:1]))["loss"]
    yield _shown(trial, "loss of the first pair", float(loss), float(shown[0][2]) if shown else math.nan, FINE)


def _shown(trial: Trial, name: str, expected: float, printed: float, digits: float) -> Comparison:
    limit = digits + float(trial.literal(np.asarray(expected)).max)
    return value_inside(name, printed - expected, -limit, limit)


def _rows(stream: Sequence[int]) -> tuple[Array, Array]:
    """Ids and mask of rows in which each token of a stream but the first has the one before it."""
    starts = range(0, len(stream) - 1, SEQ - 1)
    pieces = [list(stream[start : start + SEQ]) for start in starts]
    ids = np.array([piece + [0] * (SEQ - len(piece)) for piece in pieces])
    mask = np.arange(SEQ) < np.array([len(piece) for piece in pieces])[:, None]
    return ids, mask


def _loss(weights: Mapping[str, Array], scalars: Mapping[str, Any], rows: tuple[Array, Array], norm: bool = False) -> dict[str, Array]:
    """The reference's mean loss over what the rows predict, and where asked for the norm of its gradient."""
    ids, mask = rows
    named = {f"parameters/{name}": np.asarray(value, np.float64) for name, value in weights.items()}
    inputs = {"input_ids": ids, "mask": mask, **named}
    found = {"loss": reference.evaluate("language_model_loss", inputs, scalars)["loss"]}
    if norm:
        gradients = reference.differentiate("language_model_loss", inputs, scalars, {"loss": np.ones(())}, ["parameters"])
        found["norm"] = np.sqrt(sum(float(np.sum(np.square(value))) for value in gradients.values()))
    return found
