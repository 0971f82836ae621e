"""`python -m impl`: what it prints and writes, its exit statuses, and what a stranger may try."""

import dataclasses
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import blackswan.contracts.__main__
from blackswan.contracts.fields import CONFIG
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl import fit as fitting
from blackswan.impl.__main__ import main
from blackswan.impl.checkpoint import save_checkpoint
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.fit import EpochRecord, StepRecord
from blackswan.impl.fused.step import backend_of
from blackswan.impl.ledger import reserve
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.progress import Progress, duration
from blackswan.impl.settings import HELP
from blackswan.impl.trainer import Trainer

TINY = DecoderConfig("qwen2", 1024, 16, 24, 1, 2, 1, 8, 1e-6, 1e4, True, 128)
WORDS = ("echo one", "rm -rf /", "cat two three", "sleep 1", "ls -l", "date +%s")
SMALL = ("--num-classes", "2", "--lora-rank", "2", "--max-seq-len", "32", "--batch-size", "4", "--no-quantize-nf4", "--epochs", "2")


def line(text: str, label: int) -> str:
    return json.dumps({"input": text, "label": label}) + "\n"


CORPUS = "".join(line(f"{WORDS[i % 6]} # {i}", (i % 6) % 2) for i in range(24))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save_checkpoint(folder, TINY, random_tensors(TINY, 0), CHECKPOINT / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.jsonl").write_text(CORPUS)
    assert main(["train", *at(model, folder), *SMALL, "--learning-rate", "3e-2"]) == 0
    return folder / "run"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus, which is the working directory."""
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def at(model: Path, folder: Path) -> list[str]:
    return ["--model", str(model), "--corpus", str(folder / "corpus.jsonl"), "--output", str(folder / "run")]


def files(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without what differs from time to time."""
    values = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in each.items() if key != "seconds"} for each in values]


# What goes right


def test_a_run_leaves_what_is_said(trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} == {
        *("run.json", "state", "last", "best", "metrics.jsonl", "config.yaml", "statistics.yaml", ".lock")
    }
    step = next(line for line in metrics(trained) if line["kind"] == "step")
    assert set(step) == {"kind", "step", "epoch", "loss", "accuracy", "gradient_norm", "learning_rate", "samples"}


def test_the_rules_read_what_a_run_writes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", str(trained / "config.yaml"), "--statistics", str(trained / "statistics.yaml")]
    assert blackswan.contracts.__main__.main(command) == 0
    out = capsys.readouterr().out
    assert "C-HP-001-RANGE: learning_rate 0.03 is outside" in out
    assert "C-HP-002" in out
    assert "unknown" not in out


@pytest.mark.parametrize(("option", "line"), [("--corpus", b'{"input": 3}'), ("--input", b"caf\xe9")])
def test_predict_prints_nothing_where_the_last_line_is_bad(
    trained: Path, place: Path, capsys: pytest.CaptureFixture[str], option: str, line: bytes
) -> None:
    (place / "texts").write_bytes(b'{"input": "ls"}\n' * 9 + line)
    capsys.readouterr()
    assert main(["predict", "--adapter", str(trained), option, "texts"]) == 4
    said = capsys.readouterr()
    assert (said.out, "texts:10: " in said.err) == ("", True)


def test_a_merged_model_is_none_to_merge_or_to_train(trained: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "--adapter", str(trained), "--output", "merged"]) == 0
    capsys.readouterr()
    assert main(["summary", "--adapter", "merged"]) == 0
    assert "merged into the base weights" in capsys.readouterr().out
    before = files(place)
    for words, expected in (
        (["merge", "--adapter", "merged", "--output", "again"], "merged is a merged model"),
        (["predict", "--adapter", "merged", "--model", "merged", "a"], "leave the base merged out"),
        (["predict", "--model", str(trained / "last"), "a"], f"is an adapter; expected --adapter {trained / 'last'}"),
        (["summary", "--adapter", "merged", "--memory"], "--memory: expected a model to train on"),
    ):
        assert main(words) == 4
        out, err = capsys.readouterr()
        assert (out, expected in err) == ("", True), err
    assert files(place) == before


