"""From the settings to a drafter."""

from pathlib import Path
from typing import Literal

from coppice.errors import StartError
from coppice.models.heads.loading import load_head, shipped_head
from coppice.models.hub import Progress, resolve_model
from coppice.models.loading import load_embeddings, read_config
from coppice.models.medusa import load_medusa
from coppice.models.placement import choose_device, choose_dtype, choose_quantization
from coppice.settings import Settings, SpeculationSettings
from drafter_svc.draft_model import load_draft_model
from drafter_svc.drafter import Drafter
from drafter_svc.eagle import EagleNetwork
from drafter_svc.growing import GrowingDrafter
from drafter_svc.medusa import MedusaDrafter
from drafter_svc.merged import MergedDrafter
from drafter_svc.ngram import NgramDrafter
from drafter_svc.static_tree import EAGLE_PATHS, MEDUSA_PATHS, RankPath, StaticPolicy
from drafter_svc.tree_builder import DynamicPolicy, TreePolicy


def build_drafter(settings: Settings, policy: TreePolicy | None = None) -> Drafter:
    """The drafter that `settings.speculation` describes; its trees grow by `policy` if one is
    given. Raises StartError."""
    speculation = settings.speculation
    if speculation.drafter == "none":
        kinds = "eagle, medusa, model or ngram"
        raise StartError(f"speculation.drafter = none: nothing to start; choose {kinds}")
    ngram = NgramDrafter(settings.drafter.kv_slots, speculation.depth)
    if speculation.drafter == "ngram":
        return ngram
    drafter = _with_weights(settings, speculation.drafter, policy)
    return MergedDrafter(drafter, ngram) if speculation.ngram else drafter


def _with_weights(
    settings: Settings, kind: Literal["eagle", "medusa", "model"], policy: TreePolicy | None
) -> Drafter:
    speculation, slots = settings.speculation, settings.drafter.kv_slots
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    quantize = choose_quantization(
        settings.drafter.quantization, dtype, device, "drafter.quantization"
    )
    target = resolve_model(settings.model.path, settings.cache_dir)
    config = read_config(target, settings.model.max_context)
    if kind == "model":
        path = draft_model_path(settings)
        network = load_draft_model(path, target, config.vocab_size, dtype, device, quantize)
        return GrowingDrafter(network, slots, policy or tree_policy(speculation, EAGLE_PATHS))
    embedding, lm_head = load_embeddings(target, config, dtype, device)
    path = speculation.head or shipped_head()
    if kind == "medusa":
        heads = load_medusa(path, config, lm_head, dtype, device, quantize)
        return MedusaDrafter(heads, policy or tree_policy(speculation, MEDUSA_PATHS))
    head = load_head(path, config, embedding, lm_head, dtype, device, quantize)
    network = EagleNetwork(head)
    return GrowingDrafter(network, slots, policy or tree_policy(speculation, EAGLE_PATHS))


def draft_model_path(settings: Settings, progress: Progress | None = None) -> Path:
    """The checkpoint directory of the draft model, made first where it has to be. Raises
    StartError."""
    name = settings.speculation.draft_model
    assert name is not None, "drafter = model without draft_model: the settings refuse it"
    try:
        return resolve_model(name, settings.cache_dir, progress)
    except StartError as error:
        raise StartError(f"speculation.draft_model: {error}") from None


def tree_policy(speculation: SpeculationSettings, published: frozenset[RankPath]) -> TreePolicy:
    """How trees grow; a static one along the `published` paths, as far as the settings allow."""
    if speculation.tree == "static":
        return StaticPolicy(published).within(speculation.top_k, speculation.depth)
    return DynamicPolicy(speculation.top_k, speculation.depth)
