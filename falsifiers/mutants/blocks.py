"""Wrong blocks inside which something holds: one function of `impl` replaced each."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import current_thread, main_thread
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


def _ending(module: str, name: str, value: Any) -> Step:
    """A block at whose end the name of the module is what it is outside of all blocks."""

    @contextmanager
    def wrong(block: Step, *given: Any) -> Iterator[Any]:
        import importlib

        with block(*given) as found:
            yield found
        setattr(importlib.import_module(f"blackswan.impl.{module}"), name, value)

    return wrong


@wrong_step("impl.dispatch:replaced")
@contextmanager
def outer_replacement_wins(replaced: Step, functions: Mapping[str, Step]) -> Iterator[None]:
    """An outer block that replaces an operation goes on to do so inside an inner one."""
    from blackswan.impl import dispatch

    with replaced({name: function for name, function in functions.items() if name not in dispatch._replacements}):
        yield


@wrong_step("impl.dispatch:replaced")
@contextmanager
def inner_replacements_alone(replaced: Step, functions: Mapping[str, Step]) -> Iterator[None]:
    """An operation that an outer block replaces is not replaced inside an inner one."""
    from blackswan.impl import dispatch

    before, dispatch._replacements = dispatch._replacements, {}
    try:
        with replaced(functions):
            yield
    finally:
        dispatch._replacements = before


@wrong_step("impl.dispatch:without_content")
@contextmanager
def failed_estimates_keep_their_backend(without: Step, device: Any) -> Iterator[None]:
    """After an estimate that fails the backend is the one that it had chosen."""
    from blackswan.impl import dispatch

    chosen = dispatch._backend
    try:
        with without(device):
            chosen = dispatch._backend
            yield
    except BaseException:
        dispatch._backend = chosen
        raise


@wrong_step("impl.dispatch:call")
def kernels_before_replacements(call: Step, path: str, operation: str, /, **arguments: Any) -> Any:
    """An operation that a kernel computes is not replaced."""
    from blackswan.impl import dispatch

    before = dispatch._replacements
    if dispatch._kernel(operation, arguments):
        dispatch._replacements = {name: function for name, function in before.items() if name != operation}
    try:
        return call(path, operation, **arguments)
    finally:
        dispatch._replacements = before


@wrong_step("impl.dispatch:call")
def blocks_of_one_thread(call: Step, path: str, operation: str, /, **arguments: Any) -> Any:
    """Replacements, wrappings and names hold in the main thread alone, and not in the one of a GPU's backward pass."""
    from blackswan.impl import dispatch

    if current_thread() is main_thread():
        return call(path, operation, **arguments)
    with mock.patch.multiple(dispatch, _replacements={}, _around=None, _prefix=""):
        return call(path, operation, **arguments)


@wrong_step("impl.dispatch:backend_on")
def backend_of_one_thread(backend_on: Step, device: Any) -> Any:
    """In another thread than the main one the backend is the automatic one, whatever was chosen."""
    from blackswan.impl import dispatch

    with nullcontext() if current_thread() is main_thread() else mock.patch.object(dispatch, "_backend", "auto"):
        return backend_on(device)


@wrong_step("impl.dispatch:scope")
@contextmanager
def scope_of_the_innermost_alone(scope: Step, name: str) -> Iterator[None]:
    """Inside two scopes calls have the name of the inner one alone."""
    from blackswan.impl import dispatch

    before, dispatch._scopes = dispatch._scopes, ()
    try:
        with scope(name):
            yield
    finally:
        dispatch._scopes = before


@wrong_step("impl.dispatch:scope")
@contextmanager
def scope_puts_back_what_it_found(scope: Step, name: str) -> Iterator[None]:
    """A name that another thread gave meanwhile is lost, or stays for good."""
    from blackswan.impl import dispatch

    before = dispatch._scopes, dispatch._prefix
    with scope(name):
        yield
    dispatch._scopes, dispatch._prefix = before


@wrong_step("impl.validation:unchecked")
@contextmanager
def checks_are_as_they_were_found(unchecked: Step) -> Iterator[None]:
    """Where two threads leave checks out, the one that began first lets the other check, and that one leaves them out for good."""
    from blackswan.impl import validation

    before = validation._enabled, validation._blocks
    with unchecked():
        yield
    validation._enabled, validation._blocks = before


