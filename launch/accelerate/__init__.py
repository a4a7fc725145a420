"""te_dist in accelerate and transformers.Trainer.

from te_dist.launch.accelerate import TEDistAccelerator, TEDistPlugin

accelerator = TEDistAccelerator(te_dist_plugin=TEDistPlugin(recipe="mxfp8"))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from importlib.util import find_spec

if find_spec("accelerate") is None:
    raise ImportError("te_dist.launch.accelerate needs accelerate: pip install 'te-dist[accelerate]'")

from te_dist.launch.accelerate.accelerator import TEDistAccelerator, prepare
from te_dist.launch.accelerate.plugin import TEDistPlugin, environment_keys
from te_dist.launch.accelerate.unused import warn_if_unused

from te_dist.launch.accelerate.trainer import TEDistTrainerMixin  # isort: skip

warn_if_unused()

__all__ = ["TEDistAccelerator", "TEDistPlugin", "TEDistTrainerMixin", "environment_keys", "prepare"]
