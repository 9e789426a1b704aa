"""The learning curve of a run, as CSV and as a picture."""

import csv
from collections.abc import Mapping
from pathlib import Path

from training.picture import new_figure

CURVE_FILE = "curve.csv"
COLUMNS: tuple[str, ...] = (
    "step",
    "epoch",
    "tokens",
    "seconds",
    "loss",
    "agreement",
    "acceptance_length",
)


class Curve:
    """A CSV file that grows while a run goes on; a run that is taken up again cuts what it had
    written after its checkpoint."""

    def __init__(self, path: Path, done: int) -> None:
        """`done` steps are behind; rows after them are dropped."""
        self._path = path
        self._rows = [row for row in _rows(path) if int(row["step"]) <= done]
        self._write("w", self._rows)

    @property
    def last(self) -> Mapping[str, str]:
        return self._rows[-1] if self._rows else {}

    def add(self, **values: float) -> None:
        """Columns that are not given stay empty."""
        row = {name: f"{values[name]:.6g}" if name in values else "" for name in COLUMNS}
        self._rows.append(row)
        self._write("a", [row])

    def _write(self, mode: str, rows: list[dict[str, str]]) -> None:
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)

    def draw(self, path: Path) -> None:
        """Agreement and acceptance length over steps. Raises StartError without matplotlib."""
        figure = new_figure(7, 4)
        left = figure.subplots()
        right = left.twinx()
        for axis, name, colour in ((left, "agreement", "C0"), (right, "acceptance_length", "C1")):
            points = [(float(r["step"]), float(r[name])) for r in self._rows if r[name]]
            axis.plot([x for x, _ in points], [y for _, y in points], colour, marker=".")
            axis.set_ylabel(name.replace("_", " "), color=colour)
        left.set_xlabel("step")
        figure.savefig(path, dpi=120)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
