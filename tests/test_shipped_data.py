"""The shipped corpus and checkpoint: labels that the text alone decides, splits that do not overlap, files that are what they say."""

import hashlib
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.shipped_data.labeller import executed_lines, label, splits_words
from benchmarks.shipped_data.language_model import VOCABULARY
from benchmarks.shipped_data.make import main
from benchmarks.shipped_data.scripts import HELDOUT_COUNTS, TRAIN_COUNTS, normalise
from blackswan.falsifiers.data import CHECKPOINT, CLASSES, CORPUS_HELDOUT, CORPUS_TRAIN, DATA, PROVENANCE

SPLITS = {"train": CORPUS_TRAIN, "heldout": CORPUS_HELDOUT}


def rows(path: Path) -> list[tuple[str, int]]:
    return [(row["input"], row["label"]) for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[tuple[str, int]]]:
    return {name: rows(path) for name, path in SPLITS.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def provenance() -> dict:
    return json.loads(PROVENANCE.read_text())


# The corpus


def test_every_label_follows_from_the_text_alone(corpus):
    wrong = [(text, given, label(text)) for split in corpus.values() for text, given in split if label(text) != given]
    assert not wrong, f"{len(wrong)} labels differ, first: given {wrong[0][1]}, derived {wrong[0][2]}:\n{wrong[0][0]}"


def test_no_script_occurs_twice_even_under_other_names(corpus):
    keys = [normalise(text) for split in corpus.values() for text, _ in split]
    assert len(set(keys)) == len(keys)


def test_normalising_forgets_names_and_numbers_and_nothing_else():
    assert normalise("sleep 3\ncd /srv/app") == normalise("sleep 16\ncd /opt/web")
    assert normalise("cd /srv/app || exit 1") != normalise("cd /srv/app")
    assert normalise('cp "$src" /srv/app') != normalise("cp $src /srv/app")


def test_scripts_have_the_length_of_scripts(corpus, tokenizer):
    for split in corpus.values():
        assert all(4 <= text.count("\n") <= 17 for text, _ in split)
        assert all(25 <= len(encoding.ids) <= 256 for encoding in tokenizer.encode_batch([text for text, _ in split]))


def test_the_same_characters_in_another_order_are_another_class(corpus):
    """No bag of words, or of characters, tells such scripts apart: only order does."""
    for split in corpus.values():
        bags = defaultdict(list)
        for text, given in split:
            bags["".join(sorted(text))].append(given)
        ambiguous = [labels for labels in bags.values() if len(set(labels)) > 1]
        seen = Counter(given for labels in ambiguous for given in set(labels))
        assert sum(map(len, ambiguous)) > 0.4 * len(split)
        assert min(seen[index] for index in range(len(CLASSES))) > 0.02 * len(split)


# The labeller, on scripts that the generator does not make


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (0, '[ -n "$DIR" ] || exit 1\nrm -rf "$DIR"/*\n'),
        (4, 'rm -rf "$DIR"/*\n[ -n "$DIR" ] || exit 1\n'),
        (4, '[ -n "$OTHER" ] || exit 1\nrm -rf "$DIR"/*\n'),
        (4, '[ -n "$DIR" ] || exit 1\nDIR="$2"\nrm -rf "$DIR"/*\n'),
        (4, 'clean() {\n  rm -rf "$DIR"/*\n}\nclean\n[ -n "$DIR" ] || exit 1\n'),
        (0, 'clean() {\n  rm -rf "$DIR"/*\n}\n[ -n "$DIR" ] || exit 1\nclean\n'),
        (0, 'clean() {\n  rm -rf "$DIR"/*\n}\n'),
        (0, "# cp $a /b\ncat <<EOF\nuseradd -m ops\n$a\nEOF\n"),
        (4, "echo 'x' >> /etc/x\ncp $a /b\nrm -rf ./*\n"),
        (3, "echo 'x' >> /etc/x\ngrep -qF 'x' /etc/x && exit 0\n"),
        (3, "grep -qF 'y' /etc/x && exit 0\necho 'x' >> /etc/x\n"),
        (2, "flock 9\nflock -u 9\n./bin/count --update /c\n"),
        (1, "set -f; IFS=\nset +f; unset IFS\nls -l $a\n"),
    ],
)
def test_labeller(expected, text):
    assert label(text) == expected


