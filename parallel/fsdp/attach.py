"""Finds te_dist's weights among FSDP2's parameters, and hangs the hooks on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.fsdp.decision import (
    PLAIN,
    Decision,
    Portion,
    dtype_obstacle,
    weight_slots,
)
from te_dist.parallel.fsdp.layer import ShardedLayer, WholeWeight
from te_dist.parallel.fsdp.shards import Place
from te_dist.parallel.fsdp.state import _LAYERS, QuantizedFSDPState
from te_dist.parallel.fsdp.torch_fsdp import (
    ExtensionsData,
    FSDPMeshInfo,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    ShardedState,
    groups_of,
    reshards_to_other_mesh,
    shards_of,
)
from te_dist.parallel.fsdp.weight import QuantizedFSDPParam, ShardedWeight, UniformGradientFSDPParam
from te_dist.recipe import Recipe, recipe_in_force

MODES = ("auto", "on", "off")


@dataclasses.dataclass(frozen=True)
class Refused:
    """A weight that keeps FSDP2's own gather."""

    name: str
    param: FSDPParam
    decision: Decision


def check_mode(mode: str, caller: str) -> None:
    if mode not in MODES:
        raise ValueError(f"{caller} expects quantized_all_gather in {MODES} but got {mode!r}")


def layers_of(module: nn.Module, skip: type | None = None) -> Iterator[tuple[str, QuantizedLayer]]:
    """The quantized layers inside a module by name; not those below a submodule of type `skip`."""

    def walk(prefix: str, current: nn.Module) -> Iterator[tuple[str, QuantizedLayer]]:
        if isinstance(current, QuantizedLayer):
            yield prefix, current
        for name, child in current.named_children():
            if skip is None or not isinstance(child, skip):
                yield from walk(f"{prefix}.{name}" if prefix else name, child)

    yield from walk("", module)


def check_layers(layers: list[tuple[str, QuantizedLayer]], mode: str, caller: str) -> None:
    """What cannot work, said before anything is sharded. Depends on the model alone, so all ranks say the same."""
    for name, layer in layers:
        for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            on = layer.wgrad_store is not None if option == "delay_wgrad_compute" else getattr(layer, option)
            if on:
                raise ValueError(
                    f"{caller}: {name or 'the layer'} has {option}, whose gradients do not pass through autograd, so "
                    f"FSDP2 would not reduce them; turn it off (MixedPrecisionPolicy(reduce_dtype=torch.float32) "
                    f"accumulates in float32)"
                )
    if mode == "off":
        return
    recipes: dict[Recipe, str] = {}
    for name, layer in layers:
        recipe = recipe_in_force(layer.recipe)
        if recipe is not None:
            recipes.setdefault(recipe, name)
    if len(recipes) > 1:
        (first, one), (second, other), *_ = recipes.items()
        raise ValueError(
            f"{caller} expects one recipe inside a parameter group but {one!r} has {first!r} and {other!r} has "
            f"{second!r}; call fully_shard on their modules apart, or pass quantized_all_gather='off'"
        )


def _not_on(caller: str, name: str, reason: str) -> str:
    return f"{caller}: quantized_all_gather='on', but {name!r} cannot be gathered quantized: {reason}"


def attach(state: FSDPState, names: dict[nn.Module, str], mode: str, caller: str) -> list[Refused]:
    """Hang the hooks on the weights of one FSDP2 state. Returns those that have to do without."""
    refused: list[Refused] = []
    for group in groups_of(state):
        # By layer, because its weights are gathered alike.
        members: dict[QuantizedLayer, dict[str, FSDPParam]] = {}
        for param in group.fsdp_params:
            module = param._module_info.module
            if isinstance(module, QuantizedLayer):
                members.setdefault(module, {})[param._module_info.param_name] = param
        for layer, params in members.items():
            refused += _attach_layer(layer, params, group, names.get(layer, ""))
        _check_decisions(group, refused, mode, caller)
        _make_gradients_uniform(group)
    if type(state) is FSDPState:
        state.__class__ = QuantizedFSDPState
    state.__dict__.pop(_LAYERS, None)
    return refused


