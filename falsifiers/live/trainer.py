"""The guard as a callback of transformers' Trainer."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class GuardCallback(TrainerCallback):
    """A guard from the beginning of a training to its end; `guard` is it, None before. `make` makes it of model and optimiser."""

    def __init__(self, make: Callable[..., Any], settings: dict[str, Any]) -> None:
        self.make, self.settings = make, settings
        self.guard: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Makes the guard from what is trained, and how the arguments say that gradients are clipped."""
        del control
        if self.guard is not None:
            self.guard.detach()
        optimizer = given["optimizer"]
        own = {"max_norm": args.max_grad_norm} if args.max_grad_norm else {}
        self.guard = self.make(given["model"], getattr(optimizer, "optimizer", optimizer), **{**own, **self.settings})
        self.guard.start = self.guard.step = state.global_step
        self.guard.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Takes the guard's hooks away."""
        del args, state, control, given
        if self.guard is not None:
            self.guard.detach()
