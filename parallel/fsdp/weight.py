"""ShardedWeight: te_dist's side of one of torch's FSDPParams, and the two hooks through which FSDP2 gathers it.

    shard, high precision  --pre-->  bytes on the wire  --post-->  GatheredWeight, the unsharded parameter

FSDPParam asks its sharded local tensor for the hooks. The class below replaces only what it sees there, so the sharded
parameter stays a plain DTensor: optimizers, state dicts and ``.to()`` know nothing of all this.

The memory of what is gathered belongs to FSDP2, which frees it at reshard. The tensors around it are made once and are
kept: autograd saves them in forward, and finds them refilled in backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.groups import resolve_group
from te_dist.modules.gathered import expects_recomputation
from te_dist.parallel.fsdp import amaxes
from te_dist.parallel.fsdp.codec import WeightCodec
from te_dist.parallel.fsdp.decision import AFTERWARDS, PLAIN, QUANTIZED, Decision, Portion
from te_dist.parallel.fsdp.layer import ShardedLayer, WholeWeight
from te_dist.parallel.fsdp.packing import packed, packed_size, unpacked
from te_dist.parallel.fsdp.planes import COLUMN, ROW, PlaneName
from te_dist.parallel.fsdp.record import record_gather
from te_dist.parallel.fsdp.torch_fsdp import (
    FSDPParam,
    FSDPParamGroup,
    ShardedState,
    TrainingState,
    free_memory,
    give_memory,
    model_parallel_groups,
    reshards_after_forward,
)
from te_dist.pipeline.config import StageConfig
from te_dist.recipe import DelayedScaling, Recipe
from te_dist.tensors.gathered import GatheredWeight
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import in_backward, refilling


class UniformGradientFSDPParam(FSDPParam):
    """Made by assigning ``__class__``, of every parameter that shares a group with quantized weights. FSDP2 reduces a
    group's gradients as one vector: where those of weights come in float32, the others have to."""

    te_dist_weights: list[ShardedWeight]  # of the group

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        inner: Tensor = super()._get_grad_inner_tensor(grad)
        if inner.dtype != torch.float32 and any(weight.widens_gradients for weight in self.te_dist_weights):
            return inner.float()
        return inner


class QuantizedFSDPParam(UniformGradientFSDPParam):
    """The property is read at each gather, so what ``to_empty()``, ``.to()`` and ``load_state_dict(assign=True)`` put
    in the parameter's place is gathered quantized too."""

    te_dist_weight: ShardedWeight

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.te_dist_weight


@dataclasses.dataclass(eq=False)
class Variant:
    """One way of being unsharded: a recipe's, or high precision. FSDPParam holds what belongs to the current one."""

    decision: Decision
    param: Any = None  # the unsharded nn.Parameter, once FSDP2 has made it
    storage: QuantizedStorage | None = None
    outputs: dict[tuple[PlaneName, ...], list[Tensor]] = dataclasses.field(default_factory=dict)


