"""te_dist.parallel: tensor and sequence parallelism, quantized collectives and FSDP2 for te_dist.

The one-process core below this package knows process groups only as arguments of a call; what spans ranks lives here.
"""

from te_dist.parallel import ops as ops
from te_dist.parallel.collectives import (
    all_reduce_amax,
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from te_dist.parallel.fsdp import (
    AllGatherReport,
    GatheredParameter,
    all_gather_report,
    enable_quantized_all_gather,
    fully_shard,
)
from te_dist.parallel.report import Collective, CommReport, comm_report
from te_dist.transport import RankFailed, RanksDisagree

__all__ = [
    "AllGatherReport",
    "Collective",
    "CommReport",
    "GatheredParameter",
    "RankFailed",
    "RanksDisagree",
    "all_gather_report",
    "all_reduce_amax",
    "allreduce",
    "comm_report",
    "enable_quantized_all_gather",
    "fully_shard",
    "gather_along_first_dim",
    "reduce_scatter_along_first_dim",
]
