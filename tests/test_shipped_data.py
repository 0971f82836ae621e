"""The shipped corpus and checkpoint: labels that the text alone decides, splits that do not overlap, files that are what they say."""

import hashlib
import json
import math
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from blackswan.falsifiers.data import CHECKPOINT, CLASSES, CORPUS_HELDOUT, CORPUS_TRAIN, DATA, PROVENANCE
from blackswan.falsifiers.data.labeller import executed_lines, label, splits_words
from blackswan.falsifiers.data.language_model import VOCABULARY, train_tokenizer
from blackswan.falsifiers.data.make import corpus_text, main
from blackswan.falsifiers.data.scripts import HELDOUT_COUNTS, TRAIN_COUNTS, make_corpus, make_split, normalise

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


def test_the_corpus_is_made_again_byte_for_byte():
    for path, examples in zip(SPLITS.values(), make_corpus(), strict=True):
        assert corpus_text(examples).encode() == path.read_bytes(), f"{path.name} is not what the generator makes"


def test_the_seed_decides():
    first, again, other = (make_split((4, 4, 4, 4, 4), set(), random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_label_follows_from_the_text_alone(corpus):
    wrong = [(text, given, label(text)) for split in corpus.values() for text, given in split if label(text) != given]
    assert not wrong, f"{len(wrong)} labels differ, first: given {wrong[0][1]}, derived {wrong[0][2]}:\n{wrong[0][0]}"


@pytest.mark.parametrize(("name", "counts"), [("train", TRAIN_COUNTS), ("heldout", HELDOUT_COUNTS)])
def test_class_counts(corpus, name, counts):
    found = Counter(given for _, given in corpus[name])
    assert [found[index] for index in range(len(CLASSES))] == list(counts)
    assert 1.5 <= max(counts) / min(counts) <= 3


def test_no_script_occurs_twice_even_under_other_names(corpus):
    keys = [normalise(text) for split in corpus.values() for text, _ in split]
    assert len(set(keys)) == len(keys)


def test_the_generator_repeats_nothing_it_has_seen():
    seen: set[str] = set()
    first, second = (make_split((3, 3, 3, 3, 3), seen, random.Random(1)) for _ in range(2))
    assert not {normalise(example.text) for example in first} & {normalise(example.text) for example in second}


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


@pytest.mark.parametrize(
    "line", ["cp $a /b", "cp x$a /b", "ls $(pwd)", 'ls "$(cat $a)"', "echo ${a}", "[[ -n $a ]] && ls $a", "x=$(cat $a)", "y=1 ls $a"]
)
def test_an_expansion_that_splits(line):
    assert splits_words(line)


@pytest.mark.parametrize(
    "line",
    [
        'cp "$a" /b',
        "echo '$a'",
        "[[ -n $a ]]",
        "x=$a",
        "x=$(pwd)",
        'x="$(cat "$a")"',
        "case $a in",
        "x=$((RANDOM % 3))",
        'ls "$(cat "$a")"',
        "echo $?",
    ],
)
def test_an_expansion_that_does_not_split(line):
    assert not splits_words(line)


def test_execution_order_follows_calls():
    assert list(executed_lines("f() {\n  one\n}\n# no\ntwo\nf\n\nthree <<E\nfour\nE\n")) == ["two", "one", "three <<E"]


# The tokenizer


def test_every_text_survives_the_tokenizer(corpus, tokenizer):
    texts = [text for split in corpus.values() for text, _ in split] + ["", "ø → \x00 \r\n\t字", "<pad", " "]
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        assert max(encoding.ids, default=0) < VOCABULARY


def test_the_tokenizer_is_made_again(corpus, tmp_path):
    train_tokenizer([text for text, _ in corpus["train"]], tmp_path / "tokenizer.json")
    made, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, CHECKPOINT))
    assert made["model"] == shipped["model"]
    assert made["added_tokens"] == shipped["added_tokens"]


# The checkpoint


def expected_shapes(config: dict) -> dict[str, list[int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    outputs = {"q": hidden, "k": head * config["num_key_value_heads"], "v": head * config["num_key_value_heads"]}
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": [size, hidden] for name, size in outputs.items()}
        shapes |= {f"{prefix}self_attn.{name}_proj.bias": [size] for name, size in outputs.items()}
        shapes |= {f"{prefix}self_attn.o_proj.weight": [hidden, hidden], f"{prefix}mlp.down_proj.weight": [hidden, inner]}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
        shapes |= {f"{prefix}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    return shapes


def test_the_checkpoint_has_the_tensors_of_its_config(tokenizer):
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"], config["rms_norm_eps"]) == ("qwen2", True, 1e-6)
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["vocab_size"] == VOCABULARY == tokenizer.get_vocab_size()
    with safe_open(CHECKPOINT / "model.safetensors", framework="np") as tensors:
        assert {name: list(tensors.get_tensor(name).shape) for name in tensors.keys()} == expected_shapes(config)  # noqa: SIM118
        biases = [tensors.get_tensor(name) for name in tensors.keys() if name.endswith("_proj.bias")]  # noqa: SIM118
    assert all((bias**2).mean() ** 0.5 > 0.05 for bias in biases)
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 4_000_000


def test_the_checkpoint_predicts_heldout_scripts_and_needs_its_biases(corpus, provenance):
    from transformers import Qwen2ForCausalLM

    from blackswan.falsifiers.data.language_model import encode, mean_loss, without_biases

    model = Qwen2ForCausalLM.from_pretrained(CHECKPOINT).eval()
    sample = encode([text for text, _ in corpus["heldout"][:64]], CHECKPOINT / "tokenizer.json")
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


def test_the_command_makes_corpus_and_tokenizer_elsewhere(tmp_path, provenance):
    assert main(["corpus", "--output", str(tmp_path)]) == 0
    assert main(["tokenizer", "--output", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "PROVENANCE.json").read_text())
    corpora = ("corpus/heldout.jsonl", "corpus/train.jsonl")
    assert {name: made["files"][name] for name in corpora} == {name: provenance["files"][name] for name in corpora}
    assert made["tokenizer"]["corpus"] == provenance["tokenizer"]["corpus"]
    assert (tmp_path / "checkpoint" / "tokenizer.json").exists()


@pytest.mark.parametrize(("step", "missing"), [("tokenizer", "train.jsonl"), ("checkpoint", "tokenizer.json"), ("baseline", "train.jsonl")])
def test_a_step_without_its_input_says_what_to_do(tmp_path, capsys, step, missing):
    assert main([step, "--output", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert missing in message
    assert "python -m blackswan.falsifiers.data.make" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_bad_steps_are_refused(tmp_path, capsys, steps):
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "--output", str(tmp_path), f"--steps={steps}"])
    assert "at least 1" in capsys.readouterr().err


def test_paths_and_command_import_nothing_heavy():
    code = (
        "import sys, blackswan.falsifiers.data, blackswan.falsifiers.data.make; "
        "print({'torch', 'transformers', 'sklearn', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=DATA.parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
