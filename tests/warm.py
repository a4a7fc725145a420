"""What the ranks of the tests start with: they are forked from a process that has imported this. Importing torch,
te_dist and what tests use, and compiling for the first time, would take each of them seconds."""

import gc
import os

import pytest  # noqa: F401 (for the ranks, as all that is not used here)
import sympy.combinatorics
import sympy.tensor.tensor  # noqa: F401 (the compiler asks for both, at its first graph of some size)
import torch
import tqdm

import te_dist.launch.train  # noqa: F401 (it imports the rest)

tqdm.tqdm.monitor_interval = 0  # the compiler's progress bar would start a thread
torch.set_num_threads(1)
weight = torch.ones(4, 4, requires_grad=True)
torch.compile(lambda x: torch.nn.functional.silu(x @ weight), fullgraph=True, backend="aot_eager")(torch.ones(2, 4))
torch._dynamo.reset()
gc.collect()
gc.freeze()  # what is here stays: no rank's garbage collector need look through it again
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
