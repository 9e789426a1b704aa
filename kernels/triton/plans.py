"""A batch's layout on the device, made once for all layers of a pass."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.triton import launches
from kernels.triton.plan import LIST, lay_out


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    batch: AttentionBatch
    tile_rows: int
    keys: Tensor  # int32: the batch's own list, then the lists of the rows of trees
    units: Tensor  # int32 [units, 8]
    rows: Tensor  # int32 [rows of trees, 11]
    states: int  # rows of partial states


@dataclass(slots=True)
class Plans:
    """The last batches' plans; two, since a target's and a drafter's passes may take turns."""

    last: tuple[Plan, ...] = field(default=())

    def of(self, batch: AttentionBatch, tile_rows: int) -> Plan:
        for plan in self.last:
            if plan.batch is batch and plan.tile_rows == tile_rows:
                return plan
        plan = new_plan(batch, tile_rows)
        self.last = (plan, *self.last[:1])
        return plan


def new_plan(batch: AttentionBatch, tile_rows: int) -> Plan:
    layout = lay_out(batch.shares.numpy(), tile_rows)
    device = batch.keys.device
    units = torch.from_numpy(layout.units).int().to(device)
    table = torch.from_numpy(layout.rows).int().to(device)
    # int32: half the addresses, and pools are not that large (checks.expect_pool).
    keys = batch.keys.new_empty(layout.keys + len(table) * LIST, dtype=torch.int32)
    keys[: layout.keys] = batch.keys
    launches.spell_paths(batch.keys, keys, table).run()
    return Plan(batch, tile_rows, keys, units, table, layout.states)
