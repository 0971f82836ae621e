"""The guard as a callback of transformers' Trainer."""

import inspect
from typing import Any

from transformers import TrainerCallback

from blackswan.falsifiers.live.guard import Guard, check_settings


class GuardCallback(TrainerCallback):
    """A guard from the beginning of a training to its end; `guard` is it, None before."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.guard: Guard | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Makes the guard from what is trained, and how the arguments say that gradients are clipped."""
        del control
        if self.guard is not None:
            self.guard.detach()
        optimizer = given["optimizer"]
        own = {"max_norm": args.max_grad_norm} if args.max_grad_norm else {}
        self.guard = Guard(given["model"], getattr(optimizer, "optimizer", optimizer), **{**own, **self.settings})
        self.guard.start = self.guard.step = state.global_step
        self.guard.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Takes the guard's hooks away."""
        del args, state, control, given
        if self.guard is not None:
            self.guard.detach()


def callback(**settings: Any) -> GuardCallback:
    """The callback; the settings are those of `blackswan.guard` but for model and optimizer. TypeError or ValueError for others."""
    bound = inspect.signature(Guard).bind(None, None, **settings)
    bound.apply_defaults()
    check_settings(**{name: bound.arguments[name] for name in inspect.signature(check_settings).parameters})
    return GuardCallback(**settings)
