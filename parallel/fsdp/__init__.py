"""FSDP2 with a quantized all-gather.

    api        fully_shard, enable_quantized_all_gather          attach    finds the weights, checks the order
    weight     the two hooks of a weight                         state     where a forward begins
    codec      a shard to bytes and back                         amaxes    one reduction for all weights
    planes     what a plane looks like on the wire               shards    where FSDP2 cuts, where blocks lie
    decision   how a weight travels, and why                     report    the table of all of them
    checkpoint save, load, resume                                materialize  from the meta device to values
    torch_fsdp torch's private names
"""

from te_dist.parallel.fsdp.api import enable_quantized_all_gather, fully_shard
from te_dist.parallel.fsdp.checkpoint import PendingSave, latest_checkpoint, load_checkpoint, save_checkpoint
from te_dist.parallel.fsdp.materialize import materialize
from te_dist.parallel.fsdp.report import AllGatherReport, GatheredParameter, all_gather_report

__all__ = [
    "AllGatherReport",
    "GatheredParameter",
    "PendingSave",
    "all_gather_report",
    "enable_quantized_all_gather",
    "fully_shard",
    "latest_checkpoint",
    "load_checkpoint",
    "materialize",
    "save_checkpoint",
]