@wrong_step("impl.allocations:Allocations.part")
@contextmanager
def part_ends_with_the_inner_block(part: Step, self: Any, name: str) -> Iterator[None]:
    """Memory allocated after an inner block belongs to no part, though the outer one has not ended."""
    with part(self, name):
        yield
    self._part = "working"


@wrong_step("impl.folder:sole_writer")
@contextmanager
def inner_writer_opens_the_folder(sole: Step, folder: Any) -> Iterator[None]:
    """The folder is anybody's when the inner one of two blocks ends."""
    from filelock import FileLock

    from blackswan.impl.folder import LOCK

    with sole(folder):
        yield
    FileLock(folder / LOCK, timeout=0, is_singleton=True).release(force=True)


@wrong_step("impl.folder:sole_writer")
@contextmanager
def lock_removed_by_an_inner_writer(sole: Step, folder: Any) -> Iterator[None]:
    """The lock's file goes, while it is held, with an inner block too: another process makes a new one, and is inside as well."""
    from blackswan.impl.folder import LOCK

    with sole(folder):
        yield
        (folder / LOCK).unlink(missing_ok=True)


@wrong_step("impl.folder:sole_writer")
@contextmanager
def lock_removed_by_the_last_writer(sole: Step, folder: Any) -> Iterator[None]:
    """The lock's file goes with its last block: a process that opened it before and one that makes another are both the only writer."""
    from filelock import FileLock

    from blackswan.impl.folder import LOCK

    with sole(folder):
        yield
    if not FileLock(folder / LOCK, timeout=0, is_singleton=True).is_locked:
        (folder / LOCK).unlink(missing_ok=True)


wrong_steps(
    "impl.dispatch:replaced",
    replacements_end_with_the_inner_block=("No operation is replaced any more.", _ending("dispatch", "_replacements", {})),
)
wrong_steps(
    "impl.dispatch:recording", recording_ends_with_the_inner_one=("Nothing is recorded any more.", _ending("dispatch", "_calls", None))
)
wrong_steps(
    "impl.dispatch:wrapping", wrapping_ends_with_the_inner_one=("Nothing is wrapped any more.", _ending("dispatch", "_around", None))
)
wrong_steps(
    "impl.dispatch:backend", backend_ends_with_the_inner_block=("The backend is auto again.", _ending("dispatch", "_backend", "auto"))
)
wrong_steps("impl.validation:unchecked", checks_come_back_too_early=("Values are checked again.", _ending("validation", "_enabled", True)))


@wrong_step("impl.operations.attention:_exact_products")
@contextmanager
def attention_stays_unfused(exact: Step, q: Any) -> Iterator[None]:
    """Each thread puts back what it found when it chose attention that is not fused."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    del exact
    with sdpa_kernel(SDPBackend.MATH) if q.is_cuda else nullcontext():
        yield


@wrong_step("impl.dispatch:recording")
@contextmanager
def recordings_share_their_calls(recording: Step) -> Iterator[Any]:
    """A recording has the calls of those inside it, once they end."""
    from blackswan.impl import dispatch

    outer = dispatch._calls
    with recording() as calls:
        yield calls
    if outer is not None:
        outer.extend(calls)


@wrong_step("impl.operations.nf4:_library")
def compiler_is_lost_with_a_library(library: Step) -> Any:
    """Where NF4's library is missing, what stood for torch's compiler stays in its place."""
    import torch

    from blackswan.impl.operations.nf4 import _compile_when_called

    try:
        return getattr(library, "__wrapped__", library)()
    except ImportError:
        torch.compile = _compile_when_called  # type: ignore[assignment]
        raise


wrong_step(
    "impl.operations.nf4:_setting", name="compiler_is_lost_between_threads", doc="Two threads may import NF4's library at one time."
)(lambda _: nullcontext())


@wrong_step("impl.operations.nf4:_library")
def import_logs_nothing_more(library: Step) -> Any:
    """A warning of NF4's library is kept from the log by keeping all warnings from it."""
    logging.disable(logging.WARNING)
    return getattr(library, "__wrapped__", library)()


wrong_steps(
    "impl.dispatch:without_content",
    estimates_end_the_choice_of_a_backend=(
        "After an estimate the backend is chosen automatically, whatever block is around.",
        _ending("dispatch", "_backend", "auto"),
    ),
)
