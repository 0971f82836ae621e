"""`blackswan.guard`: a training run that stops, or warns, at the first step that leaves a claim."""

import inspect
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from blackswan.contracts.conventions import shown
from blackswan.falsifiers.live.clipping import ClipWatch
from blackswan.falsifiers.live.losses import BINARY, CROSS_ENTROPY, LossWatch
from blackswan.falsifiers.live.norms import NormWatch, norms_of
from blackswan.falsifiers.live.parameters import AdamWatch, FrozenWatch, Moved, judge_flow
from blackswan.falsifiers.live.recorded import GuardError, Ledger

LOG = logging.getLogger("blackswan")
ON_FAIL = ("raise", "warn")


class Guard:
    """Holds a training run to the claims on its first steps and on every N-th: a context around the loop, with nothing to call inside it.

        with blackswan.guard(model, optimizer, max_norm=1.0):
            for batch in batches:
                loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y)
                ...

    `every` and `first` count the optimiser's steps. `max_norm` is the bound that gradients are to be clipped to, where one is; `frozen` are
    patterns of parameters that must stay as they are, beside those that require no gradient. A due step is put off while checking has taken
    more than the share `budget` of the time; the first ones never are. With `on_fail` "raise" a GuardError stops the run, before the
    optimiser moves anything where that can be; with "warn" each failure is a warning. The cases that fail are written to `folder`.

    Raises a TypeError or ValueError for a model or an optimiser that cannot be watched.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 100,
        first: int = 3,
        on_fail: str = "raise",
        max_norm: float | None = None,
        frozen: Sequence[str] = (),
        budget: float = 0.03,
        folder: str | Path = "blackswan-guard",
    ) -> None:
        check_settings(every, first, on_fail, max_norm, frozen, budget)
        _check_objects(model, optimizer)
        self.model, self.optimizer, self.every, self.first, self.budget = model, optimizer, every, first, budget
        self.on_fail, self.max_norm, self.frozen = on_fail, max_norm, frozen
        self.start = self.step = self.checked = 0
        self._ledger, self._said, self._due, self._on = Ledger(Path(folder)), set[str](), False, False
        self._moved: list[Moved] = []
        self._attached, self._began, self._ended = False, 0.0, 0.0

    @classmethod
    def callback(cls, **settings: Any) -> Any:
        """The same as a callback of transformers' Trainer, which gives it model, optimiser and max_norm; `settings` are the others.

        TypeError or ValueError for what is no setting.
        """
        bound = inspect.signature(cls).bind(None, None, **settings)
        bound.apply_defaults()
        check_settings(**{name: bound.arguments[name] for name in inspect.signature(check_settings).parameters})
        from blackswan.falsifiers.live.trainer import GuardCallback

        return GuardCallback(cls, settings)

    def __enter__(self) -> "Guard":
        """Watches from here on."""
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Takes all hooks away; after a run without any step, says that nothing was checked."""
        self.detach()

    def attach(self) -> None:
        """Sets the hooks. RuntimeError where they are set already."""
        if self._attached:
            raise RuntimeError("this guard watches already; detach() it first")
        start = time.perf_counter()
        ledger = self._ledger
        self._norms = norms_of(self.model, ledger)
        self._frozen = FrozenWatch(self.model, self.frozen, ledger)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        self._adam = AdamWatch(self.optimizer, names, ledger)
        self._losses, self._clips, self._norm_watch = LossWatch(ledger), ClipWatch(ledger), NormWatch([], ledger)
        before, after = self.optimizer.register_step_pre_hook(self._before), self.optimizer.register_step_post_hook(self._after)
        self._handles, self._began, self._attached = (before, after), start, True
        ledger.spent += time.perf_counter() - start
        self._begin()

    def detach(self) -> None:
        """Takes the hooks away; nothing where none are set."""
        if not self._attached:
            return
        for handle in self._handles:
            handle.remove()
        self._clips.close()
        self._losses.close()
        self._norm_watch.close()
        self._attached, self._ended = False, time.perf_counter()
        if not self.checked:
            LOG.warning("blackswan.guard: nothing was checked, for the optimiser made no step")

    def loss(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Enters a loss that is not computed by torch.nn.functional: logits [n, classes] and labels [n], or targets [n, classes] in [0, 1].

        It is to be the mean over the n rows, times whatever the loop multiplies it by. Returns the loss. ValueError for other shapes.
        """
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        if logits.dim() != 2 or (labels.shape != logits.shape and labels.shape != logits.shape[:1]) or loss.dim():
            raise ValueError(f"a loss of shape {list(loss.shape)} of {shapes}; expected one number of [n, classes] and [n] or [n, classes]")
        if self._on and loss.requires_grad:
            with self._ledger.timed():
                self._losses.record(BINARY if labels.dim() == 2 else CROSS_ENTROPY, logits, labels, loss, {})
        return loss

    def report(self) -> str:
        """In lines: how many steps were checked at which cost, what held, by which conventions, and what was not checked."""
        elapsed = (time.perf_counter() if self._attached else self._ended) - self._began
        share = self._ledger.spent / elapsed if elapsed else 0.0
        return f"checked {self.checked} of {self.step - self.start} steps, in {share:.1%} of the time\n{self._ledger.report()}"

    def _begin(self) -> None:
        """Decides whether the step that begins is checked."""
        number = self.step + 1
        early = number - self.start <= self.first
        self._due = self._due or early or number % self.every == 0
        affordable = self._ledger.spent <= self.budget * (time.perf_counter() - self._began)
        self._on = self._due and (early or affordable)
        self._due = self._due and not self._on
        self._ledger.step = number
        self._losses.begin(self._on)
        self._clips.begin(self._on)
        self._norm_watch.close()
        self._norm_watch = NormWatch(self._norms if self._on else [], self._ledger)

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del optimizer
        if not self._on:
            return
        with self._ledger.timed():
            self._norm_watch.judge()
            self._losses.judge()
            gradients = [each.grad for group in self.optimizer.param_groups for each in group["params"] if each.grad is not None]
            if gradients:
                self._clips.judge(gradients, self.max_norm)
            judge_flow(self.model, self._ledger)
            closure = any(each is not None for each in (*args[1:], *kwargs.values()))  # the first is the optimiser
            if closure:
                self._ledger.skip("OPT-ADAMW", "the optimiser's step has a closure, which makes the gradients anew")
            self._moved = [] if closure else self._adam.before()
        self._conclude()

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        if self._on:
            with self._ledger.timed():
                self._adam.judge(self._moved)
                self._frozen.judge()
            self._conclude()
            self.checked += 1
            for why in sorted(set(self._ledger.unchecked) - self._said):
                LOG.warning("blackswan.guard: not checked: %s", why)
            for operation in sorted(set(self._ledger.conventions) - self._said):
                LOG.warning("blackswan.guard: %s holds with %s", operation, shown(self._ledger.conventions[operation]))
            self._said |= {*self._ledger.unchecked, *self._ledger.conventions}
        self.step += 1
        self._begin()

    def _conclude(self) -> None:
        failures, self._ledger.failures = self._ledger.failures, []
        if not failures:
            return
        if self.on_fail == "raise":
            self.checked, self.step = self.checked + 1, self._ledger.step
            self.detach()
            raise GuardError(failures)
        for failure in failures:
            warnings.warn(str(failure), RuntimeWarning, stacklevel=2)


def check_settings(every: int, first: int, on_fail: str, max_norm: float | None, frozen: Sequence[str], budget: float) -> None:
    """ValueError for a setting that is not one."""
    for name, value, least in (("every", every, 1), ("first", first, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}; expected a whole number from {least} on, of steps of the optimiser")
    if on_fail not in ON_FAIL:
        raise ValueError(f"on_fail is {on_fail!r}; expected one of {', '.join(ON_FAIL)}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm!r}; expected a positive number, or None where nothing is clipped")
    if isinstance(frozen, str):
        raise ValueError(f"frozen is the text {frozen!r}; expected a list of patterns of parameters' names")
    if not 0 < budget <= 1:
        raise ValueError(f"budget is {budget!r}; expected a share of the time, above 0 and up to 1")


def _check_objects(model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim.Optimizer, whose steps are what a guard checks")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimiser has no parameter of the model; expected the optimiser that trains this model")


guard = Guard
