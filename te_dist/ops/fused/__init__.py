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
for _cls in (
    UserbuffersForwardLinear,
    ForwardLinearScaleAdd,
    ForwardLinearBiasAdd,
    ForwardLinearBiasActivation,
):
    register_forward_fusion(_cls.fuse_forward_ops)
for _cls in (
    UserbuffersBackwardLinear,
    BackwardActivationBias,
    BackwardLinearAdd,
    BackwardAddRMSNorm,
    BackwardLinearScale,
):
    register_backward_fusion(_cls.fuse_backward_ops)

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
