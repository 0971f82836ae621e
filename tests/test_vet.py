"""`blackswan vet`: what it asks, prints and exits with, and the tutorial."""

import inspect
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import blackswan
from blackswan.falsifiers.runner import vet
from blackswan.falsifiers.runner.campaign import Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.subjects import isolated, named, serving
from blackswan.falsifiers.subjects.functions import Functions
from blackswan.falsifiers.subjects.libraries import installed
from tests import vetting
from tests.cheating_subjects import honest
from tests.vetting import FILE, ONE, vetted, wrong_norm

pytestmark = pytest.mark.usefixtures("own_folder")


def test_honest_code_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert not blackswan.check(honest, operation="rms_norm", effort="quick").failures
    status, out, _ = vetted(capsys, f"{FILE}:honest", *ONE, "--json")
    assert status == 0
    assert [record["state"] for record in json.loads(out)] == ["HELD"]


def test_what_is_asked_on_request_is_asked_where_it_is_named() -> None:
    def asked(**chosen: Any) -> set[str]:
        campaign = vet.campaign_of(vet.as_subject(honest, "rms_norm"), Selection(**chosen), Options())
        return {target.dtype for target in campaign.targets()}

    assert asked() == {"float32", "bfloat16"}
    assert asked(dtypes=["float16"]) == asked(claims=["F16-RMSNORM"]) == {"float16"}


def test_what_is_asked_on_request_is_asked_of_an_operation_that_nothing_else_is_on() -> None:
    from blackswan.falsifiers.subjects.libraries.bitsandbytes import ADAMW_8BIT

    campaign = vet.campaign_of(Functions(ADAMW_8BIT, "8 bits"), Selection(), Options())
    assert {"OPT-ADAMW", "OPT-ADAMW-8BIT-STEP"} < {target.claim.id for target in campaign.targets()}


def test_what_a_subject_prints_is_not_among_its_verdicts(capfd: pytest.CaptureFixture[str]) -> None:
    Path("prints.py").write_text("import torch\nprint('here')\n\ndef softmax(x):\n    print('there')\n    return torch.softmax(x, -1)\n")
    assert vet.main(["prints.py:softmax", "--claim", "OP-SOFTMAX", "--dtype", "float32", "--effort", "quick", "--json"]) == 0
    assert [record["state"] for record in json.loads(capfd.readouterr().out)] == ["HELD"]


@pytest.mark.parametrize(("library", "said"), [("liger", "Liger's kernels run on a GPU"), ("unsloth", "unsloth is not installed here")])
def test_what_runs_on_a_gpu_alone_is_not_run_elsewhere(capsys: pytest.CaptureFixture[str], library: str, said: str) -> None:
    if library == "unsloth" and installed("unsloth"):
        said = "Unsloth's kernels run on a GPU"
    status, out, _ = vetted(capsys, library, "--operation", "swiglu", "--claim", "OP-SWIGLU", "--json")
    assert status == vet.EXIT_NOTHING_HELD
    assert all(record["reason"].startswith(said) for record in json.loads(out))


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", *(each for each in sys.modules if each.startswith("peft."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "blackswan.falsifiers.subjects.libraries.peft", raising=False)
    with pytest.raises(ValueError, match="peft is not installed here; expected the package peft and what it needs"):
        named.Named("peft").load()


def test_a_tolerance_that_was_measured_on_gpus_alone_is_not_held_against_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = vetted(
        capsys, "torch", "--claim", "KERNEL-LINEAR-GRADIENT", "--claim", "OP-LINEAR-GRADIENT", "--dtype", "float32", "--json"
    )
    found = {record["claim"]: record["state"] for record in json.loads(out)}
    assert found == {"KERNEL-LINEAR-GRADIENT": "NOT_RUN", "OP-LINEAR-GRADIENT": "HELD"}


def test_the_line_that_is_printed_replays_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import torch\n" + inspect.getsource(wrong_norm).replace("Tensor", "torch.Tensor"))
    status, out, _ = vetted(capsys, "mine.py:wrong_norm", *ONE)
    assert status == 1
    assert "culprit    rms_norm" in out
    line = next(line.split(maxsplit=1)[1] for line in out.splitlines() if line.strip().startswith("replay "))
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("blackswan", "vet")
    again, replayed, _ = vetted(capsys, *arguments, "--json")
    assert again == 1
    assert [(record["claim"], record["state"], record["cases"]["run"]) for record in json.loads(replayed)] == [
        ("OP-RMSNORM", "FALSIFIED", 1)
    ]


def test_a_replay_of_mended_code_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError) as failed:
        blackswan.check(wrong_norm, operation="rms_norm", claims=["OP-RMSNORM"], dtypes=["float32"])
    assert f"replay     blackswan vet {vetting.__file__}:wrong_norm --operation rms_norm --replay" in str(failed.value)
    (case,) = Path("blackswan-reports/counterexamples").glob("OP-RMSNORM-*.npz")
    status, out, _ = vetted(capsys, f"{FILE}:honest", "--operation", "rms_norm", "--replay", str(case))
    assert (status, out.split()[0]) == (0, "HELD")


