"""`blackswan vet-checkpoint`: an honest decoder holds; a wrong layer is found and its operation named; bad input is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.runner import checkpoint_command
from blackswan.impl import checkpoint
from blackswan.impl.apr_write import export_apr
from blackswan.impl.decoder import Decoder

load_decoder = checkpoint.load_decoder


def vetted(*arguments: str | Path) -> int:
    return main(["vet-checkpoint", *map(str, arguments)])


def test_the_shipped_checkpoint_holds_and_transformers_agrees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    assert vetted(CHECKPOINT, "--output", written) == 0
    said = capsys.readouterr()
    assert "3 of 3 held" in said.out
    assert "float32, whole, layers: 4 of 4" in said.err
    results = json.loads(written.read_text())["results"]
    assert [(each["dtype"], each["by"], len(each["outputs"])) for each in results] == [
        ("float32", "transformers", 1),
        ("float32", "cpu", 8),
        ("bfloat16", "cpu", 8),
    ]


def _theta_in_the_third_layer(decoder: Decoder) -> None:
    attention: Any = decoder.get_submodule("model.layers.2.self_attn")
    attention.config = replace(attention.config, theta=1e6)


def _keys_negated_in_the_second_layer(decoder: Decoder) -> None:
    decoder.get_parameter("model.layers.1.self_attn.k_proj.weight").neg_()


def _epsilon_in_the_last_norm(decoder: Decoder) -> None:
    decoder.model.norm.eps = 1.0


def _layers_swapped(decoder: Decoder) -> None:
    layers = decoder.model.layers
    layers[1], layers[2] = layers[2], layers[1]


@pytest.mark.parametrize(
    ("plant", "dtype", "named"),
    [
        (_theta_in_the_third_layer, "float32", "hidden/model.layers.2 is the first to leave …; model.layers.2.self_attn.q_rope (rope): "),
        (
            _keys_negated_in_the_second_layer,
            "bfloat16",
            "hidden/model.layers.1 is the first to leave …; model.layers.1.self_attn.k_proj (linear): ",
        ),
        (_epsilon_in_the_last_norm, "bfloat16", "hidden/model.norm is the first to leave …; model.norm (rms_norm): "),
        (
            _layers_swapped,
            "float32",
            "hidden/model.layers.1 is the first to leave …; model.layers.1.input_layernorm (rms_norm): is called with",
        ),
    ],
)
def test_a_planted_bug_is_found_and_its_place_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plant: Callable[[Decoder], None], dtype: str, named: str
) -> None:
    def planted(*arguments: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
        decoder = load_decoder(*arguments, dtype=dtype, device=device)
        with torch.no_grad():
            plant(decoder)
        return decoder

    monkeypatch.setattr(checkpoint, "load_decoder", planted)
    assert vetted(CHECKPOINT, "--dtype", dtype, "--no-transformers") == checkpoint_command.EXIT_FAILED
    said = capsys.readouterr().out
    for part in named.split("…"):
        assert part in said


def test_transformers_disagrees_with_a_reference_that_reads_another_theta(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = checkpoint_command.Vetting.of
    monkeypatch.setattr(
        checkpoint_command.Vetting, "of", lambda given: replace(found := of(given), scalars={**found.scalars, "theta": 2e4})
    )
    assert vetted(CHECKPOINT, "--dtype", "float32") == checkpoint_command.EXIT_FAILED
    assert "FALSIFIED  float32, transformers" in capsys.readouterr().out


def test_an_apr_file_is_vetted_without_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_apr(checkpoint.load_checkpoint(CHECKPOINT), CHECKPOINT, tmp_path / "m.apr")
    assert vetted(tmp_path / "m.apr", "--dtype", "bfloat16") == 0
    said = capsys.readouterr().out
    assert "1 of 1 held" in said
    assert "transformers is not asked: it reads folders, and this is a file" in said


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "gelu"), ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}), ("model_type", "bert")]
)
def test_a_config_that_is_not_computed_is_refused_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": None, key: value}))
    assert vetted(tmp_path / "m") == checkpoint_command.EXIT_USAGE
    assert f"{path}: {key} is " in capsys.readouterr().err


def test_texts_and_folders_that_cannot_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n\n \n")
    assert vetted(CHECKPOINT, "--text", tmp_path / "empty.txt") == checkpoint_command.EXIT_USAGE
    assert vetted(CHECKPOINT, "--tokens", "1") == checkpoint_command.EXIT_USAGE
    assert vetted(CHECKPOINT, "--text", tmp_path / "none.txt") == checkpoint_command.EXIT_USAGE
    assert vetted(tmp_path / "nothing") == checkpoint_command.EXIT_USAGE
    said = capsys.readouterr().err
    for part in ("no paragraph; expected text", "two tokens", "none.txt", "no such folder"):
        assert part in said
