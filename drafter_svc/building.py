"""From the settings to a drafter."""

from importlib.resources import files
from pathlib import Path

from coppice.errors import StartError
from coppice.models.eagle_head import load_eagle_head, load_embeddings
from coppice.models.hub import resolve_model
from coppice.models.loading import read_config
from coppice.models.placement import choose_device, choose_dtype
from coppice.settings import Settings
from drafter_svc.drafter import Drafter
from drafter_svc.eagle import EagleDrafter
from drafter_svc.ngram import NgramDrafter

SHIPPED_HEAD = "data/eagle2-smollm2-135m-first"


def build_drafter(settings: Settings) -> Drafter:
    """The drafter that `settings.speculation` describes. Raises StartError."""
    speculation, slots = settings.speculation, settings.drafter.kv_slots
    if speculation.drafter == "none":
        raise StartError("speculation.drafter = none: nothing to start; choose eagle or ngram")
    if speculation.drafter == "ngram":
        return NgramDrafter(slots, speculation.depth)
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    target = resolve_model(settings.model.path, settings.cache_dir)
    config = read_config(target, settings.model.max_context)
    embedding, lm_head = load_embeddings(target, config, dtype, device)
    path = speculation.head or shipped_head()
    head = load_eagle_head(path, config, embedding, lm_head, dtype, device)
    return EagleDrafter(head, slots, speculation.top_k, speculation.depth)


def shipped_head() -> Path:
    """The head that comes with the package, for the default model."""
    return Path(str(files("coppice") / SHIPPED_HEAD))