def test_summary_of_a_model_and_of_an_adapter(trained: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", "--adapter", str(trained / "best")]) == 0
    of_adapter = capsys.readouterr().out
    assert main(["summary", "--model", str(model), *SMALL, "--memory"]) == 0
    of_model, _, memory = capsys.readouterr().out.partition("\n\n")
    assert of_adapter == of_model + "\n"
    assert "accumulated" not in memory
    assert main(["summary", "--model", str(model), *SMALL, "--accumulation-steps", "3", "--memory"]) == 0
    assert " accumulated 3 times, " in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    """What two steps of an epoch of three show, the second at twice the speed, then the epoch."""
    progress = Progress(stream, epochs=2, total_steps=6, log_interval=2)
    progress.step(StepRecord(1, 1, 0.7, 0.5, 2.0, 1e-3, 8, 4.0))
    progress.step(StepRecord(2, 1, 0.6, 0.5, 1234.5, 1.5e-3, 8, 2.0))
    progress.epoch(EpochRecord(1, 0.65, 0.5, 0.75, True, 6.5))
    progress.close()
    return stream.getvalue()


def test_progress_on_a_terminal_is_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    clear, text = "\r\x1b[2K", shown(Terminal())
    second = "epoch 1/2  step 2/6  loss 0.6000  gradient norm 1.23e+03  lr 0.0015  2.7 samples/s  0:12 left"
    first = "epoch 1/2  step 1/6  loss 0.7000  gradient norm 2  lr 0.001  2.0 samples/s  0:20 left"
    last = "epoch 1/2 done  train loss 0.6500  validation loss 0.5000  accuracy 0.750  6.5 s  best so far\n"
    assert text == clear + first + clear + second + clear + last
    monkeypatch.setenv("COLUMNS", "40")
    assert all(len(part) < 40 for part in shown(Terminal()).split(clear)[:3])
    assert shown(io.StringIO()) == f"{second}\n{last}"
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 3600, 90061)] == ["0:00", "1:00", "59:59", "1:00:00", "25:01:01"]


# Interruption


def broken_off(monkeypatch: pytest.MonkeyPatch, after: int, how: Callable[[], None]) -> None:
    """Has something happen inside the step after that many."""
    accumulate = Trainer._accumulate

    def counting(self: Trainer, batch: Any) -> Any:
        if self.optimiser.steps == after:
            how()
        return accumulate(self, batch)

    monkeypatch.setattr(Trainer, "_accumulate", counting)


class Died(Exception):  # noqa: N818  a state of the test
    """Nothing expects it: the state stays as it was last written."""


def died() -> None:
    raise Died


