"""A run of claims: options, selection, worker processes, the verdict file, and pytest's hooks."""
