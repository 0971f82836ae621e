"""The step beside its peers: who runs, on what, who agrees, and what one contender gave is written before the next one starts."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import command, contenders, step_inputs, train_step

Answer = dict[str, Any]
Started = Callable[..., tuple[int, dict[str, Any], str]]
LOSS = 1.6
TRUTH = {"a": torch.ones(4), "b": torch.ones(2, 3)}


def off(by: float, loss: float = 0.0) -> Answer:
    """An answer whose gradients have this relative error, and whose loss this error."""
    return {"loss": LOSS + loss, "gradients": {name: value * (1 + by) for name, value in TRUTH.items()}}


def with_gradients(**gradients: torch.Tensor | None) -> Answer:
    """The float32 answer with some gradients replaced, or left out."""
    found = off(0.0)["gradients"] | gradients
    return {"loss": LOSS, "gradients": {name: value for name, value in found.items() if value is not None}}


def answer(given: Answer, name: str, folder: Path) -> dict[str, Any]:
    """What a contender's process leaves behind: figures, and a file where it got that far."""
    if "gradients" in given:
        torch.save({key: given[key] for key in ("loss", "gradients")}, folder / f"{name}.pt")
    if "failed" in given:
        return {"name": name, "failed": given["failed"]}
    return {"name": name, "ms": given.get("ms", 2.0), "peak": 2**30, "tflops": 700.0, "tokens": 4096}


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Started:
    """The benchmark on given answers: its exit status, the figures that it wrote and what it printed."""

    def started(*only: str, **answers: Answer) -> tuple[int, dict[str, Any], str]:
        given = {"truth": off(0.0), "eager": off(0.01)} | answers
        monkeypatch.setattr(train_step, "_run", lambda name, _, folder: answer(given[name.replace("-", "_")], name, folder))
        file = tmp_path / "steps.json"
        asked = [word for name in only for word in ("--only", name)]
        monkeypatch.setattr(sys, "argv", ["train_step.py", "--output", str(file), *asked])
        status = train_step.main()
        written = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        return status, {row["name"]: row for row in written["rows"]}, capsys.readouterr().out

    monkeypatch.setattr(command, "require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return started


def line_of(name: str, table: str) -> list[str]:
    return next(line.split() for line in table.splitlines() if line.split()[0] == name)


def test_plain_transformers_runs_first_where_it_was_left_out(benchmark: Started) -> None:
    status, rows, table = benchmark("ours", "compile", ours=off(0.01) | {"ms": 1.0}, compile=off(10.0) | {"ms": 0.1})
    assert (status, list(rows)) == (0, ["eager", "ours", "compile"])
    assert {name: row["agrees"] for name, row in rows.items()} == {"eager": True, "ours": True, "compile": False}
    # The best peer is the one that agrees.
    assert [line_of(name, table)[5] for name in rows] == ["1.00", "2.00", "disagrees"]


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        (off(0.0199), True),
        (off(0.0201), False),
        (off(0.01, loss=0.012), True),  # 2 · 2⁻⁸ · 1.6 is 0.0125
        (off(0.01, loss=0.013), False),
        (off(0.01, loss=math.nan), False),
        (off(0.01, loss=math.inf), False),
        (with_gradients(), True),
        (with_gradients(c=torch.ones(2)), True),
        (with_gradients(c=torch.tensor(math.nan)), False),
        (with_gradients(a=torch.tensor([1.0, 1.0, 1.0, math.nan])), False),
        (with_gradients(a=torch.tensor([1.0, 1.0, 1.0, math.inf])), False),
        (with_gradients(a=None), False),
        (with_gradients(a=torch.ones(1)), False),
        (with_gradients(b=torch.ones(3, 2)), False),
        ({"failed": "out of memory"}, False),
        (off(0.01) | {"failed": "not done after 240 s"}, True),
        (off(0.03) | {"failed": "not done after 240 s"}, False),
    ],
)
@pytest.mark.parametrize("name", ["ours-torch", "reduce-overhead"])
def test_what_agrees(name: str, given: Answer, agrees: bool, benchmark: Started) -> None:
    status, rows, table = benchmark(name, **{name.replace("-", "_"): given})
    assert rows[name]["agrees"] is agrees
    assert rows["eager"]["agrees"] is True
    assert status == int(name.startswith("ours") and not agrees)
    if "failed" not in given:
        assert line_of(name, table)[5] == ("1.00" if agrees else "disagrees")


def test_a_large_error_of_plain_transformers_loss_is_doubled(benchmark: Started) -> None:
    _, rows, _ = benchmark("ours", "liger", eager=off(0.01, loss=0.02), ours=off(0.01, loss=-0.039), liger=off(0.01, loss=0.041))
    assert [row["agrees"] for row in rows.values()] == [True, True, False]