def test_two_processes_share_the_claims(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vet.options, "TARGETS_PER_PROCESS", 1)
    asked_of = (f"{FILE}:honest", "--operation", "rms_norm", "--claim", "OP-RMSNORM", "--effort", "quick")
    status, said, _ = vetted(capsys, *asked_of, "-n", "2", "--verdicts", str(tmp_path / "v.jsonl"))
    assert status == 0
    assert "2 HELD" in said


COMPILED = """
import torch

@torch.compile(backend="eager", fullgraph=True, dynamic=True)
def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
"""


def test_what_torch_compiles_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(COMPILED)
    status, said, _ = vetted(capsys, f"{file}:norm", *ONE, "--effort", "quick", "--verdicts", str(tmp_path / "v.jsonl"))
    assert status == 0, said


def test_status_5_where_nothing_held(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def rms_norm(x, weight):\n    return x\n")
    status, out, _ = vetted(capsys, "mine.py:rms_norm", *ONE)
    assert status == 5
    assert "takes no eps" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nofile.py:f",), "nofile.py: no such file"),
        (("mine.py:f", "--device", "xpu"), "mine.py:f: device 'xpu': this host has no usable xpu devices"),
        (("mine.py:g",), "mine.py:g: mine.py has no g; it has f"),
        (("no_module.here:f",), "no_module.here: no module of that name here"),
        (("mine",), "mine: expected FILE.py:NAME or package.module:NAME"),
        (("mine.py:f", "--operation", "rmsnorm"), "mine.py:f: unknown operation 'rmsnorm'"),
        (("mine.py:f", "--operation", "rms_norm"), "mine.py:f: f cannot be asked as rms_norm: it takes nothing"),
        (("broken.py:f", "--operation", "rms_norm"), "broken.py:f: RuntimeError: no GPU"),
    ],
)
def test_status_4_says_once_what_cannot_be_used(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated.Isolated, "_started", _started_here)
    Path("mine.py").write_text("def f():\n    pass\n")
    Path("broken.py").write_text("raise RuntimeError('no GPU')\n")
    status, _, err = vetted(capsys, *arguments)
    assert status == 4
    assert err.startswith(f"blackswan vet: {message}")


def _started_here(self: isolated.Isolated) -> None:
    """Loads the subject in this process: a process for each wrong name would take seconds."""
    try:
        named.require_device(self.named.device)
        named.subject_of(self.named.load(), self.named.name, self.named.operation)
    except ValueError as error:
        raise isolated._unusable(self.name, "unusable", str(error)) from None
    except Exception as error:
        raise isolated._unusable(self.name, "raised", serving.described(error)) from None


TUTORIAL = Path(__file__).resolve().parents[1] / "examples" / "vet"


def test_the_tutorial_finds_names_and_mends_its_bug() -> None:
    shutil.copytree(TUTORIAL, "tutorial")
    (Path("tutorial") / "contracts" / "mutants.json").unlink()
    found = {}
    for name, arguments in {
        "catalogue": ["catalogue"],
        "lint": ["contracts", "lint"],
        "fused": ["vet", "norms.py:fused", "--operation", "add_rms_norm", "--dtype", "float32", "-n", "1"],
        "mended": ["vet", "norms.py:mended", "--operation", "add_rms_norm", "--dtype", "float32", "-n", "1"],
        "power": ["power", "--claim", "FUSED-NORM", "--processes", "1"],
    }.items():
        command = [sys.executable, "-c", "from blackswan.cli import main; main()", *arguments, "--contracts", "contracts"]
        found[name] = subprocess.run(command, cwd="tutorial", capture_output=True, text=True, check=False)
    said = {name: run.stdout + run.stderr for name, run in found.items()}
    assert {name: run.returncode for name, run in found.items()} == {name: int(name == "fused") for name in found}, said
    assert (Path("tutorial") / "contracts" / "mutants.json").read_text() == (TUTORIAL / "contracts" / "mutants.json").read_text()
    assert "the answer equals the mutant add_rms_norm_eps_outside_root" in said["fused"]
    assert "--contracts contracts --replay" in said["fused"]
    assert "norms.py:mended: 2 HELD" in said["mended"]
    assert "3 of 4 mutants die here: FUSED-NORM" in said["power"] or "3 of 3 mutants die here: FUSED-NORM" in said["power"]


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLACKSWAN_CONTRACTS", "")
    status, _, err = vetted(capsys, "mine.py:f", "--contracts", "nowhere")
    assert status == 4
    assert "nowhere: no such folder" in err
