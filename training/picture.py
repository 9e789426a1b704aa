"""Figures, where matplotlib is installed."""

from typing import TYPE_CHECKING

from coppice.errors import StartError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Of so many inches. Raises StartError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StartError("a picture needs matplotlib: pip install 'coppice[train]'") from None
    return Figure(figsize=(width, height), layout="constrained")
