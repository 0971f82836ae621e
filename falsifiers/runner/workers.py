"""Worker processes of the commands."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")


@contextmanager
def workers(count: int) -> Iterator["Workers"]:
    """At most so many processes, started when there are tasks; whatever comes, none is left.

    They leave Ctrl-C, which a terminal sends to all of them, to this process. Where an error or Ctrl-C stops this one, they are
    ended at once.
    """
    found = Workers(count)
    try:
        yield found
    except BaseException:
        found.end(list(found.processes))
        raise
    finally:
        found.close()


class Workers:
    """Processes that each answer one task at a time, over a pipe of their own.

    Not a pool of the standard library: those of multiprocessing are daemons, which may have no children, and some procedures run
    in processes of their own; that of concurrent.futures hands out tasks by threads and semaphores, which an interrupt leaves in
    a state that its end waits for or complains about.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes: dict[Connection[Any, Any], SpawnProcess] = {}

    def as_done(self, tasks: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
        """Index and answer of each task, the soonest done first. An error of a task is raised, with the worker's traceback as a note.

        A ChildProcessError says that a worker ended before it answered.
        """
        self._start(min(self.count, len(tasks)))
        busy: dict[Connection[Any, Any], int] = {}
        waiting = iter(enumerate(tasks))
        try:
            for pipe, (index, task) in zip(self.processes, waiting, strict=False):
                busy[pipe] = index
                self._ask(pipe, task)
            while busy:
                answered = connection.wait(list(busy))
                for pipe in [each for each in busy if each in answered]:
                    answer = self._answer(pipe)
                    index = busy.pop(pipe)
                    if (following := next(waiting, None)) is not None:
                        busy[pipe], task = following
                        self._ask(pipe, task)
                    yield index, answer
        finally:
            self.end(busy)

    def in_order(self, tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
        """The answer of each task, in the order of the tasks, as soon as those before it are done too."""
        done: dict[int, T] = {}
        following = 0
        for index, answer in self.as_done(tasks):
            done[index] = answer
            while following in done:
                yield done.pop(following)
                following += 1

    def close(self) -> None:
        """Waits until all have ended: those that still work, after their task."""
        for pipe in self.processes:
            pipe.close()
        for process in self.processes.values():
            process.join()
        self.processes.clear()

    def end(self, pipes: Iterable["Connection[Any, Any]"]) -> None:
        """Ends processes whose answers nobody waits for."""
        for pipe in pipes:
            if (process := self.processes.pop(pipe, None)) is not None:
                process.terminate()
                process.join()
                pipe.close()

    def _ask(self, pipe: "Connection[Any, Any]", task: Callable[[], Any]) -> None:
        try:
            pipe.send(task)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended(pipe) from None

    def _answer(self, pipe: "Connection[Any, Any]") -> Any:
        try:
            answer, error = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended(pipe) from None
        if error is not None:
            raise error
        return answer

    def _ended(self, pipe: "Connection[Any, Any]") -> ChildProcessError:
        process = self.processes[pipe]
        process.join()
        return ChildProcessError(
            f"a worker process ended before it answered, with exit status {process.exitcode}; "
            "one below 0 is the signal that ended it, -9 most often for want of memory"
        )

    def _start(self, count: int) -> None:
        """Starts what is missing, with Ctrl-C blocked, as it stays in them until they ignore it: one that still imports would print."""
        resource_tracker.ensure_running()  # which unblocks it when it starts
        context = multiprocessing.get_context("spawn")
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            while len(self.processes) < count:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,))
                process.start()
                self.processes[ours] = process
                theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _work(pipe: "Connection[Any, Any]") -> None:
    """Answers tasks until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        answer, failure = None, None
        try:
            answer = task()
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            failure = error
        pipe.send((answer, failure))
