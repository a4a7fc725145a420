"""Userbuffers: tensor-parallel communication that runs beside the products it belongs to."""

from te_dist.parallel.userbuffers.comm import Overlapped
from te_dist.parallel.userbuffers.methods import LayerMethods, Method

__all__ = ["LayerMethods", "Method", "Overlapped"]
