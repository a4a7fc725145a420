"""The fused operations. Importing this package registers their fusions, in the order in which they are tried."""

from te_dist.ops.fused.around_linear import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from te_dist.ops.fused.linear_chain import ForwardGroupedMLP, LinearChain
from te_dist.ops.fused.userbuffers import UserbuffersBackwardLinear, UserbuffersForwardLinear
from te_dist.ops.fusions import fusions

fusions.both += [LinearChain.fuse_forward_backward_ops]
fusions.forward += [
    UserbuffersForwardLinear.fuse_forward_ops,
    ForwardLinearScaleAdd.fuse_forward_ops,
    ForwardLinearBiasAdd.fuse_forward_ops,
    ForwardLinearBiasActivation.fuse_forward_ops,
]
fusions.backward += [
    UserbuffersBackwardLinear.fuse_backward_ops,
    BackwardActivationBias.fuse_backward_ops,
    BackwardLinearAdd.fuse_backward_ops,
    BackwardAddRMSNorm.fuse_backward_ops,
    BackwardLinearScale.fuse_backward_ops,
]
fusions.ours += [*fusions.both, *fusions.forward, *fusions.backward]

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardGroupedMLP",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "LinearChain",
    "UserbuffersBackwardLinear",
    "UserbuffersForwardLinear",
]
