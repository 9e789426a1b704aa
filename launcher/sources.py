"""Fills the settings: flags over environment over TOML file over defaults."""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from coppice.errors import StartError
from coppice.settings import Settings

PREFIX = "COPPICE_"
CONFIG_VARIABLE = "COPPICE_CONFIG"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting, such as `guard.enter`."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        return PREFIX + "__".join(self.path).upper()

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")


@dataclass(frozen=True, slots=True)
class Source:
    """Values by group and key, and where a user finds one of them."""

    values: dict[str, Any]
    describe: Callable[[Leaf], str]


def leaves(model: type[BaseModel] = Settings, above: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """All settings in the order of the model."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, (*above, name))
        else:
            yield Leaf((*above, name), field)


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """The settings of this process. `flags` are by dotted name, such as `guard.enter`.

    Raises StartError, one line, for a key that does not exist or a value that is not allowed.
    """
    refuse_unknown_variables(os.environ)
    variable = os.environ.get(CONFIG_VARIABLE)
    path = config or (Path(variable) if variable else None)
    file = read_toml(path) if path else {}
    given: dict[str, Any] = {}
    for name, value in flags.items():
        insert(given, tuple(name.split(".")), value)
    sources = (
        Source(given, lambda leaf: leaf.flag),
        Source(EnvSettingsSource(Settings)(), lambda leaf: leaf.variable),
        Source(file, lambda _: str(path)),
    )
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merge(merged, source.values)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise StartError(explain(error, sources)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Raises StartError when the file is missing, no TOML, or names an unknown setting."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"settings file {path}: {error.strerror}; check --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"settings file {path} is not TOML: {error}") from None
    known = [leaf.name for leaf in leaves()]
    for name in dotted(values):
        if name not in known:
            raise StartError(f"settings file {path}: no setting {name}; {suggest(name, known)}")
    return values


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raises StartError for a `COPPICE_...` variable that is no setting, such as a misspelt one."""
    known = [CONFIG_VARIABLE, *(leaf.variable for leaf in leaves())]
    for variable in environment:
        if variable.upper().startswith(PREFIX) and variable.upper() not in known:
            hint = suggest(variable.upper(), known)
            raise StartError(f"environment variable {variable}: no such setting; {hint}")


def suggest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {nearest[0]}?" if nearest else "`coppice up --help` lists all settings"


def explain(error: ValidationError, sources: tuple[Source, ...]) -> str:
    """The first fault as one line that names the setting, its value and where that came from."""
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    leaf = next((leaf for leaf in leaves() if leaf.name == location), None)
    if leaf is None:  # a rule over a whole group
        return f"settings {location}: {message}"
    origin = next(s.describe(leaf) for s in sources if location in dotted(s.values))
    allowed = message.removeprefix("Input should be ")
    return f"{location} = {first['input']!r} ({origin}): must be {allowed}"


def dotted(values: Mapping[str, Any], above: str = "") -> list[str]:
    """Dotted names of all values of nested mappings."""
    names: list[str] = []
    for key, value in values.items():
        is_group = isinstance(value, dict)
        names += dotted(value, f"{above}{key}.") if is_group else [f"{above}{key}"]
    return names


def insert(values: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def merge(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lays `over` onto `under`, key by key."""
    for key, value in over.items():
        below = under.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merge(below, value)
        else:
            under[key] = value
