"""Every setting of the service: flags, `COPPICE_...` variables and a TOML file fill this model."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from coppice.tree import MAX_ROWS

MIN_SLOTS = 128

DrafterKind = Literal["eagle", "medusa", "model", "ngram", "none"]
# Ray's strategies for a placement group.
RankPlacement = Literal["strict_pack", "pack", "spread", "strict_spread"]


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Group):
    """The target model."""

    path: str = Field(
        default="smollm2-135m-instruct", description="name, directory, GGUF file or hub id"
    )
    served_name: str | None = Field(
        default=None, description="name that requests may use; default: the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="of the weights; auto = bfloat16, and float32 on a CPU without our kernels",
    )
    quantization: Literal["none", "int8"] = Field(
        default="none", description="of the weights, on a CPU: int8 is half of bfloat16's memory"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    max_context: int | None = Field(
        default=None, ge=2, description="tokens; default: the model's own"
    )


class SpeculationSettings(Group):
    """The drafter and the shape of its tree."""

    drafter: DrafterKind = Field(default="eagle", description="kind of drafter")
    head: Path | None = Field(
        default=None, description="directory of EAGLE or Medusa heads; default: the shipped EAGLE"
    )
    draft_model: str | None = Field(
        default=None, description="of drafter = model: name, directory, GGUF file or hub id"
    )
    ngram: bool = Field(default=True, description="n-gram candidates beside the drafter's")
    tree: Literal["dynamic", "static"] = Field(
        default="dynamic",
        description="dynamic: follows the scores; static: the published one of EAGLE-1 or Medusa",
    )
    nodes: int = Field(
        default=15, ge=1, le=MAX_ROWS - 1, description="drafted nodes of a tree at most"
    )
    budget: Literal["auto", "fixed"] = Field(
        default="auto", description="auto: as many nodes as pay by measurement; fixed: `nodes`"
    )
    depth: int = Field(default=6, ge=1, le=12, description="levels of a tree at most")
    top_k: int = Field(
        default=8, ge=1, le=16, description="width of a level, and children of a node"
    )

    @model_validator(mode="after")
    def frontier_fits_one_mask(self) -> "SpeculationSettings":
        if self.top_k * (self.depth - 1) > MAX_ROWS:
            raise ValueError(f"top_k * (depth - 1) must be at most {MAX_ROWS}")
        return self

    @model_validator(mode="after")
    def drafter_has_what_it_needs(self) -> "SpeculationSettings":
        if self.drafter == "model" and self.draft_model is None:
            raise ValueError("drafter = model needs draft_model: a small model of this tokenizer")
        if self.drafter == "medusa" and self.head is None:
            raise ValueError("drafter = medusa needs head: the directory of this target's heads")
        return self


class VerifierSettings(Group):
    """The workers that run the target."""

    count: int = Field(default=1, ge=1, le=64, description="workers")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="ranks that share one target, each on a GPU of its own"
    )
    placement: RankPlacement = Field(
        default="strict_pack",
        description="of the ranks: all on one host, on few hosts, on many, or each on its own",
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of all ranks on a host; default: all cores"
    )
    kv_slots: int | None = Field(
        default=None,
        ge=MIN_SLOTS,
        description="tokens that the KV pool holds; default: what memory_fraction has room for",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="share of free memory for the KV pool; default: 0.9 of a GPU's, and on a CPU "
        "0.25, for all verifiers together",
    )
    prefill_chunk: int = Field(default=256, ge=1, description="prompt tokens of one pass at most")
    prefix_cache: bool = Field(
        default=True, description="keep what was computed for prompts that begin alike"
    )
    row_budget: int = Field(default=128, ge=1, description="tree rows of one pass at most")
    max_sessions: int = Field(default=256, ge=1, description="running and waiting sessions at most")
    max_untaken: int = Field(
        default=256, ge=1, description="tokens left unread by a gateway, beyond which it is awaited"
    )


class DrafterSettings(Group):
    """The workers that draft."""

    count: int = Field(default=1, ge=0, le=64, description="workers; 0 = plain decoding")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; default: all cores")
    kv_slots: int = Field(default=16384, ge=64, description="tokens that the draft KV cache holds")
    quantization: Literal["auto", "none", "int8"] = Field(
        default="auto",
        description="of its weights; auto = int8 where our kernels are faster in it, "
        "which with AVX512-BF16 they are not",
    )


class GuardSettings(Group):
    """The concurrency guard: plain decoding above a queue depth."""

    enter: int | None = Field(
        default=None,
        ge=0,
        description="plain decoding above this queue depth; default: 48 (drafter = model: 24), "
        "and more where trees are measured to pay",
    )
    exit: int | None = Field(
        default=None,
        ge=0,
        description="speculation again below this queue depth; default: three quarters of enter",
    )
    dwell_seconds: float = Field(default=1.0, ge=0.0, description="least time between two switches")

    def thresholds(self, drafter: DrafterKind) -> tuple[int, int]:
        """`enter` and `exit` for a kind of drafter. A draft model's own passes grow with the load
        as the target's do; a head's, and n-grams, hardly count."""
        default = 24 if drafter == "model" else 48
        enter = default if self.enter is None else self.enter
        return enter, enter * 3 // 4 if self.exit is None else self.exit

    @model_validator(mode="after")
    def ordered(self) -> "GuardSettings":
        if self.exit is not None and self.enter is None:
            raise ValueError(f"exit ({self.exit}) needs enter, which it must not be above")
        if self.exit is not None and self.enter is not None and self.exit > self.enter:
            raise ValueError(f"exit ({self.exit}) must not be above enter ({self.enter})")
        return self


class GatewaySettings(Group):
    """The public door."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=50051, ge=0, le=65535, description="gRPC; 0 = any free")
    http_port: int = Field(default=8080, ge=0, le=65535, description="/metrics; 0 = any free")
    max_inflight: int = Field(default=512, ge=1, description="requests at once; more are refused")
    recovery_seconds: float = Field(
        default=120.0, ge=0.0, description="a running answer waits so long for a lost verifier"
    )


class RedisSettings(Group):
    """The store of the sessions."""

    url: str | None = Field(
        default=None, description="redis://... or unix://...; default: embedded"
    )
    session_ttl_seconds: int = Field(default=600, ge=1, description="life of a session's record")


class RaySettings(Group):
    """The cluster that places the workers."""

    address: str | None = Field(
        default=None, description="default: a cluster of this machine's own"
    )
    namespace: str = Field(default="coppice", min_length=1, description="of the named actors")


class Settings(BaseSettings):
    """All settings. Unknown keys are refused.

    Constructed directly it takes what it is given and defaults; the command line reads the
    environment and the file (`launcher/sources.py`), so that no worker's environment can differ.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix="COPPICE_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
    )

    model: ModelSettings = ModelSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    verifier: VerifierSettings = VerifierSettings()
    drafter: DrafterSettings = DrafterSettings()
    guard: GuardSettings = GuardSettings()
    gateway: GatewaySettings = GatewaySettings()
    redis: RedisSettings = RedisSettings()
    ray: RaySettings = RaySettings()
    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "coppice",
        description="converted models; default: ~/.cache/coppice",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severity that is logged"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)
