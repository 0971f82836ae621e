"""Pre-training: the step against PyTorch's own optimiser, validation, checkpoints in transformers, resume, refusals."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl import pretrain as pretrain_module
from blackswan.impl.architecture import to_huggingface
from blackswan.impl.checkpoint import load_checkpoint, load_decoder
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import Decoder, parameter_count, random_tensors
from blackswan.impl.decoder_optimiser import DecoderAdamW, state_hash
from blackswan.impl.pretrain import LLAMA_370M, CheckpointFn, StepFn, ValFn, initial_decoder, random_decoder
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


def test_steps_are_those_of_torch() -> None:
    """torch.optim.AdamW with two groups and clip_grad_norm_, on the mean over the tokens predicted."""
    ours = random_decoder(TINY, seed=1)
    theirs = random_decoder(TINY, seed=1)
    theirs.requires_grad_(True)
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim == 1]
    optimiser = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    step = step_fn(ours, micro_batch=3)
    for number in range(3):
        given = batch(seed=number)
        result = step.train(given)
        loss = theirs.loss(given.input_ids, given.mask)
        optimiser.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(theirs.parameters(), 1.0)
        optimiser.step()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert result.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5, msg=name)


def test_every_parameter_moves_and_a_tied_head_is_no_second_one() -> None:
    decoder = random_decoder(TINY, seed=1)
    before = {name: value.clone() for name, value in decoder.named_parameters()}
    step = step_fn(decoder)
    step.train(batch())
    assert set(step.optimiser.parameters) == set(before)
    assert "lm_head.weight" not in before
    assert [name for name, value in decoder.named_parameters() if torch.equal(value, before[name])] == []


def test_an_exhausted_stream_is_no_step() -> None:
    step = step_fn(random_decoder(TINY))
    before = state_hash(step.optimiser.state(), step.optimiser.steps)
    assert step(iter(())) is None
    assert state_hash(step.optimiser.state(), step.optimiser.steps) == before


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


def test_validation_weighs_by_tokens_and_is_nan_without_any() -> None:
    decoder = random_decoder(TINY, seed=2)
    given = [batch(rows=3, seed=1), batch(rows=1, seed=2)]
    with torch.no_grad():
        parts = [(float(decoder.loss(each.input_ids, each.mask)), each.predicted) for each in given]
    expected = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
    assert parts[0][1] != parts[1][1]
    assert ValFn(decoder, 2)(given) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(ValFn(decoder, 2)([]))


@pytest.mark.parametrize(
    ("value", "name", "where"),
    [
        (math.nan, "model.layers.1.mlp.up_proj.weight", "parameter model.layers.1.mlp.up_proj.weight: 1 NaN"),
        (math.inf, "model.layers.0.self_attn.k_proj.bias", "parameter model.layers.0.self_attn.k_proj.bias: 1 infinite"),
        (1e37, "model.norm.weight", "norm"),
    ],
)
def test_what_is_not_finite_stops_the_run_and_changes_nothing(value: float, name: str, where: str) -> None:
    decoder = random_decoder(TINY, seed=1)
    step = step_fn(decoder)
    step.train(batch())
    with torch.no_grad():
        decoder.get_parameter(name).view(-1)[0] = value
    before = {key: tensor.clone() for key, tensor in step.optimiser.state().items()}
    with pytest.raises(FloatingPointError, match=f"step 2: .*{where}"):
        step.train(batch(seed=1))
    assert step.optimiser.steps == 1
    for key, tensor in step.optimiser.state().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True)
    assert all(parameter.grad is None for parameter in decoder.parameters())


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


def test_without_a_tokenizer_there_is_no_checkpoint_function(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        CheckpointFn(random_decoder(TINY), tmp_path / "tokenizer.json", tmp_path / "checkpoints")


def test_architecture_and_weights_are_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ((CHECKPOINT, None), (None, CHECKPOINT)):
        with pytest.raises(ValueError, match="give both"):
            initial_decoder(*given)
    shipped = initial_decoder(CHECKPOINT, CHECKPOINT)
    assert all(torch.equal(value, load_checkpoint(CHECKPOINT).tensors[name]) for name, value in shipped.named_parameters())
    monkeypatch.setattr(pretrain_module, "LLAMA_370M", TINY)
    assert initial_decoder().config == TINY
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="encoder"):
        initial_decoder(encoder, CHECKPOINT)


def test_the_default_has_the_parameters_that_transformers_counts() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(LlamaConfig(**to_huggingface(LLAMA_370M)))
    assert parameter_count(LLAMA_370M) == sum(value.numel() for value in theirs.parameters()) == 373_509_120


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


def test_a_run_goes_on_after_a_kill_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = random_decoder(TINY, seed=1)
    expected = run(tmp_path / "whole", tmp_path / "data", decoder=whole)
    for stop in (1, 7, 9, len(expected.steps)):
        output = tmp_path / f"killed-{stop}"
        with pytest.raises(Killed):
            run(output, tmp_path / "data", stop=stop)
        decoder = random_decoder(TINY, seed=1)
        found = run(output, tmp_path / "data", resume=True, decoder=decoder)
        assert found.steps == expected.steps[stop - stop % 2 :]
        assert found.state_hash == expected.state_hash
        assert all(torch.equal(one, other) for one, other in zip(decoder.parameters(), whole.parameters(), strict=True))
        assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [epoch.checkpoint.name for epoch in expected.epochs]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    expected = run(tmp_path / "run", tmp_path / "data")
    again = run(tmp_path / "run", tmp_path / "data", resume=True)
    assert (again.steps, again.epochs, again.state_hash) == ((), (), expected.state_hash)
    with pytest.raises(FileExistsError, match="resume"):
        run(tmp_path / "run", tmp_path / "data")


def test_a_state_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "run", tmp_path / "data", stop=5)
    settings = PretrainSettings(epochs=2, micro_batch=3, learning_rate=2e-2)
    given = batches(tmp_path / "data")
    with pytest.raises(ValueError, match=r"learning_rate is 0\.01, this run has 0\.02"):
        pretrain(random_decoder(TINY, seed=1), given, None, settings, tmp_path / "run", TOKENIZER, resume=True)
    path = tmp_path / "run" / "state" / "state.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("exp_avg_sq/"))
    tensors[name].view(-1)[0] += 1
    save_file(tensors, path)
    decoder = random_decoder(TINY, seed=1)
    before = {key: value.clone() for key, value in decoder.named_parameters()}
    with pytest.raises(ValueError, match=r"state\.safetensors.*SHA-256"):
        run(tmp_path / "run", tmp_path / "data", resume=True, decoder=decoder)
    assert all(torch.equal(value, before[key]) for key, value in decoder.named_parameters())


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


@pytest.mark.parametrize(
    "change", [{"epochs": 0}, {"micro_batch": 1.5}, {"save_every": 0}, {"learning_rate": math.nan}, {"weight_decay": -1}]
)
def test_settings_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        PretrainSettings(**change)  # type: ignore[arg-type]  # wrong on purpose


def test_the_hash_is_the_same_in_another_process() -> None:
    source = (
        "from tests.test_impl_pretrain import *\n"
        "step = step_fn(random_decoder(TINY, seed=1))\nstep.train(batch())\n"
        "print(state_hash(step.optimiser.state(), step.optimiser.steps))"
    )
    step = step_fn(random_decoder(TINY, seed=1))
    step.train(batch())
    environment = {**os.environ, "PYTHONPATH": ".", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == state_hash(step.optimiser.state(), step.optimiser.steps)
