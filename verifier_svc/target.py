"""The target as the settings name it, found on this machine, and loaded whole or in parts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coppice.errors import StartError
from coppice.models.decoder import Decoder
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import choose_device, choose_dtype, choose_quantization
from coppice.settings import Settings, VerifierSettings
from verifier_svc.ranks import Ranks
from verifier_svc.tensor_parallel import ShardedDecoder, load_shard


@dataclass(frozen=True, slots=True)
class Target:
    path: Path
    device: torch.device
    dtype: torch.dtype
    quantize: bool
    max_context: int | None

    @classmethod
    def of(cls, settings: Settings) -> "Target":
        """Raises StartError with one line when there is none."""
        ranks = settings.verifier.tensor_parallel
        if ranks > 1 and ":" in settings.model.device:
            raise StartError(
                f"model.device = {settings.model.device} is one GPU, and verifier.tensor_parallel "
                f"= {ranks} needs one for each rank: set it to cuda"
            )
        path = resolve_model(settings.model.path, settings.cache_dir)
        device = choose_device(settings.model.device)
        dtype = choose_dtype(settings.model.dtype, device)
        quantize = choose_quantization(settings.model.quantization, dtype, device)
        return cls(path, device, dtype, quantize, settings.model.max_context)

    def load(self) -> Decoder:
        """All of it. Raises StartError."""
        return load_target(self.path, self.dtype, self.device, self.max_context, self.quantize)

    def load_shard(self, ranks: Ranks) -> ShardedDecoder:
        """One rank's part. Raises StartError."""
        return load_shard(self.path, self.dtype, ranks, self.max_context, self.quantize)


def threads_of(verifier: VerifierSettings, rank: int, nodes: Sequence[str] = ()) -> int | None:
    """The CPU threads of a rank: those of a host are shared out to the ranks on it. None: as many
    as there are cores. `nodes` are the hosts of all ranks; while nobody knows them, one for all."""
    if verifier.tensor_parallel == 1:
        return verifier.threads
    nodes = nodes or [""] * verifier.tensor_parallel
    every = verifier.threads or len(os.sched_getaffinity(0))
    each, more = divmod(every, nodes.count(nodes[rank]))
    return max(1, each + (nodes[:rank].count(nodes[rank]) < more))
