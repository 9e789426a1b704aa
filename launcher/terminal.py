"""What the command line shows beside its results: the steps of long work and their progress."""

import contextlib
from collections.abc import Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """One step at a time: a spinner with a bar on a terminal, else a line for each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self._current: TaskID | None = None
        self._name = ""

    def begin(self, what: str) -> None:
        """The step before, if any, has ended."""
        self._name = what
        if not self._console.is_terminal:
            self._console.print(what, markup=False, highlight=False)
            return
        if self._current is not None:
            self.progress.remove_task(self._current)
        self._current = self.progress.add_task(what, total=None)

    def advance(self, what: str, done: int, total: int) -> None:
        """`done` of `total` of the step `what`, which begins with the first call."""
        if what != self._name:
            self.begin(what)
        if self._current is not None:
            self.progress.update(self._current, completed=done, total=total)


@contextlib.contextmanager
def steps(console: Console) -> Generator[Steps, None, None]:
    """Shown while the context lasts."""
    shown = Steps(console)
    with shown.progress if console.is_terminal else contextlib.nullcontext():
        yield shown
