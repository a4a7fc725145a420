"""What makes te_dist traceable: custom ops with fakes, quantizers as graph constants."""

from te_dist.dynamo import ops as ops
from te_dist.proto import TensorProto, to_tensor_proto
from te_dist.quantizers.base import is_value_opaque_quantizer, register_value_quantizer

__all__ = [
    "TensorProto",
    "is_value_opaque_quantizer",
    "register_value_quantizer",
    "to_tensor_proto",
]
