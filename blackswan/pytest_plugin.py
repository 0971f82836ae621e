"""The entry point that every pytest of an environment finds: it makes `pytest --pyargs blackswan.falsifiers` know its options.

A run that does not name the falsifiers keeps all its options: nothing is registered for it, and nothing imported.
"""

from collections.abc import Sequence

import pytest

FALSIFIERS = "blackswan.falsifiers"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Registers the falsifiers' options where a command line names them, before it is parsed."""
    if any(argument.partition("::")[0].split(".")[:2] == FALSIFIERS.split(".") for argument in args):
        early_config.pluginmanager.import_plugin(f"{FALSIFIERS}.runner.plugin")
