"""Options and hooks of `pytest falsifiers`, from the runner."""

pytest_plugins = ["blackswan.falsifiers.runner.plugin"]