def test_the_figures_of_an_answer(benchmark: Started) -> None:
    _, rows, _ = benchmark("ours", "liger", ours=off(0.005, loss=0.001), liger=with_gradients(a=None, b=torch.full((2, 3), 1.5)))
    assert rows["ours"]["tensors"] == rows["eager"]["tensors"] == 2
    assert rows["liger"]["tensors"] == 1
    assert rows["ours"]["loss_error"] == pytest.approx(0.001)
    assert [row["gradient_error"] for row in rows.values()] == pytest.approx([0.01, 0.005, 0.5], rel=1e-4)
    assert [row["error_ratio"] for row in rows.values()] == pytest.approx([1.0, 0.5, 50.0], rel=1e-4)


@pytest.mark.parametrize(
    "eager",
    [
        {"failed": "out of memory"},
        off(0.01) | {"failed": "not done after 240 s"},
        with_gradients(a=None),
        with_gradients(a=torch.full((4,), math.nan)),
        off(0.01, loss=math.nan),
    ],
)
def test_nothing_agrees_where_plain_transformers_has_no_answer(eager: Answer, benchmark: Started) -> None:
    status, rows, table = benchmark("ours", "liger", eager=eager, ours=off(0.0), liger=off(0.0))
    assert status == 1
    assert [row["agrees"] for row in rows.values()] == [False] * 3
    assert not any("error_ratio" in row for row in rows.values())
    assert line_of("ours", table)[5] == line_of("liger", table)[5] == "disagrees"
    assert "nothing to be held to" in table


def test_plain_transformers_without_any_error(benchmark: Started) -> None:
    status, rows, _ = benchmark("ours", "liger", eager=off(0.0), ours=off(0.0), liger=off(0.01))
    assert (status, [row["agrees"] for row in rows.values()]) == (0, [True, True, False])


def test_a_peer_that_fails_is_no_failure_of_the_benchmark(benchmark: Started) -> None:
    status, rows, table = benchmark("ours", "compile", ours=off(0.01), compile={"failed": "not done after 240 s"})
    assert (status, rows["compile"]["agrees"]) == (0, False)
    assert "compile          failed: not done after 240 s" in table


KEPT = sorted((Path(train_step.__file__).parent / "results").glob("train-step-*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_kept_figures_agree(path: Path) -> None:
    """All by the rule; the loss of five classes is about 1.6."""
    rows = json.loads(path.read_text())["rows"]
    plain = next(row for row in rows if row["name"] == train_step.PLAIN)
    truth = {"gradients": range(plain["tensors"])}
    for row in rows:
        assert row["agrees"] is (train_step._whole(row, truth) and train_step._within(row, plain, LOSS)) is True


@pytest.mark.parametrize("length", [3, 5])
def test_a_batch_is_padded_on_the_right(length: int) -> None:
    mask = torch.arange(length) < torch.tensor([[length], [2]])
    batch = {"input_ids": torch.arange(1, 2 * length + 1).view(2, length) * mask, "mask": mask, "labels": torch.tensor([4, 0])}
    found = contenders.padded(batch, 5)
    assert found.keys() == batch.keys()
    assert found["labels"] is batch["labels"]
    for name in ("input_ids", "mask"):
        assert found[name].dtype == batch[name].dtype
        assert found[name].shape == (2, 5)
        assert torch.equal(found[name][:, :length], batch[name])
        assert not found[name][:, length:].any()
    assert batch["mask"].shape == (2, length)


class OneLora(torch.nn.Module):
    """A model that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.ones(1))
        self.given: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor) -> argparse.Namespace:
        self.given.append((input_ids, attention_mask))
        return argparse.Namespace(loss=(self.lora_A * labels).mean())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # what torch says of CUDA missing, and of itself
@pytest.mark.parametrize("lengths", ["full", "mixed"])
@pytest.mark.parametrize("name", contenders.PEERS)
def test_what_a_peer_is_given(name: str, lengths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled one batches of one shape and one static graph, the others batches as long as their longest sample."""
    model, dynamic = OneLora(), []

    def compiled(model: OneLora, **options: Any) -> OneLora:
        dynamic.append(options["dynamic"])
        return model

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.backends.cuda, "matmul", argparse.Namespace())  # its settings are the whole process's
    monkeypatch.setattr(contenders, "_peer_model", lambda _: model)
    monkeypatch.setattr(contenders, "_forget_building", lambda: None)
    monkeypatch.setattr(contenders, "_timed", lambda step, batches, _: {"losses": [step(batch) for batch in batches]})
    monkeypatch.setattr(torch, "compile", compiled)
    parser = argparse.ArgumentParser()
    step_inputs.add_options(parser)
    options = parser.parse_args(["--model", "toy", "--batch", "2", "--seq", "40", "--lengths", lengths])
    options.contender, options.folder = name, tmp_path
    contenders._figures(options)
    batches = step_inputs.batches_of(options)
    assert len(model.given) == len(batches) + 1  # the first is the one that is held to the float32 computation
    for (ids, mask), batch in zip(model.given, [batches[0], *batches], strict=True):
        wanted = contenders.padded(batch, 40) if name in contenders.COMPILED else batch
        assert torch.equal(ids, wanted["input_ids"])
        if lengths == "full":
            assert mask is None
        else:
            assert mask is not None
            assert torch.equal(mask, wanted["mask"])
    assert dynamic == [False] * (name in contenders.COMPILED)
