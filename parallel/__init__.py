"""te_dist.parallel: tensor and sequence parallelism, quantized collectives and FSDP2 for te_dist.

The one-process core below this package knows process groups only as arguments of a call; what spans ranks lives here.
"""

from te_dist.parallel import ops as ops
from te_dist.parallel.attention import MultiheadAttention, TransformerLayer
from te_dist.parallel.collectives import (
    all_reduce_amax,
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from te_dist.parallel.comm import TensorParallel
from te_dist.parallel.embedding import VocabParallelEmbedding, vocab_parallel_cross_entropy
from te_dist.parallel.fsdp import (
    AllGatherReport,
    GatheredParameter,
    PendingSave,
    all_gather_report,
    enable_quantized_all_gather,
    fully_shard,
    latest_checkpoint,
    load_checkpoint,
    materialize,
    save_checkpoint,
)
from te_dist.parallel.mappings import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
)
from te_dist.parallel.modules import (
    ColumnParallelLinear,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RowParallelLinear,
)
from te_dist.parallel.norms import LayerNorm, RMSNorm
from te_dist.parallel.plans import check_ranks, parallelize
from te_dist.parallel.report import Collective, CommReport, comm_report
from te_dist.parallel.rng import RankStream, rank_stream, seed_streams
from te_dist.parallel.sequence import sequence_shards, shard_sizes
from te_dist.parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel
from te_dist.parallel.userbuffers import (
    OverlapReport,
    OverlapUnavailable,
    overlap_report,
    overlapped,
    set_overlap,
)
from te_dist.transport import RankFailed, RanksDisagree

__all__ = [
    "AllGatherReport",
    "Collective",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "CommReport",
    "GatheredParameter",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "OverlapReport",
    "OverlapUnavailable",
    "PendingSave",
    "RMSNorm",
    "RankFailed",
    "RankStream",
    "RanksDisagree",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "TensorParallel",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "all_gather_report",
    "all_reduce_amax",
    "allreduce",
    "check_ranks",
    "comm_report",
    "copy_to_tensor_parallel",
    "enable_quantized_all_gather",
    "fully_shard",
    "gather_along_first_dim",
    "gather_from_sequence_parallel",
    "latest_checkpoint",
    "load_checkpoint",
    "materialize",
    "overlap_report",
    "overlapped",
    "parallelize",
    "rank_stream",
    "reduce_from_tensor_parallel",
    "reduce_scatter_along_first_dim",
    "reduce_scatter_to_sequence_parallel",
    "save_checkpoint",
    "scatter_to_sequence_parallel",
    "seed_streams",
    "sequence_shards",
    "set_overlap",
    "shard_sizes",
    "vocab_parallel_cross_entropy",
]
