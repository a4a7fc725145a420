"""te_dist.parallel: tensor and sequence parallelism, quantized collectives and FSDP2 for te_dist.

The one-process core below this package knows process groups only as arguments of a call; what spans ranks lives here.
"""