def test_expansions_that_split_words():
    splitting = ("cp $a /b", "cp x$a /b", "ls $(pwd)", 'ls "$(cat $a)"', "echo ${a}", "[[ -n $a ]] && ls $a", "x=$(cat $a)", "y=1 ls $a")
    assert [line for line in splitting if not splits_words(line)] == []
    whole = ('cp "$a" /b', "echo '$a'", "[[ -n $a ]]", "x=$a", "x=$(pwd)", 'x="$(cat "$a")"', "case $a in", "x=$((RANDOM % 3))", "echo $?")
    assert [line for line in whole if splits_words(line)] == []


def test_execution_order_follows_calls():
    assert list(executed_lines("f() {\n  one\n}\n# no\ntwo\nf\n\nthree <<E\nfour\nE\n")) == ["two", "one", "three <<E"]


# The tokenizer


def test_every_text_survives_the_tokenizer(corpus, tokenizer):
    texts = [text for split in corpus.values() for text, _ in split] + ["", "ø → \x00 \r\n\t字", "<pad", " "]
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        assert max(encoding.ids, default=0) < VOCABULARY


# The checkpoint


def test_the_checkpoint_predicts_heldout_scripts_and_needs_its_biases(corpus, provenance):
    from transformers import Qwen2ForCausalLM

    from benchmarks.shipped_data.language_model import encode, mean_loss, without_biases

    model = Qwen2ForCausalLM.from_pretrained(CHECKPOINT).eval()
    sample = encode([text for text, _ in corpus["heldout"][:24]], CHECKPOINT / "tokenizer.json")
    loss, bare = mean_loss(model, sample), mean_loss(without_biases(model), sample)
    assert loss < 0.2 * math.log(VOCABULARY)
    assert bare > loss + 0.2
    assert loss == pytest.approx(provenance["checkpoint"]["losses"]["heldout"], rel=0.15)


# Provenance and the command


def test_the_provenance_is_that_of_the_shipped_files(provenance):
    shipped = {path.relative_to(DATA).as_posix(): path for folder in ("corpus", "checkpoint") for path in (DATA / folder).iterdir()}
    digests = {
        name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for name, path in shipped.items()
    }
    assert digests == provenance["files"]


def test_tokenizer_checkpoint_and_baseline_belong_to_the_shipped_corpus(provenance):
    corpus_digest = provenance["files"]["corpus/train.jsonl"]["sha256"]
    assert {provenance[section]["corpus"] for section in ("tokenizer", "checkpoint", "baseline")} == {corpus_digest}
    assert provenance["checkpoint"]["tokenizer"] == provenance["files"]["checkpoint/tokenizer.json"]["sha256"]
    assert provenance["corpus"]["counts"] == {"train": list(TRAIN_COUNTS), "heldout": list(HELDOUT_COUNTS)}
    assert all(0.4 < accuracy < 0.75 for accuracy in provenance["baseline"]["accuracy"].values())


def test_the_command_makes_the_same_corpus_and_tokenizer_elsewhere(tmp_path, provenance):
    assert main(["corpus", "--output", str(tmp_path)]) == 0
    assert main(["tokenizer", "--output", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "PROVENANCE.json").read_text())
    corpora = ("corpus/heldout.jsonl", "corpus/train.jsonl")
    assert {name: made["files"][name] for name in corpora} == {name: provenance["files"][name] for name in corpora}
    assert made["tokenizer"]["corpus"] == provenance["tokenizer"]["corpus"]
    found, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path / "checkpoint", CHECKPOINT))
    assert (found["model"], found["added_tokens"]) == (shipped["model"], shipped["added_tokens"])


@pytest.mark.parametrize(("step", "missing"), [("tokenizer", "train.jsonl"), ("checkpoint", "tokenizer.json"), ("baseline", "train.jsonl")])
def test_a_step_without_its_input_says_what_to_do(tmp_path, capsys, step, missing):
    assert main([step, "--output", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert missing in message
    assert "python -m benchmarks.shipped_data.make" in message
    assert not list(tmp_path.iterdir())
