"""`python -m impl pretrain`: what it prints, how it ends, and bad input, which writes nothing. PRE-COMMAND asks what it computes."""

from pathlib import Path

import pytest

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl import pretrain_run
from blackswan.impl.__main__ import main
from blackswan.impl.token_shards import write_shards


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command on a small stream, in the folder of the tokens."""
    monkeypatch.chdir(tmp_path)
    write_shards(Path("tokens"), [[(7 * token) % 1024 for token in range(90)]], 1024)
    return ["pretrain", "--model", str(CHECKPOINT), "--tokens", "tokens", "--output", "run", "--seq", "16", "--batch", "2"]


def test_a_run_says_what_it_does(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--epochs", "2", "--validation", "tokens"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "qwen2, 4 layers; 90 tokens, 6 steps"
    assert "epoch 2/2: held-out loss" in printed.out
    assert "run/checkpoints/step-00000006 holds the model" in printed.out
    assert printed.err.startswith("step 1/6: loss ")
    assert main([*given, "--epochs", "2"]) == 4
    assert "run holds a run; resume it" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain_run, "pretrain", interrupted)
    for state, said in (("no state", False), ("state", True)):
        (Path("run") / state).mkdir(parents=True)
        assert main(given) == 2
        assert ("--resume" in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--seq", "1024"], 4, "--seq: 1024 tokens; the model was made for at most 512 positions"),
        (["--seed", "-1"], 4, "--seed: -1; expected an integer from 0"),
        (["--schedule", "cosin"], 4, "--schedule: 'cosin'; expected one of constant, linear, cosine"),
        (["--epochs", "0"], 4, "epochs is 0: expected a positive integer"),
        (["--batch", "0"], 4, "batch 0 and seq 16: expected at least one row"),
        (["--learning-rate", "nan"], 4, "learning_rate is nan"),
        (["--tokens", "nowhere"], 4, "nowhere/index.json: no such file"),
        (["--model", "nowhere"], 4, "nowhere"),
        (["--device", "cuda:15"], 6, "device 'cuda:15'"),
        (["--lerning-rate", "1"], 4, "the nearest is --learning-rate"),
    ],
)
def test_bad_input_writes_nothing(
    options: list[str], status: int, message: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*given, *options]) == status
    assert message in capsys.readouterr().err
    assert not Path("run").exists()
