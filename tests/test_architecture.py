"""config.json: whatever transformers reads there is computed as it computes it, or refused by its key."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.impl.apr_write import export_apr
from blackswan.impl.architecture import FIXED, to_huggingface
from blackswan.impl.checkpoint import load_checkpoint, load_decoder
from blackswan.impl.config import RopeScaling
from blackswan.impl.decoder import Decoder

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
ABSENT = "absent"
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    **{"rope_theta": 50.0},
}
COMPUTED: dict[str, list[Any]] = {
    "num_key_value_heads": [1, 4, None, ABSENT],
    "head_dim": [8, None, ABSENT],
    "num_attention_heads": [2],
    "hidden_act": [ABSENT, None],
    "vocab_size": [ABSENT],
    "intermediate_size": [32],
    "num_hidden_layers": [1],
    "rms_norm_eps": [0.5, ABSENT],
    "max_position_embeddings": [7],
    "tie_word_embeddings": [True, ABSENT],
    "rope_theta": [500.0, ABSENT],
    "rope_parameters": [
        {"rope_theta": 500.0},
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        LLAMA3,
        LLAMA3 | {"partial_rotary_factor": 0.5},
        *({key: value for key, value in LLAMA3.items() if key != left_out} for left_out in LLAMA3),
        LLAMA3 | {"low_freq_factor": 4.0},
        LLAMA3 | {"high_freq_factor": 0.5},
        LLAMA3 | {"factor": 0.5},
        LLAMA3 | {"factor": "8"},
        LLAMA3 | {"attention_factor": 2.0},
        LLAMA3 | {"rope_type": "yarn"},
        {"rope_theta": 50.0, "factor": 8.0},
    ],
    "rope_scaling": [{"rope_type": "default", "rope_theta": 500.0}, {"type": "dynamic", "factor": 4.0}, {"type": "default"}, LLAMA3],
}
"""Keys that say what is computed, with values away from `SIZES` and the defaults."""
OTHERWISE: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu"],
    "attention_bias": [True],
    "mlp_bias": [True],
    "attention_dropout": [0.5],
    "is_causal": [False],
    "is_encoder_decoder": [True],
    "use_sliding_window": [True],
    "use_bidirectional_attention": [True],
    "sliding_window": [2],
    "attention_chunk_size": [2],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"], ["chunked_attention"] * 2],
    "partial_rotary_factor": [0.5],
    "pad_token_id": [3],
    "initializer_range": [0.5],
    "use_cache": [False],
    "dtype": ["float32"],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "kv_sharing_modes": [["a"]],
    "per_layer_config": [{"0": {"hidden_size": 8}}],
    "quantization_config": [{"quant_method": "bitsandbytes", "load_in_4bit": True}],
    "text_config": [{"hidden_size": 8}],
    "decoder": [{"hidden_size": 8}],
    "generator": [{"hidden_size": 8}],
    "auto_map": [{"AutoModelForCausalLM": "modeling.Other"}],
}
"""Keys that transformers reads and that may change what it computes, with values that do or that look as if they did."""
WITHOUT_EFFECT = {"return_dict", "gradient_checkpointing", "name_or_path", "to_dict", "get_text_config", "sub_configs", "is_heterogeneous"}
"""Attributes of a configuration that are methods, properties of it or settings of the program, no keys of a file."""
FAMILIES = ("llama", "qwen2", "qwen3")


def folder_of(tmp_path: Path, family: str, **changes: Any) -> Path:
    """A checkpoint of transformers' own, whose config.json is then changed; weights are those of the sizes in it."""
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if key in SIZES or key == "tie_word_embeddings"}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{key: value for key, value in sizes.items() if value not in (None, ABSENT)})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        if any(name.startswith("rope_") for name in changes):
            written.pop(key, None)
    changed = {key: value for key, value in {**written, **changes}.items() if value != ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    return tmp_path


def logits(folder: Path, attention: str) -> torch.Tensor:
    ids = torch.arange(1, 11)[None]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return found[0] if isinstance(found, tuple) else found.logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for keys in (COMPUTED, OTHERWISE) for key, values in keys.items() for value in values],
    ids=lambda each: str(each)[:40],
)
@pytest.mark.filterwarnings("ignore")
def test_a_key_gives_the_logits_of_transformers_or_is_refused_by_name(tmp_path: Path, family: str, key: str, value: Any) -> None:
    folder = folder_of(tmp_path, family, **{key: value})
    refusal = None
    try:
        decoder = load_decoder(folder, dtype=torch.float32)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert key in refusal or "the architecture says" in refusal
        with pytest.raises(ValueError, match=re.escape(refusal)):
            RealInput(folder, Path("corpus.jsonl")).check()  # what training refuses is not attacked either
        return
    ids = torch.arange(1, 11)[None]
    with torch.no_grad():
        ours = decoder.logits(decoder(ids, torch.ones_like(ids, dtype=torch.bool)))
        torch.testing.assert_close(ours, logits(folder, "eager"), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_key_that_transformers_reads_is_known(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    config, seen = AutoConfig.for_model(family, **SIZES), set[str]()
    original = PreTrainedConfig.__getattribute__

    def recording(self: PreTrainedConfig, name: str) -> Any:
        seen.add(name)
        return original(self, name)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", recording)
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.arange(6)[None])
    monkeypatch.undo()
    keys = {name for name in seen if not name.startswith("_") and "_plan" not in name and not name.startswith("vision_")}
    known = {*SIZES, *COMPUTED, *OTHERWISE, *FIXED, *WITHOUT_EFFECT, "dict_dtype_to_str"}
    assert keys - known == set()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_llama3_scaling_is_computed_in_every_layer_of_positions_beyond_the_original(tmp_path: Path, family: str) -> None:
    """Over a head of 32 every band has frequencies: kept, mixed and divided; and what is read is written as transformers reads it."""
    scaling = LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 32}
    folder = folder_of(tmp_path / "model", family, head_dim=32, max_position_embeddings=64, rope_parameters=scaling)
    decoder = load_decoder(folder, dtype=torch.float32)
    assert decoder.config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours = decoder.logits(decoder(ids, torch.ones_like(ids, dtype=torch.bool)))
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)(input_ids=ids).logits
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
        unscaled = Decoder(dataclasses.replace(decoder.config, rope_scaling=None), load_checkpoint(folder).tensors, dtype=torch.float32)
        assert float((unscaled.logits(unscaled(ids, torch.ones_like(ids, dtype=torch.bool))) - theirs).abs().max()) > 4e-3
        (folder / "config.json").write_text(json.dumps(to_huggingface(decoder.config)))
        again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)(input_ids=ids).logits
        assert torch.equal(theirs, again)
    assert load_decoder(folder, dtype=torch.float32).config == decoder.config


def test_no_apr_file_is_written_of_a_scaled_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama", rope_parameters=LLAMA3)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"rope_scaling is of the rope_type 'llama3', which \.apr files have no key for"):
        export_apr(load_checkpoint(folder), folder, tmp_path / "model.apr")
    assert not (tmp_path / "model.apr").exists()
