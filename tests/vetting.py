"""Helpers that the tests of `blackswan vet` and of `blackswan.check` share: they ask, and one of them is a wrong norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blackswan
from blackswan.falsifiers.runner import vet
from tests import cheating_subjects

FILE = Path(cheating_subjects.__file__)
ONE = ("--operation", "rms_norm", "--claim", "OP-RMSNORM", "--dtype", "float32")


def wrong_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * weight + eps


def asked(subject: Any, claim: str = "OP-RMSNORM", **further: Any) -> vet.Result:
    """The result of one claim in float32, asked in this process."""
    return blackswan.check(subject, claims=[claim], dtypes=["float32"], on_fail="return", **further)


def vetted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = vet.main(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err
