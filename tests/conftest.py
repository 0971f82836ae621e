"""What has to be set before any test imports Triton, what spares its interpreter, and what the tests cannot run without."""

import os
from pathlib import Path

import pytest

# Where no card is, kernels run under the interpreter, which Triton looks for when it is imported (bitsandbytes imports it too).
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


SLOWEST = ["vet", "falsifiers_command", "falsifiers_both_backends", "foreign_models", "trainer_subject", "impl_parallel", "check"]
SLOWEST += ["vet_isolation", "memory_benchmark", "declarations", "installed", "impl_kernel_attention", "impl_fused", "whole_model", "power"]
SLOWEST += ["footprint"]
"""Files that take longest, which come first where files are shared out: the last ones then end at the same time."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests speak by `assert`, and their helpers' are not rewritten by pytest."""
    if not __debug__:
        pytest.exit("the tests need assert statements; run them without PYTHONOPTIMIZE and python -O", returncode=4)
    config.option.loadscopereorder = False  # by the number of tests, which would leave those with few and slow ones for the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first."""
    places = {f"test_{name}": place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every block of tokens, so that blocks are small."""
    for module in ("model", "packing", "step"):
        monkeypatch.setattr(f"blackswan.impl.fused.{module}.GRAIN", 16)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
