"""Token shards: written and read back, batches of an epoch, damage, the command."""

from pathlib import Path

import pytest
import torch

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.impl.__main__ import main
from blackswan.impl.token_shards import TokenBatch, TokenBatches, TokenShards, load_encoder, tokenize, write_shards


def stream(folder: Path, count: int, shard_tokens: int = 7) -> TokenShards:
    write_shards(folder, [list(range(count))], count, shard_tokens)
    return TokenShards(folder, count)


@pytest.mark.parametrize(("vocab", "width"), [(2**16, 2), (2**16 + 1, 4)])
def test_ids_are_little_endian_and_as_wide_as_the_vocabulary_needs(tmp_path: Path, vocab: int, width: int) -> None:
    write_shards(tmp_path / "tokens", [[vocab - 1, 258]], vocab)
    content = (tmp_path / "tokens" / "shard-00000.bin").read_bytes()
    assert content == (vocab - 1).to_bytes(width, "little") + (258).to_bytes(width, "little")


def test_a_bad_document_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"document 1: token 2 is 9, but the vocabulary has 9 tokens"):
        write_shards(tmp_path / "tokens", [[1], [2, 3, 9]], 9)
    with pytest.raises(ValueError, match="no tokens"):
        write_shards(tmp_path / "tokens", [[]], 9)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_stays(tmp_path: Path) -> None:
    stream(tmp_path / "tokens", 5)
    with pytest.raises(FileExistsError, match="exists"):
        write_shards(tmp_path / "tokens", [[0]], 5)
    assert len(TokenShards(tmp_path / "tokens", 5)) == 5


def test_rows_without_a_token_to_predict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch 2 and seq 1"):
        TokenBatches(stream(tmp_path / "tokens", 5), batch=2, seq=1)


def test_a_plain_text_is_one_document(tmp_path: Path) -> None:
    encoder = load_encoder(CHECKPOINT / "tokenizer.json")
    (tmp_path / "plain.txt").write_text("cd /srv\nls -l\n")
    (tmp_path / "corpus.jsonl").write_text('{"text": "cd /srv\\nls -l\\n"}\n')
    one, other = (list(tokenize(tmp_path / name, encoder, 1)) for name in ("plain.txt", "corpus.jsonl"))
    assert one == other


@pytest.mark.parametrize("line", ['{"label": 1}', '{"text": 3}', "[]", "{", '{"text": "\\ud800"}'])
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "ls"}\n' + line + "\n")
    assert main(["tokenize", str(corpus), "--model", str(CHECKPOINT), "--output", str(tmp_path / "tokens")]) == 4
    assert f"{corpus}:2: " in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()


def test_a_model_without_an_end_token_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    given = ["tokenize", str(CORPUS_HELDOUT), "--model", str(tmp_path / "model"), "--output", str(tmp_path / "tokens")]
    assert main(given) == 4
    assert "--end-token" in capsys.readouterr().err
    assert main([*given, "--end-token", "0"]) == 0


def test_predicted_counts_pairs_within_rows() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True], [True, True, True]])
    assert TokenBatch(torch.zeros(3, 3, dtype=torch.int64), mask).predicted == 3
