"""The step beside its peers: what one contender gave is written before the next one starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import command, train_step


def test_an_interrupted_run_keeps_the_figures_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(name: str, _: object, folder: Path) -> dict[str, Any]:
        if name == "liger":
            raise KeyboardInterrupt
        gradient = torch.ones(4) if name == train_step.TRUTH else torch.ones(4) + (0.01 if name == "eager" else 0.03)
        torch.save({"loss": 1.0, "gradients": {"a": gradient}}, folder / f"{name}.pt")
        return {"name": name, "ms": 2.0, "peak": 2**30, "tflops": 700.0, "tokens": 4096}

    file = tmp_path / "steps.json"
    monkeypatch.setattr(train_step, "_run", ran)
    monkeypatch.setattr(command, "require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--output", str(file), "--only", "ours", "--only", "eager", "--only", "liger"])
    with pytest.raises(KeyboardInterrupt):
        train_step.main()
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["rows"]] == ["ours", "eager"]
    assert written["rows"][0]["error_ratio"] == pytest.approx(3.0)
    assert [row["agrees"] for row in written["rows"]] == [False, True]