def test_a_run_that_died_between_an_epochs_line_and_its_state_has_the_line_once(
    trained: Path, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", *at(model, place), *SMALL, "--learning-rate", "3e-2"]
    save = fitting.save_state

    def dying(folder: Path, progress: Any, tensors: Any) -> None:
        if progress.epoch == 1:
            died()
        save(folder, progress, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "save_state", dying)
        with pytest.raises(Died):
            main(command)
    assert metrics(place / "run")[-1]["kind"] == "epoch"
    assert main([*command, "--resume"]) == 0
    assert metrics(place / "run") == metrics(trained)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FloatingPointError("the gradient norm is nan"), "impl train: step 4: the gradient norm is nan"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_ends_a_run_is_one_line_and_no_bad_input(
    error: Exception, said: str, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(*_: object) -> None:
        raise error

    full = isinstance(error, OSError)
    broken_off(monkeypatch, 3, (lambda: monkeypatch.setattr(fitting, "save_state", raising)) if full else raising)
    assert main(["train", *at(model, place), *SMALL]) == 1
    assert said in capsys.readouterr().err
    assert full or [each["step"] for each in metrics(place / "run")] == [1, 2, 3]


# What goes wrong

TRAIN_FAULTS: dict[str, tuple[list[str], str]] = {
    "no such model": (["--model", "nowhere"], "nowhere: no such folder"),
    "what is trained on": (["--validation", "link.jsonl"], "--validation: link.jsonl is what is trained on"),
    "a corpus that is a folder": (["--corpus", "."], "no such file; expected a corpus"),
    "an empty corpus": (["--corpus", "empty.jsonl"], "empty.jsonl: the corpus is empty"),
    "a bad line": (["--corpus", "bad.jsonl"], "bad.jsonl:2: "),
    "one sample": (["--corpus", "single.jsonl"], "leave none for validation"),
    "several labels": (["--corpus", "several.jsonl"], "several.jsonl:1: labels (several a sample), but one label a sample was asked for"),
    "no such validation corpus": (["--validation", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "an unknown weighting": (["--class-weights", "balansed"], "expected one of balanced, balanced_over_classes (nearest: balanced)"),
    "a length the model has not": (["--max-seq-len", "4096"], "max_seq_len is 4096: the model was made for at most 128 positions"),
    "an unknown device": (["--device", "gpu"], "device 'gpu': expected cpu, cuda, cuda:N"),
    "an output that is a file": (["--output", "corpus.jsonl"], "corpus.jsonl is no folder"),
    "an output below a file": (["--output", "corpus.jsonl/run"], "corpus.jsonl is no folder"),
    "TensorBoard that is not there": (["--tensorboard", "board"], "--tensorboard: TensorBoard is not installed"),
    "a stray argument": (["now"], "'now' is no option of train"),
}  # fmt: skip
FAULTY = {
    "empty.jsonl": b"",
    "bad.jsonl": line("a", 0).encode() + b'{"input": "b", "label": 1\n',
    "single.jsonl": line("a", 0).encode(),
    "several.jsonl": b'{"input": "a", "labels": [0, 1]}\n',
}


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without TensorBoard, whether it is installed or not."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    return


@pytest.mark.usefixtures("no_tensorboard")
@pytest.mark.parametrize("fault", TRAIN_FAULTS)
def test_bad_input_of_train(fault: str, model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in FAULTY.items():
        (place / name).write_bytes(content)
    (place / "link.jsonl").symlink_to("corpus.jsonl")
    options, expected = TRAIN_FAULTS[fault]
    before = files(place)
    status = main(["train", *at(model, place), *SMALL, *options])
    out, err = capsys.readouterr()
    assert (status, out) == (4, "")
    assert expected in err
    assert err.startswith("impl")
    assert files(place) == before


def test_a_pipe_is_no_corpus_for_several_workers(
    model: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them would read a part, or wait for ever."""
    group = mock.Mock(rank=0, size=2)
    monkeypatch.setattr("blackswan.impl.group.joined", lambda _: nullcontext((group, torch.device("cpu"))))
    reading, writing = os.pipe()
    os.write(writing, CORPUS.encode())
    os.close(writing)
    try:
        assert main(["train", f"--model={model}", f"--corpus=/dev/fd/{reading}", f"--output={place / 'run'}", *SMALL]) == 4
    finally:
        os.close(reading)
    assert "is a pipe, of which each of the 2 workers" in capsys.readouterr().err
    assert not (place / "run").exists()


def test_a_device_that_is_not_there(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(place)
    for command in (["train", *at(model, place), *SMALL], ["summary", "--model", str(model)]):
        assert main([*command, "--device", "cuda:15"]) == 6
        assert "device 'cuda:15': this host has" in capsys.readouterr().err
    assert files(place) == before


def test_an_accelerator_that_no_claim_was_asked_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackswan.impl.pipeline.TESTED", ("cuda",))
    pipeline = ClassifyPipeline.from_pretrained(model, ClassifyConfig(max_seq_len=32))
    assert "device:     cpu (no claim was ever asked on this kind of device, and its memory figures are not known)" in pipeline.summary()
    mps, config = torch.device("mps", 0), ClassifyConfig(backend="fused")
    with pytest.raises(ValueError, match="backend fused: its kernels run on CUDA; choose backend torch"):
        backend_of(config, pipeline.architecture, mps)
    with reserve(mps, 10**18) as reservation:
        assert reservation is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto takes the GPU here")
def test_auto_falls_back_with_one_warning(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", "--model", str(model), "--max-seq-len", "32", "--device", "auto"]) == 0
    out, err = capsys.readouterr()
    assert "device:     cpu" in out
    assert err == "impl summary: warning: device auto: no CUDA device is available, using the CPU\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: --model, --corpus, --output"),
        (["evaluate", "--adapter", "RUN"], "required: --corpus"),
        (["evaluate", "--adapter", "RUN", "--corpus", "nowhere"], "nowhere: no such file"),
        (["evaluate", "--adapter", "MODEL", "--corpus", "corpus.jsonl"], "neither an adapter (adapter_config.json) nor a merged model"),
        (["evaluate", "--adapter", "RUN", "--corpus", "corpus.jsonl", "--model", "nowhere"], "nowhere: no such folder"),
        (["predict", "--adapter", "RUN", "--input", "nowhere"], "nowhere: no such file or directory; expected a text file"),
        (["predict", "--adapter", "RUN", "--input", "."], ".: is a directory; expected a text file, one text a line"),
        (["predict", "--adapter", "RUN", "--corpus", "."], ".: is a directory; expected a JSONL file"),
        (["merge", "--adapter", "RUN"], "required: --output"),
        (["merge", "--adapter", "RUN", "--output", "corpus.jsonl"], "corpus.jsonl exists; choose another name"),
        (["merge", "--adapter", "RUN", "--output", "corpus.jsonl/merged"], "corpus.jsonl is no folder"),
        (["summary", "--mdoel", "nowhere"], "'--mdoel' is no option of summary; the nearest is --model"),
    ],
)
def test_bad_input_of_the_others(
    command: list[str], expected: str, trained: Path, model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(place)
    assert main([{"RUN": str(trained), "MODEL": str(model)}.get(word, word) for word in command]) == 4
    out, err = capsys.readouterr()
    assert (out, expected in err) == ("", True), err
    assert files(place) == before


def test_more_than_the_hosts_memory(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *at(model, place), *SMALL, "--lora-rank", "9" * 14]) == 1
    assert "the host's memory is not enough; choose smaller sizes" in capsys.readouterr().err


def test_a_strange_checkpoint(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, place / "strange")
    (place / "strange" / "tokenizer_config.json").write_text("[]")
    assert main(["summary", "--model", "strange"]) == 4
    assert "tokenizer_config.json: expected a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "option", "said"),
    [
        ("model.layers.0.self_attn.v_proj.weight", math.nan, "--quantize-nf4", "1 NaN of "),
        ("model.norm.weight", math.inf, "--no-quantize-nf4", "1 infinite of "),
    ],
)
def test_weights_that_are_not_finite(
    name: str, value: float, option: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = random_tensors(TINY, 0)
    save_checkpoint(place / "spoiled", TINY, tensors, CHECKPOINT / "tokenizer.json")
    tensors[name].view(-1)[3] = value
    save_file(tensors, place / "spoiled" / "model.safetensors")
    (place / "there").mkdir()
    before = files(place)
    for output in ("new", "there"):  # a folder that is there and empty may be used, and stays as it is
        assert main(["train", *at(place / "spoiled", place), *SMALL, option, "--output", output]) == 4
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"spoiled: {'buffer' if 'v_proj' in name else 'parameter'} {name.removesuffix('.weight')}." in err
        assert f": {said}" in err
        assert files(place) == before


def test_every_setting_is_explained_and_known_to_the_rules() -> None:
    names = [field.name for field in dataclasses.fields(ClassifyConfig)]
    assert list(HELP) == names
    assert set(CONFIG) == {*names, "model_params"}
