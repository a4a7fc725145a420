"""parallelize: a model's layers over the ranks of a mesh, by name."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from te_dist.groups import resolve_group
from te_dist.modules.base import QuantizedLayer
from te_dist.parallel.comm import COLUMN, ROW
from te_dist.parallel.embedding import VocabParallelEmbedding
from te_dist.parallel.modules import (
    ParallelOptions,
    can_be_parallel,
    distribute_parameter,
    make_parallel,
    make_te_dist,
)
from te_dist.parallel.norms import can_be_sequence_parallel, make_sequence_parallel
from te_dist.parallel.shared import SharedGather
from te_dist.parallel.userbuffers.choice import Choice, Config, apply_overlap, check_choice
from te_dist.parallel.userbuffers.methods import read_table
from te_dist.transport import AGREEMENT, state

SEQUENCE, REPLICATE, GATHER = "sequence", "replicate", "gather"
STYLES = (COLUMN, ROW, SEQUENCE, REPLICATE, GATHER)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    *,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    reduce_dtype: torch.dtype | None = None,
    amax: str = "global",
    overlap: Choice = "off",
    overlap_config: Config = None,
) -> nn.Module:
    """Spread a model's layers over the ranks of a one-dimensional mesh, in place.

    Parameters become DTensors on the mesh, so that FSDP2, optimizers, gradient clipping and DCP know them. All ranks
    get the values of rank 0. Call it before FSDP2 and before ``torch.compile``; a model on the meta device works too.

    Args:
        mesh: ``init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))["tp"]``.
        plan: name patterns (as of fnmatch) of modules to what becomes of them. Of patterns that match a module the
            first counts, and what is inside of a module that was matched belongs to it:

            - "column": out_features are spread; the result is this rank's part of the features;
            - "row": in_features are spread; the result is summed over the ranks. Of an nn.Embedding: the tokens are;
            - "sequence": a norm that sees this rank's rows; its gradients are summed over the ranks;
            - "replicate": every rank has all of it; parameters of te_dist's layers and of norms are DTensors all the
              same, as gradient clipping wants it;
            - "gather": with sequence_parallel, the module's input is gathered once, quantized, for all the "column"
              layers inside of it that take it (q, k and v; gate and up).

            te_dist.LayerNormMLP, MultiheadAttention and TransformerLayer are "column" as a whole. nn.Linear becomes a
            te_dist layer in high precision; te_dist.convert first, to quantize it.
        sequence_parallel: between the layers, rows (the first dimension) are spread over the ranks.
        keep_gathered, reduce_dtype, amax: see ``TensorParallel``.
        overlap: "off", "auto" or "require", or name patterns of layers to those: whether communication runs beside the
            products that it belongs to. overlap_config: how, by product. See ``set_overlap``.

    Example:
        >>> import te_dist, torch
        >>> from te_dist.parallel import parallelize
        >>> def shard(model, mesh):
        ...     return parallelize(model, mesh["tp"], {"layers.*.qkv": "column", "layers.*.proj": "row"},
        ...                        sequence_parallel=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize expects a module but got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f'parallelize expects a DeviceMesh of one dimension, as mesh["tp"], but got {mesh}')
    resolve_group(mesh, "mesh")
    check_choice(overlap)
    table = read_table(overlap_config)
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(f"parallelize expects plan[{pattern!r}] in {STYLES} but got {style!r}")
    options = ParallelOptions(sequence_parallel, keep_gathered, reduce_dtype, amax)
    unused = set(plan)
    gathered: list[tuple[str, nn.Module]] = []
    chosen: list[tuple[str, nn.Module, str]] = []
    for name, module in list(model.named_modules()):
        if any(name.startswith(f"{outer}." if outer else "") for outer, _, _ in chosen):
            continue  # "layers.*" means the layers, not what is inside of them
        match = next((item for item in plan.items() if fnmatch.fnmatchcase(name, item[0])), None)
        if match is not None:
            unused.discard(match[0])
            if match[1] == GATHER:
                gathered.append((name, module))
            else:
                chosen.append((name, module, match[1]))
    if unused:
        warnings.warn(f"parallelize: no module of {type(model).__name__} matches {sorted(unused)}", stacklevel=2)
    covered = [name for name, module in gathered if sequence_parallel]
    for name, module, style in chosen:
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in covered)
        apply_style(name, module, mesh, style, options, takes_gathered=inside)
    for name, module in gathered:
        if sequence_parallel:
            SharedGather.attach(module, mesh, name, reduce_dtype)
    return model if overlap == "off" else apply_overlap(model, overlap, table)


def apply_style(
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    style: str,
    options: ParallelOptions,
    takes_gathered: bool = False,
) -> None:
    """One module of a plan."""
    label = name or type(module).__name__
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(f"parallelize expects parameters that are whole but {label} is spread already")
    if style == SEQUENCE:
        _apply_sequence(module, mesh, label)
    elif style == REPLICATE:
        for inner in module.modules():
            if can_be_sequence_parallel(inner):
                make_sequence_parallel(inner, mesh, sums=False)
            elif isinstance(inner, QuantizedLayer) and mesh.size() > 1:
                for param in list(inner._parameters):
                    distribute_parameter(inner, param, mesh, Replicate())
                inner._is_parallel = True
    elif isinstance(module, nn.Embedding):
        if style != ROW:
            raise ValueError(f'parallelize expects "row" for the embedding {label}, whose tokens are spread')
        module.__class__ = VocabParallelEmbedding
        module._set_parallel(mesh, options.sequence_parallel)  # type: ignore[operator]
    else:
        if type(module) is nn.Linear:
            make_te_dist(module, name)
        if not can_be_parallel(module):
            raise TypeError(
                f"parallelize: the plan says {style!r} for {label}, which is a {type(module).__name__}; te_dist's "
                f"layers, nn.Linear and nn.Embedding can be spread"
            )
        _name(module, name)
        make_parallel(module, mesh, style, options)
        if takes_gathered and style == COLUMN:
            SharedGather.join(module, mesh, options)


def _apply_sequence(module: nn.Module, mesh: DeviceMesh, label: str) -> None:
    if can_be_sequence_parallel(module):
        make_sequence_parallel(module, mesh)
    elif next(module.parameters(), None) is not None:
        raise TypeError(
            f"parallelize: \"sequence\" is for te_dist's and torch's LayerNorm and RMSNorm and for modules without "
            f"parameters but {label} is a {type(module).__name__}; where it uses a parameter, let it use "
            f"te_dist.parallel.copy_to_tensor_parallel(parameter, group)"
        )


def _name(module: nn.Module, name: str) -> None:
    """Layers are called by their place in the model, in reports and errors, unless somebody gave them another name."""
    for inner_name, inner in module.named_modules():
        full = ".".join(filter(None, (name, inner_name)))
        if isinstance(inner, QuantizedLayer) and full.endswith(inner.spec.name):
            inner.spec = dataclasses.replace(inner.spec, name=full)


def check_ranks(mode: str | None) -> None:
    """How often ranks compare what they are about to exchange: "always", "once" per shape, "off"; None is the default.

    By default it is "always" with gloo, where the host waits for each collective anyway, and "once" elsewhere.
    """
    if mode is not None and mode not in AGREEMENT:
        raise ValueError(f"check_ranks expects one of {AGREEMENT} or None but got {mode!r}")
    state.agreement = mode
