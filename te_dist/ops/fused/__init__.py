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
from te_dist.ops.fusions import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion

register_forward_backward_fusion(LinearChain.fuse_forward_backward_ops)
register_forward_fusion(UserbuffersForwardLinear.fuse_forward_ops)
register_forward_fusion(ForwardLinearScaleAdd.fuse_forward_ops)
register_forward_fusion(ForwardLinearBiasAdd.fuse_forward_ops)
register_forward_fusion(ForwardLinearBiasActivation.fuse_forward_ops)
register_backward_fusion(UserbuffersBackwardLinear.fuse_backward_ops)
register_backward_fusion(BackwardActivationBias.fuse_backward_ops)
register_backward_fusion(BackwardLinearAdd.fuse_backward_ops)
register_backward_fusion(BackwardAddRMSNorm.fuse_backward_ops)
register_backward_fusion(BackwardLinearScale.fuse_backward_ops)

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
