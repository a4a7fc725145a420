"""TEDistTrainerMixin: te_dist in transformers.Trainer."""

from __future__ import annotations

from typing import Any

from te_dist.launch.accelerate.accelerator import TEDistAccelerator
from te_dist.launch.accelerate.plugin import TEDistPlugin


class TEDistTrainerMixin:
    """Put it before transformers.Trainer, or a subclass of it.

        class Trainer(TEDistTrainerMixin, transformers.Trainer): ...

        Trainer(model=model, args=args, train_dataset=data, te_dist_plugin=TEDistPlugin(recipe="mxfp8")).train()

    Args:
        te_dist_plugin: what to do; None takes it from the environment.
    """

    def __init__(self, *args: Any, te_dist_plugin: TEDistPlugin | None = None, **kwargs: Any) -> None:
        self.te_dist_plugin = te_dist_plugin or TEDistPlugin()
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer makes an Accelerator of accelerate itself; from then on it is one of te_dist's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        accelerator.__class__ = TEDistAccelerator
        accelerator.te_dist_plugin = self.te_dist_plugin
