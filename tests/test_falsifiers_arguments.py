"""Options of `python -m falsifiers` that make no sense: one line, before anything is measured or written."""

from pathlib import Path
from typing import Any

import pytest
from falsifiers_claims import LOADED

from blackswan import contracts
from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.mutants import power
from blackswan.falsifiers.runner import calibrate_command


@pytest.mark.parametrize(
    "line", [["calibrate", "--cases", "-3"], ["calibrate", "--cases", "0"], ["calibrate", "--jobs", "0"], ["power", "--processes", "0"]]
)
def test_a_count_below_one_is_refused(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*line, "--claim", "OP-LINEAR"])
    assert ended.value.code == 2
    assert "expected a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("chosen", [["--claim", "OP-RESIDUAL-GRADIENT"], ["--claim", "OP-LINEAR", "--dtype", "float64"]])
def test_nothing_to_measure_is_said(chosen: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *chosen]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("falsifiers calibrate: nothing to measure")
    assert found.err.count("\n") == 1


FOREIGN = ["# Somebody's own\n", '{"claim": "OP-LINEAR"}\n', "\n"]


@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize(("command", "option"), [("calibrate", "--lines"), ("power", "--output")])
def test_lines_go_into_no_other_file(
    tmp_path: Path, command: str, option: str, content: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts, "load", lambda **_: LOADED)
    monkeypatch.setattr(calibrate_command, "_measured", lambda *_: pytest.fail("measured before it was refused"))
    monkeypatch.setattr(power, "run", lambda *_: pytest.fail("attacked before it was refused"))
    own = tmp_path / "own.md"
    own.write_text(content)
    for path, message in ((own, "holds something else"), (tmp_path, "cannot be written"), (tmp_path / "no" / "file", "there is no folder")):
        assert main([command, "--claim", "OP-LINEAR", option, str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"falsifiers {command}: {option}: ")
        assert message in error
        assert error.count("\n") == 1
    assert own.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == [own.name]


def test_options_that_are_not_given_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(calibrate_command, "_measured", lambda tasks, jobs: seen.append((tasks, jobs)) or iter(()))
    assert main(["calibrate", "--claim", "OP-SWIGLU"]) == 0
    ((tasks, jobs),) = seen
    assert jobs == 1
    assert {(device, seed, way) for _, _, device, _, seed, way in tasks} == {("cpu", 1, "")}
    assert min(draws for *_, draws, _, _ in tasks) >= 300


def test_honest_mutants_are_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(calibrate_command, "_measured", lambda tasks, _: seen.append(tasks) or iter(()))
    assert main(["calibrate", "--claim", "OP-SWIGLU", "--honest"]) == 0
    assert {way for *_, way in seen[0]} == {"swiglu_by_sigmoid"}
    assert main(["calibrate", "--claim", "OP-SWIGLU", "--honest", "--device", "auto"]) == 2
    assert "--honest measures on the CPU" in capsys.readouterr().err
