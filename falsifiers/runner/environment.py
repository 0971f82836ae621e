"""The part of a run record that describes the machine, the versions and the sources that the verdicts depend on."""

import hashlib
import importlib.metadata
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

from blackswan.reports.digests import tree_digests

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "ml_dtypes", "hypothesis", "torch", "bitsandbytes", "tokenizers", "safetensors", "triton")


def versions(device: str) -> dict[str, str | None]:
    """Versions of Python, of the packages that are installed, and of the CUDA driver's runtime where one is used."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["driver"] = None
    if device.startswith("cuda"):
        import torch

        found["cuda"] = torch.version.cuda
        found["hip"] = torch.version.hip  # ROCm's devices are `cuda` to torch
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        return path.read_text().splitlines()[0].strip()
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603  # a fixed command
    return run.stdout.splitlines()[0].strip() if run.returncode == 0 and run.stdout else None


def device_name(device: str) -> str | None:
    """The accelerator's name; none for the CPU, and for a kind that does not say it."""
    if device.startswith("cpu"):
        return None
    import torch

    place = torch.device(device)
    name = getattr(torch.get_device_module(place), "get_device_name", None)
    return None if name is None else str(name(place))


def machine() -> dict[str, Any]:
    """Processor, cores and system."""
    return {"processor": _processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files by name."""
    state = hashlib.sha256()
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    for file in files:
        state.update(file.name.encode())
        state.update(file.read_bytes())
    return state.hexdigest()


def display_path(path: Path) -> str:
    """The path as seen from the checkout's root where it lies below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else str(path)


def command() -> str:
    """The command line, without the path of the interpreter or the script."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


@cache
def digests() -> dict[str, str]:
    """The digest of each folder that verdicts depend on."""
    return tree_digests(ROOT)
