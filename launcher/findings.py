"""What `coppice doctor` found, as a table for people and JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

State = Literal["ok", "note", "missing"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A note costs speed or a feature; what is missing stops a start."""

    name: str
    state: State
    found: str
    mend: str = ""

    @property
    def is_missing(self) -> bool:
        return self.state == "missing"


def as_json(findings: Sequence[Finding]) -> str:
    """`{"ok": bool, "findings": [{"name", "state", "found", "mend"}]}`."""
    ok = not any(finding.is_missing for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(f) for f in findings]}, indent=2)


def show(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("what", "state", "found", "mend"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        state = f"[{STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(finding.name, state, finding.found, finding.mend)
    console.print(table, highlight=False)
