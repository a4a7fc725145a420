"""Userbuffers: tensor-parallel communication that runs beside the products it belongs to.

    methods.py     which product overlaps with which collective, and the table that users write
    choice.py      overlap="off" | "auto" | "require" for the layers of a model
    capability.py  whether the ranks of a group can, agreed by all of them
    comm.py        the Comm of a layer that overlaps
    schedules.py   when which part travels and which product runs
    links.py       how parts travel: messages on the CPU; symmetric.py: symmetric memory between GPUs
    report.py      what overlapped
"""

from te_dist.parallel.userbuffers.capability import OverlapUnavailable
from te_dist.parallel.userbuffers.choice import overlapped, set_overlap
from te_dist.parallel.userbuffers.comm import Overlapped
from te_dist.parallel.userbuffers.methods import LayerMethods, Method, read_table
from te_dist.parallel.userbuffers.registry import reserve
from te_dist.parallel.userbuffers.report import OverlapReport, overlap_report

__all__ = [
    "LayerMethods",
    "Method",
    "OverlapReport",
    "OverlapUnavailable",
    "Overlapped",
    "overlap_report",
    "overlapped",
    "read_table",
    "reserve",
    "set_overlap",
]
