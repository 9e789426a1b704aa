"""`coppice pull`: a model on this machine before it is needed."""

from rich.console import Console

from coppice.models.hub import resolve_model
from coppice.settings import Settings
from launcher.terminal import steps


def pull(settings: Settings, console: Console) -> None:
    """Prints the checkpoint directory. Raises StartError."""
    with steps(console) as shown:
        path = resolve_model(settings.model.path, settings.cache_dir, shown.advance)
    print(path)
