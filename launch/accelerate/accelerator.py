"""TEDistAccelerator, and prepare() for an Accelerator that somebody else made."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import te_dist
import te_dist.parallel
from te_dist.launch.accelerate.plugin import TEDistPlugin
from te_dist.launch.config import ConfigError
from te_dist.launch.optimization import clip_gradients, gradient_norm
from te_dist.launch.recipes import recipe_table, unmatched
from te_dist.modules.base import QuantizedLayer

LLAMA_PLAN = {
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), "column"),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), "row"),
}
_REFUSED = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


class TEDistAccelerator(Accelerator):
    """accelerate's Accelerator whose ``prepare`` quantizes the model with te_dist.

    ``mixed_precision="fp8"``, as an argument or from `accelerate launch`, means te_dist here: everything that is not
    quantized runs in bf16, and no other FP8 library is asked for.

    Args:
        te_dist_plugin: what to do; None takes it from the environment.
        others: as for Accelerator.

    Example:
        >>> import torch
        >>> from te_dist.launch.accelerate import TEDistAccelerator, TEDistPlugin
        >>> accelerator = TEDistAccelerator(te_dist_plugin=TEDistPlugin(recipe="mxfp8", verbose=False), cpu=True)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> type(model[0]).__name__, model[0].recipe
        ('Linear', MXFP8BlockScaling())
    """

    te_dist_plugin: TEDistPlugin
    te_dist_monitor: te_dist.Monitor | None = None

    def __init__(self, *args: Any, te_dist_plugin: TEDistPlugin | None = None, **kwargs: Any) -> None:
        if te_dist_plugin is not None and not isinstance(te_dist_plugin, TEDistPlugin):
            raise TypeError(f"TEDistAccelerator expects a TEDistPlugin but got {type(te_dist_plugin).__name__}")
        self.te_dist_plugin = te_dist_plugin or TEDistPlugin()
        asked = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if str(asked).lower() == "fp8":
            kwargs["mixed_precision"] = "bf16"
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        super().__init__(*args, **kwargs)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        return _prepare(self, args, self.te_dist_plugin, device_placement)

    def _prepare_tp(self, *args: Any) -> Any:
        """te_dist has spread the model already, and mapped the optimizer."""
        return args

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Over shards on any mesh, which torch's own refuses to add up when some parameters are tensor parallel."""
        params: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if norm_type != 2 or not any(isinstance(p, DTensor) for p in params):
            return super().clip_grad_norm_(params, max_norm, norm_type)
        self.unscale_gradients()
        norm = gradient_norm(params)
        clip_gradients(params, norm, max_norm)
        return norm


def prepare(
    accelerator: Accelerator, *args: Any, plugin: TEDistPlugin | None = None, device_placement: list[bool] | None = None
) -> Any:
    """``accelerator.prepare(*args)``, with the model quantized by te_dist; for an Accelerator of accelerate itself.

    Args:
        args: what Accelerator.prepare takes: one model, its optimizers, loaders, schedulers.
        plugin: what to do; None takes it from the environment.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from te_dist.launch.accelerate import TEDistPlugin, prepare
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> plugin = TEDistPlugin(recipe="fp8_current", verbose=False)
        >>> model, optimizer = prepare(Accelerator(cpu=True), model, optimizer, plugin=plugin)
        >>> model[1].recipe
        Float8CurrentScaling()
    """
    return _prepare(accelerator, args, plugin or TEDistPlugin(), device_placement)


def _prepare(
    accelerator: Accelerator, args: tuple[Any, ...], plugin: TEDistPlugin, device_placement: list[bool] | None
) -> Any:
    stock = Accelerator.prepare.__get__(accelerator)
    models = [arg for arg in args if isinstance(arg, nn.Module)]
    if not models:  # loaders, schedulers, an optimizer on its own
        return stock(*args, device_placement=device_placement)
    _check(accelerator, models, plugin)
    model = models[0]
    optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
    if not any(isinstance(p, DTensor) for p in model.parameters()):  # else it was prepared before
        _quantize(model, plugin, accelerator)
        _spread(accelerator, model, optimizers, plugin)
    prepared = stock(*args, device_placement=device_placement)
    results = prepared if isinstance(prepared, list | tuple) else (prepared,)
    model = next(result for result in results if isinstance(result, nn.Module))
    if accelerator.is_fsdp2 and plugin.quantized_all_gather != "off":
        te_dist.parallel.enable_quantized_all_gather(_unwrapped(model), str(plugin.quantized_all_gather))
    _watch(accelerator, model, results, plugin)
    return prepared


