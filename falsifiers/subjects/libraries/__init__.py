"""Published libraries as subjects: `blackswan vet NAME` asks `OPERATIONS` of the module NAME, `vet NAME:FORM` another mapping of it."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = {
    **{name: name for name in ("torch", "transformers", "peft", "bitsandbytes", "unsloth")},
    "liger": "liger-kernel",
}
"""The name that `blackswan vet` takes → the distribution that it is about."""
EXTRAS = ("liger", "peft", "transformers", "unsloth")
"""Those that an extra of that name installs, with what they need."""


def installed(name: str) -> str | None:
    """The version of a library's distribution here; None where it is not installed."""
    try:
        return version(PACKAGES[name])
    except PackageNotFoundError:
        return None
