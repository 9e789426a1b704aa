"""What a client may ask of one answer, with the bounds of every field."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coppice.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_REGEX_CHARACTERS = 8_192
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARACTERS)]
Choice = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


class Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Choices(Params):
    """Names as in `protos/common.proto`."""

    values: tuple[Choice, ...] = Field(min_length=1, max_length=MAX_CHOICES)


class StructuredOutput(Params):
    """What the text of the answer has to be: one of the fields is set. Names as in
    `protos/common.proto`; whether it compiles is for `coppice.grammar` to say."""

    json_schema: str | None = Field(default=None, min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)
    regex: str | None = Field(default=None, min_length=1, max_length=MAX_REGEX_CHARACTERS)
    choice: Choices | None = None
    grammar: str | None = Field(default=None, min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)
    json_object: bool | None = None


class SamplingParams(Params):
    """How a token is drawn. Names and defaults as in `protos/common.proto`."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    logit_bias: dict[TokenId, Bias] = Field(
        default_factory=dict[int, float], max_length=MAX_LOGIT_BIASES
    )
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    structured_output: StructuredOutput | None = None

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)


class StoppingParams(Params):
    """When an answer ends. Names and defaults as in `protos/common.proto`."""

    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    ignore_eos: bool = False


P = TypeVar("P", bound=Params)
Location = tuple[int | str, ...]


def parse_params(kind: type[P], name: str, fields: Mapping[str, Any]) -> P:
    """`fields` (of a decoded message) as `kind`.

    Raises InvalidArgument that names the first offending field, its value and the whole range
    that is allowed.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(
            _path(name, first["loc"]), first["input"], _allowed(kind, first["loc"])
        ) from None


def _path(name: str, location: Location) -> str:
    head, *inner = location
    parts = (_shown_part(part) for part in inner if part != "[key]")
    return f"{name}.{head}" + "".join(parts)


def _shown_part(part: int | str) -> str:
    is_field = isinstance(part, str) and part.isidentifier()
    return f".{part}" if is_field else f"[{part}]"


def _allowed(kind: type[Params], location: Location) -> str:
    """What the field at `location` takes, told from its own constraints."""
    if location[-1] == "[key]":  # a JSON schema does not tell the constraints of keys
        return _describe(TypeAdapter[int](TokenId).json_schema())
    schema = kind.model_json_schema()
    inner: dict[str, Any] = schema.get("$defs", {})
    for part in location:
        if "properties" not in schema:
            schema = _element(schema)
            continue
        fields: dict[str, Any] = schema["properties"]
        if part not in fields:
            return f"one of the fields {', '.join(fields)}"
        schema = fields[str(part)]
        schema = schema.get("anyOf", [schema])[0]
        if "$ref" in schema:
            schema = inner[schema["$ref"].rpartition("/")[2]]
    return _describe(schema)


def _element(schema: dict[str, Any]) -> dict[str, Any]:
    return schema["items"] if schema["type"] == "array" else schema["additionalProperties"]


def _describe(schema: dict[str, Any]) -> str:
    """One JSON schema of a field in words."""
    match schema["type"]:
        case "number":
            return f"a finite number in {_interval(schema)}"
        case "integer":
            return f"an integer in {_interval(schema)}"
        case "string":
            return f"a string of {schema['minLength']} to {schema['maxLength']} characters"
        case "array":
            least = f"{schema['minItems']} to" if "minItems" in schema else "at most"
            each = _describe(_element(schema))
            return f"a list of {least} {schema['maxItems']}, each {each}"
        case "object" if "properties" in schema:
            return f"a message of the fields {', '.join(schema['properties'])}"
        case "object":
            return f"a map of at most {schema['maxProperties']}, each {_describe(_element(schema))}"
        case _:
            return "true or false"


def _interval(schema: dict[str, Any]) -> str:
    low = f"[{_shown(schema['minimum'])}" if "minimum" in schema else ""
    high = f"{_shown(schema['maximum'])}]" if "maximum" in schema else ""
    return (
        f"{low or '(' + _shown(schema['exclusiveMinimum'])}, "
        f"{high or _shown(schema['exclusiveMaximum']) + ')'}"
    )


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument when a token id lies outside of the vocabulary."""
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise InvalidArgument(f"{name}[{index}]", token, f"a token id in [0, {vocab_size})")