def _check(accelerator: Accelerator, models: list[nn.Module], plugin: TEDistPlugin) -> None:
    """Refuse what would train otherwise than asked, before anything is changed."""
    if len(models) > 1:
        raise ConfigError(f"te_dist prepares one model at a time but got {len(models)}: call prepare for each")
    if (name := _REFUSED.get(accelerator.distributed_type)) is not None:
        raise ConfigError(f"te_dist does not work with accelerate's {name}; use FSDP2 (fsdp_version: 2) or DDP")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError("te_dist needs FSDP2: set fsdp_version: 2 in fsdp_config (FSDP1 flattens the weights)")
    if accelerator.mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision is fp8, for which this Accelerator uses another FP8 library beside te_dist: use "
            "TEDistAccelerator, or mixed_precision='bf16'"
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            "te_dist expects mixed_precision bf16 or no but got fp16, whose loss scaling it does not know"
        )
    handlers = [h for h in ("ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler", "fp8_recipe_handler")
                if getattr(accelerator, h, None) is not None]  # fmt: skip
    if handlers:
        raise ConfigError(
            f"the Accelerator has {handlers[0]}, another FP8 library's, beside te_dist: remove one of them"
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.is_fsdp2 and fsdp is not None and fsdp.cpu_ram_efficient_loading and _is_delayed(plugin):
        raise ConfigError(
            "fsdp_cpu_ram_efficient_loading drops the buffers of delayed scaling: set it to false, or use fp8_current"
        )


def _is_delayed(plugin: TEDistPlugin) -> bool:
    return any(isinstance(r, te_dist.recipe.DelayedScaling) for r in recipe_table(plugin.recipe).values())


def _quantize(model: nn.Module, plugin: TEDistPlugin, accelerator: Accelerator) -> None:
    had = {m: m.recipe for m in model.modules() if isinstance(m, QuantizedLayer)}
    report = te_dist.convert(
        model,
        recipe_table(plugin.recipe),
        min_size="auto" if plugin.min_size is None else plugin.min_size,
        first_last_layers_bf16=bool(plugin.first_last_layers_bf16),
        verbose=False,
    )
    if not report.converted and not any(had.values()):
        raise ConfigError(f"recipe {plugin.recipe} quantizes no layer of {type(model).__name__}:\n{report}")
    for sentence in unmatched(plugin.recipe, [layer.name for layer in report.layers]):
        warnings.warn(f"te_dist: {sentence}", stacklevel=4)
    if plugin.verbose:
        accelerator.print(report)


def _spread(
    accelerator: Accelerator, model: nn.Module, optimizers: list[torch.optim.Optimizer], plugin: TEDistPlugin
) -> None:
    """Tensor parallelism over accelerate's tp axis; the optimizers get the new parameters."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is None or not parallelism.tp_enabled:
        if plugin.tp_plan is not None:
            raise ConfigError("TEDistPlugin has a tp_plan, but accelerate's parallelism_config has no tp_size above 1")
        return
    if not isinstance(accelerator, TEDistAccelerator):
        raise ConfigError("tensor parallelism needs TEDistAccelerator: accelerate's own would spread the model again")
    if any(optimizer.state for optimizer in optimizers):
        raise ConfigError("te_dist expects an optimizer that has not stepped yet: its state is of whole parameters")
    before = dict(model.named_parameters())
    plan = LLAMA_PLAN if plugin.tp_plan is None else plugin.tp_plan
    te_dist.parallel.parallelize(model, accelerator.torch_device_mesh["tp"], plan)
    after = dict(model.named_parameters())
    if not any(isinstance(p, DTensor) for p in after.values()):
        raise ConfigError(
            f"tp_plan {list(plan)} matches no layer of {type(model).__name__}: give TEDistPlugin a tp_plan"
        )
    new = {id(before[name]): param for name, param in after.items() if name in before}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(param), param) for param in group["params"]]


def _unwrapped(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _watch(accelerator: Accelerator, model: nn.Module, results: Any, plugin: TEDistPlugin) -> None:
    """The monitor, stepped by the optimizer."""
    optimizers = [result for result in results if isinstance(result, torch.optim.Optimizer)]
    if not plugin.monitor_every or not optimizers:
        return
    watch = te_dist.monitor(_unwrapped(model), plugin.monitor_every, plugin.monitor_log)
    inner = getattr(optimizers[0], "optimizer", optimizers[0])

    def stepped(*_: Any) -> None:
        watch.step()

    inner.register_step_post_hook(stepped)
    vars(accelerator)["te_dist_monitor"] = watch