def _attach_layer(
    layer: QuantizedLayer, params: dict[str, FSDPParam], group: FSDPParamGroup, name: str
) -> list[Refused]:
    def full(param_name: str) -> str:
        return f"{name}.{param_name}" if name else param_name

    obstacle = ""
    wholes = layer._weight_names()  # a stack of weights is named by each of them
    names = list(dict.fromkeys(part for parts in wholes for part in parts))
    known = [(part, params[part]) for part in names if part in params]
    if any(isinstance(param, QuantizedFSDPParam) for _, param in known):
        return []  # attached before
    if len(known) < len(names):
        obstacle = "some of the layer's weights are not sharded with it"
    for _, param in known:
        obstacle = obstacle or _obstacle(param, group, layer)
    if obstacle:
        return [Refused(full(part), param, _refusal(obstacle)) for part, param in known]
    owner = ShardedLayer(layer, name)
    seen: set[str] = set()
    for number, ((stage, index), parts) in enumerate(zip(weight_slots(layer), wholes, strict=True)):
        if parts[0] in seen:
            continue
        seen.update(parts)
        whole = WholeWeight(full(parts[0]))
        for part, portion in zip(parts, _portions(number, [params[part] for part in parts]), strict=True):
            param = params[part]
            weight = ShardedWeight(param, group, owner, whole, portion, stage, index, full(part))
            owner.weights.append(weight)
            whole.parts.append(weight)
            param.__class__ = QuantizedFSDPParam
            assert isinstance(param, QuantizedFSDPParam)
            param.te_dist_weight = weight
            param._extensions_data = ExtensionsData()
    return []


def _portions(number: int, params: list[FSDPParam]) -> Iterator[Portion]:
    """What each of the parameters is of the layer's weight of that number."""
    rows = sum(param._orig_size[0] for param in params)
    first = 0
    for param in params:
        count, *stacked, cols = param._orig_size
        yield Portion(number, shards_of(param), cols, Place(first, rows), *stacked)
        first += count


def _make_gradients_uniform(group: FSDPParamGroup) -> None:
    weights = [param.te_dist_weight for param in group.fsdp_params if isinstance(param, QuantizedFSDPParam)]
    if not weights:
        return
    for param in group.fsdp_params:
        if type(param) is FSDPParam:
            param.__class__ = UniformGradientFSDPParam
        if isinstance(param, UniformGradientFSDPParam):
            param.te_dist_weights = weights


def _obstacle(param: FSDPParam, group: FSDPParamGroup, layer: QuantizedLayer) -> str:
    """What in the sharding of a weight stands in the way; "" if nothing does."""
    if not isinstance(param.mesh_info, FSDPMeshInfo):
        return "it is replicated, not sharded"
    if param.fsdp_placement.dim != 0:
        return f"it is sharded along dimension {param.fsdp_placement.dim}, and blocks of rows travel whole"
    if reshards_to_other_mesh(group):
        return "reshard_after_forward is a number, and shards of shards are kept in high precision"
    if len(param._orig_size) != (3 if getattr(layer, "single_grouped_weight", False) else 2):
        return f"it has {len(param._orig_size)} dimensions"
    for module in param._module_info.shared_modules:
        if not isinstance(module, QuantizedLayer) or module.recipe != layer.recipe or module.spec != layer.spec:
            return f"it is shared with a {type(module).__name__} that reads it differently"
    return dtype_obstacle(param.sharded_param)


def _refusal(reason: str) -> Decision:
    return Decision(PLAIN, reason=reason, unsupported=True)


def _check_decisions(group: FSDPParamGroup, refused: list[Refused], mode: str, caller: str) -> None:
    if mode != "on":
        return
    problems = [(entry.name, entry.decision) for entry in refused]
    for param in group.fsdp_params:
        if isinstance(param, QuantizedFSDPParam):
            owner = param.te_dist_weight.owner
            recipe = recipe_in_force(owner.layer.recipe)
            decision = owner.decisions(recipe)[owner.weights.index(param.te_dist_weight)]
            problems.append((param.te_dist_weight.name, decision))
    for name, decision in problems:
        if decision.unsupported:
            raise ValueError(_not_on(caller, name, decision.reason))


def check_sharded(state: FSDPState, caller: str) -> None:
    for group in groups_of(state):
        for param in group.fsdp_params:
            if param.sharded_state != ShardedState.SHARDED:
                raise RuntimeError(
                    f"{caller} expects sharded parameters but {param._module_info.param_name!r} of a "
                    f"{type(param._module_info.module).__name__} is unsharded; call reshard() first"
                )
