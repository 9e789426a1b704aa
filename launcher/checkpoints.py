"""What the doctor says about the model and the head. Downloads and converts nothing."""

from coppice.errors import StartError
from coppice.models.hub import resolve_model
from coppice.models.loading import read_config
from coppice.settings import Settings
from drafter_svc.building import build_drafter, draft_model_path
from launcher.findings import Finding


class NotHereYet(Exception):
    """The model would have to be converted or downloaded first."""


def model_and_head(settings: Settings) -> list[Finding]:
    name = settings.model.path
    try:
        path = resolve_model(name, settings.cache_dir, refuse_work)
        config = read_config(path, settings.model.max_context)
    except NotHereYet as work:
        mend = f"`coppice pull {name}`, or let the first `up` do it"
        return [Finding("model", "note", f"{name}: {work} comes first", mend)]
    except StartError as error:
        return [Finding("model", "missing", str(error), "choose another with --model")]
    found = f"{name}: {config.model_type}, {config.layers} layers, in {path}"
    return [Finding("model", "ok", found), head(settings)]


def refuse_work(what: str, done: int, total: int) -> None:
    raise NotHereYet(what)


def head(settings: Settings) -> Finding:
    """Whether what drafts fits the target, by loading it."""
    kind = settings.speculation.drafter
    if kind in ("ngram", "none"):
        return Finding("head", "ok", f"drafter {kind} needs none")
    name = settings.speculation.draft_model
    try:
        if kind == "model":
            draft_model_path(settings, refuse_work)
        drafter = build_drafter(settings)
    except NotHereYet as work:
        mend = f"`coppice pull {name}`, or let the first `up` do it"
        return Finding("head", "note", f"draft model {name}: {work} comes first", mend)
    except StartError as error:
        mend = "or use --speculation-drafter ngram, which fits every model"
        return Finding("head", "missing", str(error), mend)
    return Finding("head", "ok", f"{drafter.identity} fits")
