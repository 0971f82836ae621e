"""What has to be set before any test imports Triton, what spares its interpreter, and what the tests cannot run without."""

import os
from pathlib import Path

import pytest

# Where no card is, kernels run under the interpreter, which Triton looks for when it is imported (bitsandbytes imports it too).
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Tests speak by `assert`, and their helpers' are not rewritten by pytest."""
    if not __debug__:
        pytest.exit("the tests need assert statements; run them without PYTHONOPTIMIZE and python -O", returncode=4)


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every block of tokens, so that blocks are small."""
    for module in ("model", "packing", "step"):
        monkeypatch.setattr(f"blackswan.impl.fused.{module}.GRAIN", 16)
