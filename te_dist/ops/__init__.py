"""Fusible operations: small steps of computation that are composed by users and fused by te_dist.

    BasicOperation       one step; a user's own has the split API (op_forward_compute and op_forward_save_ctx, which
                         compiles) or the legacy one (op_forward)
    FusedOperation       several at once, registered with register_forward_fusion and its siblings
    Sequential           operations one after the other
    OperationFuser       what runs a list of them

docs/ops.md teaches writing one.
"""

from te_dist.ops import fused as fused
from te_dist.ops.basic import (
    GEGLU,
    GELU,
    QGEGLU,
    QGELU,
    Activation,
    AddExtraInput,
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    GroupedLinear,
    Identity,
    L2Normalization,
    LayerNorm,
    MakeExtraOutput,
    Quantize,
    ReduceScatter,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
    activation,
)
from te_dist.ops.context import OperationContext
from te_dist.ops.fused import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardGroupedMLP,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    LinearChain,
    UserbuffersBackwardLinear,
    UserbuffersForwardLinear,
)
from te_dist.ops.fused_op import FusedOperation
from te_dist.ops.fuser import OperationFuser
from te_dist.ops.fusions import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from te_dist.ops.linear import Linear
from te_dist.ops.op import BasicOperation, FusibleOperation
from te_dist.ops.sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ConstantScale",
    "Dropout",
    "ForwardGroupedMLP",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "LinearChain",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "UserbuffersBackwardLinear",
    "UserbuffersForwardLinear",
    "activation",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "unregister_fusion",
]
