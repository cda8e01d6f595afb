"""Tables and progress bars, drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")


def mebibytes(size: float) -> str:
    """Writes a number of bytes in MiB, small ones with the digits that tell them from 0."""
    return f"{size / 2**20:,.1f}" if size >= 2**20 or not size else f"{size / 2**20:.2g}"


def render(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None, text: int = 0
) -> str:
    """Draws a table as plain text.

    Args:
        title: a line above it.
        header: the columns' names.
        rows: the cells.
        caption: a line below it.
        text: how many of the first columns are text, aligned to the left; the others are numbers, to the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=1000, color_system=None, force_terminal=False, force_jupyter=False).print(
        table, markup=False
    )
    drawn = "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
    return "\n".join([title, drawn] + ([caption] if caption else []))


@contextmanager
def progress_bars(enabled: bool = True) -> Generator[Progress]:
    """Opens a display of progress bars on standard error, with rate and time left; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text("" if rate is None else f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True, force_jupyter=False)
    with Progress(*columns, console=console, disable=not (enabled and console.is_terminal)) as progress:
        yield progress


def track(
    items: Iterable[T],
    label: str,
    *,
    total: int | None = None,
    done: int = 0,
    enabled: bool = True,
    size: Callable[[T], int] | None = None,
) -> Generator[T]:
    """Yields the items under a progress bar that starts at `done`, each counted by its size, or as one."""
    with progress_bars(enabled) as progress:
        task = progress.add_task(label, total=total, completed=done, note="")
        for item in items:
            yield item
            progress.advance(task, 1 if size is None else size(item))
