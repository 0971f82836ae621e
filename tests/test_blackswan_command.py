"""The program `blackswan`: its sub-commands, their help and completion, and that help imports nothing heavy."""

import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from terminal_processes import ROOT

from blackswan.cli import DOORS, main

HEAVY = ("torch", "transformers", "bitsandbytes", "peft")


def completed(*words: str) -> list[str]:
    """What may stand in the place of the last word."""
    *before, word = words
    return [item.value for item in ShellComplete(main, {}, "blackswan", "_BLACKSWAN_COMPLETE").get_completions(before, word)]


def test_help_names_every_sub_command() -> None:
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0
    for name in DOORS:
        assert f"\n  {name} " in shown.output


def test_the_help_of_a_sub_command_is_its_own_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom blackswan.cli import DOORS, main\n"
        "for name in DOORS:\n"
        "    try:\n        main([name, '--help'], prog_name='blackswan')\n"
        "    except SystemExit as stop:\n        assert not stop.code\n"
        f"    print('heavy:', *({{*sys.modules}} & {{*{HEAVY!r}}}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.strip() for line in lines if line.startswith("heavy:")] == ["heavy:"] * len(DOORS)
    for name in DOORS:
        assert any(line.startswith(f"usage: blackswan {name} ") for line in lines), name


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("po",), ["power"]),
        (("contracts", "li"), ["lint", "list"]),
        (("contracts", "list", "--se"), ["--severity"]),
        (("report", "che"), ["check"]),
        (("falsify", "--re"), ["--require", "--replay", "--resume"]),
        (("train", "--learning"), ["--learning-rate"]),
        (("power", "--claim", "OP-SOFTMAX", "--mu"), ["--mutant"]),
    ],
)
def test_completion_knows_sub_commands_and_options(words: tuple[str, ...], expected: list[str]) -> None:
    assert completed(*words) == expected


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (["contracts", "lint"], 0, "no problems"),
        (["contracts", "show", "OP-SOFTMAX"], 0, "OP-SOFTMAX"),
        (["contracts", "show", "OP-SOFTMX"], 2, "blackswan contracts: unknown claim 'OP-SOFTMX'"),
        (["report", "check", "nowhere.jsonl"], 2, "nowhere.jsonl: cannot be read"),
        (["train", "--modle", "x"], 4, "usage: blackswan train"),
        (["power", "--claim", "OP-SOFTMX"], 2, "did you mean 'OP-SOFTMAX'"),
        (["calibrate", "--cases", "0"], 2, "expected a whole number of at least 1"),
        (["falsify", "--effort", "high"], 2, "invalid choice: 'high'"),
        (["polish"], 2, "No such command 'polish'"),
    ],
)
def test_a_sub_command_ends_as_its_module_does(line: list[str], status: int, said: str) -> None:
    ran = CliRunner().invoke(main, line)
    assert (ran.exit_code, said in ran.output) == (status, True), ran.output


@pytest.mark.parametrize(
    ("line", "command"), [(["contracts", "lint"], "contracts.__main__._lint"), (["report", "check", "x"], "reports.__main__._check")]
)
def test_ctrl_c_is_one_word_and_status_130(line: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"blackswan.{command}", interrupt)
    ran = CliRunner().invoke(main, line)
    assert (ran.exit_code, ran.output) == (130, "interrupted\n")
