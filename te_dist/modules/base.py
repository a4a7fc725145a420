"""QuantizedLayer: what Linear, LayerNormLinear, LayerNormMLP and GroupedLinear share.

A subclass names its parameters in the order of its LayerSpec's slots. The rest is here and in the classes above: weight
workspaces, delayed scaling's buffers, where weight gradients go, and the call that Dynamo traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.comm import sequence_shards
from te_dist.formats import INPUT_DTYPES
from te_dist.modules.compiled_call import CompiledCalls, by_host_or_device, is_checkpointed, trains_with_seeds
from te_dist.modules.delayed import DELAYED_BUFFERS, Recomputed
from te_dist.modules.gathered import check_gathered, gathered_weights, note_recomputation, record_gathered_amaxes
from te_dist.modules.given import check_given
from te_dist.modules.parameters import local_part, spread_state
from te_dist.modules.scopes import layers, scope
from te_dist.pipeline.config import CallFlags, LayerConfig, LayerSpec, resolve
from te_dist.pipeline.forward import layer_forward
from te_dist.pipeline.function import EagerLayer, LayerCall, draw_seeds, forward_args
from te_dist.pipeline.shards import norm_lead, out_lead, rows_per_entry
from te_dist.quantizers import NVFP4Quantizer
from te_dist.recipe import DelayedScaling, Recipe, is_scoped, recipe_in_force
from te_dist.tensors.gathered import GatheredWeight
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import in_backward
from te_dist.values import interned

# What Transformer Engine writes beside the parameters; we accept and ignore it.
FOREIGN_STATE = "_extra_state"


class QuantizedLayer(CompiledCalls):
    """Base of the layers: how a call begins, and what it does in eager code."""

    def _init_layer(self, spec: LayerSpec, recipe: Recipe | None, *, fuse_wgrad_accumulation: bool = False,
                    delay_wgrad_compute: bool = False) -> None:  # fmt: skip
        """Called by subclasses at the end of ``__init__``, when the parameters are there."""
        self.spec = spec
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"{self._label()} expects recipe to be a te_dist recipe or None but got {recipe!r}")
        self.recipe = interned(recipe)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = [] if delay_wgrad_compute else None
        self._reset_caches()
        for name in (*DELAYED_BUFFERS, "_fp8_largest"):
            self.register_buffer(name, None, persistent=name in DELAYED_BUFFERS)
        if isinstance(recipe, DelayedScaling):
            self._ensure_delayed(recipe)
        layers.add(self)

    def _reset_caches(self) -> None:
        self._drop_workspaces()
        self._configs: dict[Any, LayerConfig] = {}
        self._configs_recipe: Recipe | None = None
        self._forward_recipe: Recipe | None = None

    # ---------------------------------------------------------------------------------------- entry
    def _run(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
        splits: list[int] | Tensor | None = None,
        recomputed: Recomputed | None = None,
    ) -> Any:
        recipe = self._recipe_of_call() if recomputed is None else recomputed.recipe
        params = self._slots()
        gathered = self._gathered(params)
        if self._is_parallel:
            params = [local_part(param) for param in params]
        weight = params[2 if self.traced_spec.stages[0].produce == "norm" else 0]
        assert weight is not None
        self._check_input(inp, weight)
        device_type = inp.device.type
        if torch.is_autocast_enabled(device_type):
            out_dtype = torch.get_autocast_dtype(device_type)
            if inp.dtype != out_dtype and not isinstance(inp, QuantizedTensor):
                inp = inp.to(out_dtype)
            with torch.autocast(device_type, enabled=False):
                return self._run_in(
                    recipe, inp, params, is_first_microbatch, skip_weight_update, splits, recomputed, gathered
                )
        return self._run_in(recipe, inp, params, is_first_microbatch, skip_weight_update, splits, recomputed, gathered)

    def _gathered(self, params: Sequence[Tensor | None]) -> list[GatheredWeight | None] | None:
        """The weights among the slots that came quantized, None if none did. A compiled graph can read the buffers of
        parameters only: any part of a joined weight holds all of them, and so does a stack of weights."""
        if self._first_parts and torch.compiler.is_compiling():
            params = list(params)
            for slot, name in self._first_parts:
                params[slot] = getattr(self, name)
        return gathered_weights(params)

    def _recipe_of_call(self) -> Recipe | None:
        """The recipe in force. Activation checkpointing computes forward again inside backward, where the scope of the
        first one is gone: without any scope there, that one's recipe counts again."""
        recipe = recipe_in_force(self.recipe)
        if torch.compiler.is_compiling():
            return recipe
        if in_backward() and not is_scoped():
            return self._forward_recipe if self.recipe is None else recipe
        self._forward_recipe = recipe
        return recipe

    def _run_in(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: list[Tensor | None],
        is_first_microbatch: bool | None,
        skip_weight_update: Tensor | None,
        splits: list[int] | Tensor | None,
        recomputed: Recomputed | None,
        gathered: list[GatheredWeight | None] | None,
    ) -> Any:
        frozen = scope.depth > 0
        # A gathered weight is its own workspace.
        caching = gathered is None and (frozen or is_first_microbatch is not None or skip_weight_update is not None)
        update = not self._workspace_fresh if frozen else is_first_microbatch is not False
        if torch.compiler.is_compiling():
            if caching and is_checkpointed():
                if frozen and isinstance(recipe, DelayedScaling):
                    raise ValueError(
                        "frozen_weights, DelayedScaling and activation checkpointing inside a compiled graph do not go "
                        "together: whether a call moves the scales on cannot be kept. Pass is_first_microbatch instead"
                    )
                caching = frozen = False
            result = self._run_compiled(recipe, inp, params, caching, update, skip_weight_update, splits, gathered)
        else:
            # Activation checkpointing runs forward again inside backward: on the workspace that it had made.
            update = update and not (caching and in_backward())
            first = is_first_microbatch is True
            result = self._run_eager(
                recipe, inp, params, caching, update, first, skip_weight_update, splits, recomputed, gathered
            )
        if frozen:
            self._workspace_fresh = True
        return result

    def _check_input(self, inp: Tensor, weight: Tensor) -> None:
        depth = weight.shape[-1]
        if not isinstance(inp, Tensor):
            raise TypeError(f"{self._label()} expects a tensor but got {type(inp).__name__}")
        if inp.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{self._label()} expects an input of float32, float16 or bfloat16 but got "
                f"{str(inp.dtype).removeprefix('torch.')}"
            )
        if self._is_parallel and inp.dim() < 2 and self.traced_spec.shards_rows:
            raise ValueError(
                f"{self._label()} expects an input of at least two dimensions under sequence parallelism but got "
                f"shape {list(inp.shape)}"
            )
        if inp.dim() == 0 or inp.shape[-1] != depth:
            raise ValueError(
                f"{self._label()} expects the input's last dimension to be {depth} but got shape {list(inp.shape)}"
            )
        if inp.device != weight.device:
            raise ValueError(
                f"{self._label()} expects the input on {weight.device}, where its weight is, but got it on {inp.device}"
            )

    # ---------------------------------------------------------------------------------------- eager
    def _run_eager(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: list[Tensor | None],
        caching: bool,
        update: bool,
        first: bool,
        skip: Tensor | None,
        splits: list[int] | Tensor | None,
        recomputed: Recomputed | None,
        gathered: list[GatheredWeight | None] | None,
    ) -> Any:
        if gathered is not None:
            check_gathered(self._label(), recipe, gathered)
        config = self._config(recipe, inp, params, caching, isinstance(splits, Tensor), gathered is not None)
        flags = config.flags
        if gathered is not None:
            note_recomputation(config, gathered)
        call = LayerCall(config, [], inp.dtype, inp, inp.shape[:-1])
        call.splits, call.offsets = by_host_or_device(splits)
        if self._is_parallel:
            call.unit = rows_per_entry(inp.shape)
        if isinstance(inp, QuantizedTensor):
            call.x = self._quantized_input(config, inp.quantized_storage)
        else:
            call.x = kernels.as_rows(inp.detach())
        self._fill_call(call, recipe, params, caching, update, skip, recomputed, gathered)
        if not flags.any_grad:
            result = layer_forward(forward_args(call, params))
            if self.training and trains_with_seeds(self.spec, recipe):
                draw_seeds(self.spec, inp)
            lead = out_lead(config, call.lead, result.out.shape[0]) if self._is_parallel else call.lead
            out = result.out.view(*lead, result.out.shape[-1])
            normed = result.norm_output
            if normed is None:
                return out
            return out, normed.view(*norm_lead(config, call.lead, normed.shape[0]), normed.shape[-1])
        if config.draws_seed:
            call.seeds = draw_seeds(self.spec, inp)
        if self.fuse_wgrad_accumulation:
            # The attributes are on the parameters themselves, not on what a rank has of them.
            self._main_grads(call, self._slots() if self._is_parallel else params, first)
        call.wgrad_store = self.wgrad_store
        return EagerLayer.apply(call, inp, *params)

    def _fill_call(
        self,
        call: LayerCall,
        recipe: Recipe | None,
        params: Sequence[Tensor | None],
        caching: bool,
        update: bool,
        skip: Tensor | None = None,
        recomputed: Recomputed | None = None,
        gathered: list[GatheredWeight | None] | None = None,
    ) -> None:
        """Delayed scaling's scales and the weights as the products read them."""
        # What inference mode makes, training could not use later.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            if call.config.delayed:
                self._delayed_call(call, recipe, update, recomputed)
                if gathered is not None:
                    record_gathered_amaxes(call.config, gathered, call.amaxes)
            call.weights = self._eager_weights(call, params, caching, update, skip, recipe)

    def _config(
        self,
        recipe: Recipe | None,
        inp: Tensor,
        params: Sequence[Tensor | None],
        caching: bool,
        device_splits: bool = False,
        gathered: bool = False,
    ) -> LayerConfig:
        on = torch.is_grad_enabled()
        grads = (on and inp.requires_grad, *[on and p is not None and p.requires_grad for p in params])
        return self._config_of(recipe, params, grads, caching, device_splits, inp, gathered)

    def _config_of(
        self,
        recipe: Recipe | None,
        params: Sequence[Tensor | None],
        grads: tuple[bool, ...],
        caching: bool,
        device_splits: bool = False,
        inp: Tensor | None = None,
        gathered: bool = False,
    ) -> LayerConfig:
        """The configuration of a call; `grads`: of the input, then of every slot."""
        if recipe is not self._configs_recipe:
            self._check_recipe(recipe, params)
            self._configs, self._configs_recipe = {}, recipe
        key: Any = (grads, caching, device_splits, gathered)
        shards = sequence_shards.rows if self._is_parallel else ()
        if shards:
            key = (*key, shards)
        config = self._configs.get(key)
        if config is None:
            flags = CallFlags(
                grads[0], grads[1:], caching, device_splits=device_splits, gathered=gathered, shards=shards
            )
            config = resolve(self.spec, recipe, flags)
            self._configs[key] = config
            if inp is not None:
                self._config_made(config, inp)
        return config

    def _config_made(self, config: LayerConfig, inp: Tensor) -> None:
        """Hook: the layer has met a new combination of recipe and flags."""

    def _check_recipe(self, recipe: Recipe | None, params: Sequence[Tensor | None]) -> None:
        """Shapes that a format cannot hold, said with the layer's name."""
        if recipe is None or isinstance(recipe, DelayedScaling):
            return
        config = resolve(self.spec, recipe, CallFlags(True, (True,) * self.spec.param_count))
        for stage in config.stages:
            weight = params[stage.weight_slot]
            if weight is not None and any(isinstance(q, NVFP4Quantizer) for q in (stage.x, stage.weight, stage.dy)):
                for what, size in (("out_features", weight.shape[0]), ("in_features", weight.shape[1])):
                    if size % 2:
                        raise ValueError(
                            f"{self._label()}: NVFP4 packs two values a byte and expects {what} to be even "
                            f"but it is {size}"
                        )

    def _quantized_input(self, config: LayerConfig, storage: QuantizedStorage) -> QuantizedStorage:
        check_given(self._label(), config, storage.quantizer)
        wanted = config.stages[0].x
        assert wanted is not None
        rows, cols = storage.matrix_shape
        storage = storage.view((rows, cols))
        has = (storage.has_rowwise or not wanted.rowwise) and (storage.has_columnwise or not wanted.columnwise)
        try:
            return storage if has else storage.with_usage(rowwise=wanted.rowwise, columnwise=wanted.columnwise)
        except ValueError:
            raise ValueError(
                f"{self._label()} got an input quantized by {storage.quantizer!r} but expects one with "
                f"rowwise={wanted.rowwise} and columnwise={wanted.columnwise}, which this format cannot derive"
            ) from None

    # ---------------------------------------------------------------------------------------- state
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A checkpoint of nn.Linear, of another recipe, or of Transformer Engine loads in strict mode too."""
        state_dict.pop(prefix + FOREIGN_STATE, None)
        for name in DELAYED_BUFFERS:
            given = state_dict.get(prefix + name)
            current = getattr(self, name)
            if given is not None and (current is None or current.shape != given.shape):
                device = next(self.parameters()).device
                setattr(self, name, torch.empty_like(given, device=device))
            elif given is None and current is not None:
                state_dict[prefix + name] = current  # nothing to load: stays
        if self._is_parallel:
            spread_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cheap to make again: a copied module starts with empty caches."""
        state = dict(self.__dict__)
        for name in ("_workspaces", "_workspace_storages", "_workspace_recipe", "_configs_recipe"):
            state[name] = None
        state["_workspace_fresh"], state["_configs"] = False, {}
        state.pop("_lean", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.spec = self._spec  # and the recipe: equal to those of other layers, so that it is one of theirs
        self.recipe = interned(self.recipe)
        layers.add(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._drop_workspaces()
        before = {name: self._buffers.get(name) for name in (*DELAYED_BUFFERS, "_fp8_largest")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is None or new is None:
                continue
            if old.is_meta and not new.is_meta:  # to_empty: memory that nobody has filled
                self._reset_delayed()
                break
            if new.dtype != old.dtype:  # .half() and the like are about parameters
                self._buffers[name] = old.to(device=new.device)
        return self