class ShardedWeight:
    """What FSDPParam takes for its sharded local tensor."""

    def __init__(
        self,
        param: FSDPParam,
        group: FSDPParamGroup,
        owner: ShardedLayer,
        whole: WholeWeight,
        portion: Portion,
        stage: StageConfig,
        index: int,
        name: str,
    ) -> None:
        self.param, self.group, self.owner, self._name = param, group, owner, name
        self.whole, self.portion = whole, portion
        self.scale_index = stage.scale_index("weight", index)
        self._comm = stage.spec.comm
        self.shape: torch.Size = param._orig_size
        self.shards, self.gathering = portion.shards, whole.gathering
        self.amaxes: Tensor | None = None  # reduced, for this forward and its backward
        self.amaxes_codec: WeightCodec | None = None
        self._variants: dict[Any, Variant] = {}
        self._current: Variant | None = None
        if hasattr(param, "_unsharded_param"):  # it was gathered before, in high precision
            plain = Variant(Decision(PLAIN), param._unsharded_param, outputs={(): list(param.all_gather_outputs)})
            self._current = self._variants[plain.decision.key] = plain

    @property
    def name(self) -> str:
        """In the model, once FSDP2 knows which one is its root."""
        return getattr(self.param, "_param_fqn", None) or self._name

    @property
    def model_parallel_groups(self) -> list[Any]:
        """Over whose ranks, beside FSDP's, the weight is spread and has one per-tensor scale."""
        if self._comm.is_local:
            return model_parallel_groups(self.param)
        name = self._comm.amax_group("weight")  # unless they chose otherwise
        return [] if name is None else [resolve_group(name, "tp_group")]

    # ---------------------------------------------------------------------------------------- as FSDPParam sees it
    def size(self) -> torch.Size:
        """That of a full shard: short ones are padded by ``encode``, so FSDP2 need not ask for it."""
        return self.param.padded_sharded_param_size

    def to(self, *args: Any, **kwargs: Any) -> ShardedWeight:
        """CPU offloading: the pre hook moves the shard."""
        return self

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        state = self.group._training_state
        recipe = self.owner.recipe(state)
        decision = self.owner.decisions(recipe)[self.owner.weights.index(self)]
        variant = self._switch_to(decision)
        if decision.how == QUANTIZED:
            sent, meta = self._encode(variant, recipe, state)
        else:
            dtype = None if decision.how == AFTERWARDS else self.param.param_dtype
            sent, meta = [self._padded_local(dtype)], {}
            self._gather_into(variant, ())
        record_gather(self.name, mesh, state, sent, decision, self.shards.ranks)
        return tuple(sent), (variant, recipe, meta)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        variant, recipe, meta = metadata
        how = variant.decision.how
        if how == PLAIN:
            if out is not None:
                return None
            return outputs[0].view(-1)[: self.shape.numel()].view(self.shape), ()
        if variant.storage is None:
            variant.storage = self.whole.storage(variant.decision, self._gradient_dtype(dtype), self.param.device)
            if how == QUANTIZED:
                self._adopt(variant)
        if how == QUANTIZED:
            inner = self._decode(variant, meta["planes"], meta["common"], outputs)
        else:
            inner = self._quantize_whole(variant, outputs[0])
        self.gathering.recipe, self.gathering.amax, self.gathering.name = recipe, meta.get("amax"), self.name
        if self.group._training_state == TrainingState.FORWARD and not in_backward():
            # Checkpointing around the FSDP module is seen here, and inside it by the layer.
            self.gathering.recomputed = expects_recomputation()
        if out is not None:
            return None
        first = self.portion.place.first
        return GatheredWeight(variant.storage, self.gathering, (first, first + self.shape[0])), inner

    def _gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of the unsharded weight, which is only a name: nothing of it is in high precision. With a reduce_dtype
        of float32 gradients leave their product like that, and are not rounded before they are summed."""
        return torch.float32 if self.param.reduce_dtype == torch.float32 else dtype

    @property
    def widens_gradients(self) -> bool:
        quantized = self._current is not None and self._current.decision.how != PLAIN
        return quantized and self.param.reduce_dtype == torch.float32 and self.param.sharded_param.requires_grad

    # ---------------------------------------------------------------------------------------- sending
    def local(self) -> Tensor:
        """This rank's rows, in high precision, where they are."""
        return self.param.sharded_param._local_tensor.detach()  # type: ignore[attr-defined]

    def _padded_local(self, dtype: torch.dtype | None) -> Tensor:
        data = self.param._sharded_param_data.view(self.param.padded_sharded_param_size)
        return data.to(device=self.param.device, dtype=dtype or data.dtype, non_blocking=True)

    def _encode(self, variant: Variant, recipe: Recipe | None, state: TrainingState) -> tuple[list[Tensor], Any]:
        codec = variant.decision.codec
        assert codec is not None
        wanted = self._wanted(codec, state)
        scale = None
        if isinstance(recipe, DelayedScaling):
            scale = self.owner.scales(recipe, state)[self.scale_index : self.scale_index + self.portion.weights]
        reduced = amaxes.for_gather(self, codec, state)
        local = self.local().to(self.param.device, non_blocking=True)
        encoded = codec.encode(local, wanted, reduced, scale)
        sent = encoded.wire if self.shards.ranks > 1 else [packed(encoded.wire)]
        self._gather_into(variant, wanted)
        amax = reduced[: self.portion.weights] if codec.delayed and reduced is not None else None
        return sent, {"planes": wanted, "common": encoded.common, "amax": amax}

    def _wanted(self, codec: WeightCodec, state: TrainingState) -> tuple[PlaneName, ...]:
        """Forward reads the row plane, backward the column plane. Both, where the memory of one has to last for the
        other, and where forward is computed again in backward."""
        if COLUMN not in codec.planes:
            return (ROW,)
        if self.shards.ranks > 1:
            if state == TrainingState.FORWARD and reshards_after_forward(self.group) and not in_backward():
                return (ROW,)
            recomputed = self.gathering.recomputed or self.owner.layer.recomputed_in_graph
            if state == TrainingState.PRE_BACKWARD and self.group.reshard_after_backward and not recomputed:
                return (COLUMN,)
        return (ROW, COLUMN)

    # ---------------------------------------------------------------------------------------- memory
    def _switch_to(self, decision: Decision) -> Variant:
        """Let FSDPParam hold the unsharded parameter that belongs to this decision, or none if there is none yet."""
        current, param = self._current, self.param
        if current is not None and hasattr(param, "_unsharded_param"):
            current.param = param._unsharded_param
        if current is not None and current.decision.key == decision.key:
            return current
        variant = self._variants.get(decision.key)
        if variant is None:
            variant = self._variants[decision.key] = Variant(decision)
        if current is not None and current.param is not None:
            gradient, current.param.grad = current.param.grad, None
            if gradient is not None:
                # Accumulated without synchronisation, and kept where FSDP2 looks for it.
                dtype = param.reduce_dtype or gradient.dtype
                param.unsharded_accumulated_grad = gradient.to(dtype)
            del param._unsharded_param
        if variant.param is not None:
            param._unsharded_param = variant.param
        self._current = variant
        return variant

    def _gather_into(self, variant: Variant, planes: tuple[PlaneName, ...]) -> None:
        """Let FSDPParam gather into the tensors of these planes, which have no memory yet. All planes' tensors are made
        at once: forward saves those of the column plane before they are gathered."""
        if not variant.outputs:
            codec, ranks = variant.decision.codec, self.shards.ranks
            if codec is None:
                sizes = [self.param.padded_sharded_param_size.numel() * ranks]
                master = variant.decision.how == AFTERWARDS or self.param.param_dtype is None
                dtype = self.param.orig_dtype if master else self.param.param_dtype
                variant.outputs[()] = self._without_memory(sizes, dtype)
            elif ranks == 1:
                everything = tuple(codec.planes)
                size = packed_size(codec.wire_sizes(everything))
                variant.outputs[everything] = self._without_memory([size], torch.uint8)
            else:
                for name in codec.planes:
                    sizes = [size * ranks for size in codec.wire_sizes([name])]
                    variant.outputs[name,] = self._without_memory(sizes, torch.uint8)
        if planes not in variant.outputs:
            variant.outputs[planes] = [t for name in planes for t in variant.outputs[name,]]
        self.param.all_gather_outputs = variant.outputs[planes]
        self.param._unsharded_inner_tensors = self._filled(variant, planes)

    def _written(self, variant: Variant, planes: tuple[PlaneName, ...]) -> list[Tensor]:
        """The buffers that the post hook fills."""
        if variant.storage is None:
            return []
        if variant.decision.codec is None:
            return variant.storage.inner_tensors()
        return [getattr(variant.storage, name) for name in variant.decision.codec.copied(planes)]

    def _filled(self, variant: Variant, planes: tuple[PlaneName, ...]) -> list[Tensor]:
        """Those of them that FSDP2 gives memory before it, and takes it away from at reshard: the first part's."""
        return self._written(variant, planes) if self.whole.parts[0] is self else []

    def _without_memory(self, sizes: Sequence[int], dtype: torch.dtype | None) -> list[Tensor]:
        with torch.inference_mode(False):
            made = [torch.empty(size, dtype=dtype, device=self.param.device) for size in sizes]
        for tensor in made:
            free_memory(tensor)
        return made

    # ---------------------------------------------------------------------------------------- receiving
    def _adopt(self, variant: Variant) -> None:
        """Let the storage's buffers be views of what is gathered, where they can."""
        codec, storage = variant.decision.codec, variant.storage
        assert codec is not None and storage is not None
        everything = tuple(codec.planes)
        alone = self.shards.ranks == 1
        parts = [] if alone else [t for name in everything for t in variant.outputs[name,]]
        empty = [t for t in parts if t.untyped_storage().size() == 0]
        for tensor in empty:  # no view can be made of what has no memory
            give_memory(tensor)
        if alone:
            parts = unpacked(variant.outputs[everything][0], codec.wire_sizes(everything))
        for plane in codec.planes.values():
            codec.adopt(storage, plane, parts.pop(0))
            if plane.scale is not None:
                parts.pop(0)
        for tensor in empty:
            free_memory(tensor)

    def _decode(
        self,
        variant: Variant,
        planes: tuple[PlaneName, ...],
        common: dict[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> list[Tensor]:
        codec, storage = variant.decision.codec, variant.storage
        assert codec is not None and storage is not None
        alone = self.shards.ranks == 1
        gathered = unpacked(outputs[0], codec.wire_sizes(planes)) if alone else outputs
        inner, written = self._filled(variant, planes), self._written(variant, planes)
        for buffer in inner:
            give_memory(buffer)
        shared = [getattr(storage, name) for name in common]
        with torch.no_grad(), refilling([*written, *shared]):
            codec.decode(storage, planes, gathered)
            for name, value in common.items():
                getattr(storage, name).copy_(value)
                if value.is_cuda:  # made on the stream of the gathers, which must not reuse it before it is read
                    value.record_stream(torch.cuda.current_stream(value.device))
        for tensor in self._read_to_the_end(variant, planes):
            free_memory(tensor)
        return inner

    def _read_to_the_end(self, variant: Variant, planes: tuple[PlaneName, ...]) -> list[Tensor]:
        """What was gathered and is not needed any more, because all of it was copied."""
        codec = variant.decision.codec
        assert codec is not None
        if codec.is_part:
            return variant.outputs[planes]
        if self.shards.ranks == 1:
            return []
        return [variant.outputs[name,][0] for name in planes if codec.planes[name].transposed]

    def _quantize_whole(self, variant: Variant, output: Tensor) -> list[Tensor]:
        """From high precision, once per unshard; what was gathered is not needed any more."""
        storage, quantizer = variant.storage, variant.decision.quantizer
        assert storage is not None and quantizer is not None
        inner = self._filled(variant, ())
        for buffer in inner:
            give_memory(buffer)
        whole = output.view(-1)[: self.shape.numel()].view(self.shape)
        with torch.no_grad(), refilling(inner):
            # All ranks of tensor parallelism are here too: they unshard in the same order.
            quantizer._quantize_into(whole, storage, self._comm.amax_group("weight"), None, None)
        free_memory(output)
        return inner

    @property
    def is_sharded(self) -> bool:
        return self.param.sharded_state == ShardedState.SHARDED
