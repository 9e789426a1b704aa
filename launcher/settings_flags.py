"""Makes a command-line flag of every setting, so that none can be forgotten."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from coppice.settings import Settings
from launcher.sources import Leaf, leaves, load_settings

SHORT_FLAGS = {
    "model.path": "--model",
    "speculation.head": "--head",
    "verifier.count": "--verifiers",
    "verifier.tensor_parallel": "--tensor-parallel",
    "drafter.count": "--drafters",
    "gateway.host": "--host",
    "gateway.port": "--port",
}
CONFIG_OPTION = typer.Option(
    "--config", metavar="FILE", help="TOML file of settings (or COPPICE_CONFIG)"
)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command(settings, ...)` a flag per setting in place of its first parameter.

    Flags are read as text: the settings model alone says what is allowed.
    """
    flags = {leaf.name.replace(".", "__"): leaf for leaf in leaves()}
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        config = values.pop("config")
        given = {
            leaf.name: value
            for parameter, leaf in flags.items()
            if (value := values.pop(parameter)) is not None
        }
        command(load_settings(given, config), **values)

    parameters = [
        *(keyword(parameter.name, parameter.annotation, parameter.default) for parameter in own),
        keyword("config", Annotated[Path | None, CONFIG_OPTION], None),
        *(keyword(name, Annotated[str | None, option(leaf)], None) for name, leaf in flags.items()),
    ]
    with_flags.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def option(leaf: Leaf) -> Any:
    names = [leaf.flag]
    if leaf.name in SHORT_FLAGS:
        names.insert(0, SHORT_FLAGS[leaf.name])
    default = leaf.field.default
    scalar = isinstance(default, str | int | float)
    return typer.Option(
        *names,
        metavar=metavar(leaf.field.annotation),
        help=leaf.field.description,
        show_default=str(default) if scalar else False,
        rich_help_panel=panel(leaf),
    )


def panel(leaf: Leaf) -> str:
    """The group's name and purpose, as the help shows them."""
    if len(leaf.path) == 1:
        return "General"
    group = Settings.model_fields[leaf.path[0]].annotation
    purpose = (inspect.getdoc(group) or "").splitlines()[0].rstrip(".")
    return f"{leaf.path[0].capitalize()}: {purpose[:1].lower()}{purpose[1:]}"


def metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    kinds = {bool: "true|false", int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT"}
    return next(kinds[kind] for kind in (annotation, *get_args(annotation)) if kind in kinds)
