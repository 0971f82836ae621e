"""Pre-training: what a step and a run refuse, checkpoints in transformers, and what a run leaves to resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl.checkpoint import load_decoder
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import Decoder, random_tensors
from blackswan.impl.decoder_optimiser import DecoderAdamW
from blackswan.impl.pretrain import CheckpointFn, StepFn, random_decoder
from blackswan.impl.pretrain_run import PretrainResult, PretrainSettings, PretrainStep, pretrain
from blackswan.impl.token_shards import TokenBatch, TokenBatches, TokenShards, write_shards
from blackswan.impl.tokens import load_tokenizer

TINY = DecoderConfig("qwen2", 32, 16, 24, 2, 2, 1, 8, 1e-6, 1e4, True, 512)
TOKENIZER = CHECKPOINT / "tokenizer.json"


def batch(rows: int = 4, seq: int = 8, seed: int = 0) -> TokenBatch:
    """Rows of different lengths, 2 tokens or more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, seq + 1, (rows, 1), generator=generator)
    return TokenBatch(torch.randint(0, TINY.vocab, (rows, seq), generator=generator), torch.arange(seq) < lengths)


def step_fn(decoder: Decoder, micro_batch: int = 4, steps: int = 6) -> StepFn:
    return StepFn(decoder, total_steps=steps, micro_batch=micro_batch, learning_rate=1e-2, warmup_fraction=0.0, schedule="constant")


def batches(folder: Path, count: int = 200, seed: int | None = 5) -> TokenBatches:
    if not folder.exists():
        write_shards(folder, [[(7 * token * token + 3) % TINY.vocab for token in range(count)]], TINY.vocab, 60)
    return TokenBatches(TokenShards(folder, TINY.vocab), batch=4, seq=9, seed=seed)


def test_a_row_of_one_token_adds_nothing() -> None:
    full, alone = batch(rows=2, seed=3), torch.zeros(1, 8, dtype=torch.bool)
    alone[0, 0] = True
    both = TokenBatch(torch.cat([full.input_ids, full.input_ids[:1]]), torch.cat([full.mask, alone]))
    results = [step_fn(random_decoder(TINY, seed=1), micro_batch=1).train(given) for given in (full, both)]
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="no next token"):
        step_fn(random_decoder(TINY)).train(TokenBatch(full.input_ids[:1], alone))


def test_the_schedule_ends() -> None:
    step = step_fn(random_decoder(TINY), steps=1)
    step.train(batch())
    with pytest.raises(IndexError, match="ends after 1 steps"):
        step.train(batch())


def test_what_cannot_be_trained_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        DecoderAdamW(Decoder(TINY, random_tensors(TINY, 0), dtype=torch.bfloat16), 0.1)
    wide = replace(TINY, hidden=64, intermediate=64, head_dim=32)
    with pytest.raises(ValueError, match="NF4"):
        DecoderAdamW(Decoder(wide, random_tensors(wide, 0), dtype=torch.float32, nf4=True), 0.1)


def test_a_checkpoint_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    decoder = load_decoder(CHECKPOINT, dtype=torch.float32)
    StepFn(decoder, total_steps=1, micro_batch=4, learning_rate=1e-3, warmup_fraction=0.0).train(batch())
    folder = CheckpointFn(decoder, TOKENIZER, tmp_path)(1)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = batch(seed=4)
    whole = torch.ones_like(given.mask)
    with torch.no_grad():
        expected = theirs(input_ids=given.input_ids, attention_mask=whole.long()).logits
        torch.testing.assert_close(decoder.logits(decoder(given.input_ids, whole)), expected, rtol=1e-4, atol=1e-4)
    text = "rm -rf build"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == load_tokenizer(folder, 64).encode(text)


class Killed(Exception):  # noqa: N818
    """Ends a run from outside."""


def run(
    output: Path, data: Path, *, resume: bool = False, stop: int | None = None, decoder: Decoder | None = None, epochs: int = 2
) -> PretrainResult:
    def on_step(step: PretrainStep) -> None:
        if step.step == stop:
            raise Killed

    settings = PretrainSettings(epochs=epochs, micro_batch=3, learning_rate=1e-2, save_every=2)
    given = random_decoder(TINY, seed=1) if decoder is None else decoder
    return pretrain(given, batches(data), batches(data, seed=None), settings, output, TOKENIZER, resume=resume, on_step=on_step)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    expected = run(tmp_path / "run", tmp_path / "data")
    again = run(tmp_path / "run", tmp_path / "data", resume=True)
    assert (again.steps, again.epochs, again.state_hash) == ((), (), expected.state_hash)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [epoch.checkpoint.name for epoch in expected.epochs]
    with pytest.raises(FileExistsError, match="resume"):
        run(tmp_path / "run", tmp_path / "data")


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [[3]], TINY.vocab)
    with pytest.raises(ValueError, match="1 tokens; expected at least two"):
        run(tmp_path / "run", tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_only_step_has_the_rate_0_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [[3, 1, 2]], TINY.vocab)
    with pytest.raises(ValueError, match="one step, in the warm-up's rate of 0"):
        run(tmp_path / "run", tmp_path / "data", epochs=1)
    assert not (tmp_path / "run").exists()
