"""The one file that touches torch's moving and private APIs. Everything here is feature-detected: an API that is
missing or refuses degrades to a no-op that says so in its return value, and never breaks ``import te_dist``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


# ------------------------------------------------------------------------------------------------- CPUs
def _slow_cpu_dtypes() -> frozenset[torch.dtype]:
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    slow = set()
    for dtype, name in asked.items():
        with contextlib.suppress(AttributeError, RuntimeError):  # a torch without oneDNN: nobody knows
            if not getattr(torch.ops.mkldnn, name)():
                slow.add(dtype)
    return frozenset(slow)


# Whose matrices torch multiplies on this CPU element by element: a hundred times slower than float32's.
SLOW_CPU_DTYPES = _slow_cpu_dtypes()

# ------------------------------------------------------------------------------------------------- opaque values
# torch 2.11 - 2.14: OpaqueBase + register_opaque_type(typ="value");
# torch 2.15:        CustomClassBase + register_custom_class(typ="constant").
OpaqueBase: type
_register: Any = None
_register_kind = ""

try:
    from torch._custom_class_base import CustomClassBase as OpaqueBase  # type: ignore
    from torch._library.opaque_object import register_custom_class as _register  # type: ignore

    _register_kind = "constant"
except ImportError:
    try:
        from torch._library.opaque_object import OpaqueBase
        from torch._library.opaque_object import register_opaque_type as _register

        _register_kind = "value"
    except ImportError:

        class OpaqueBase:  # type: ignore[no-redef]
            """Stands in where torch has no opaque types: classes work, compilation with them does not."""


# torch 2.11 lets Dynamo use only the members of an opaque value that were listed at its registration, and cannot
# trace methods of one that was made inside the graph. Later versions trace whatever is used.
MEMBERS_MUST_BE_LISTED = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)


def _traceable_members(cls: type, fields: Sequence[str]) -> dict[str, Any]:
    """Which members of a value Dynamo may use: methods are traced, everything else is read and baked in."""
    from torch._library.opaque_object import MemberType as kinds

    members = dict.fromkeys(fields, kinds.USE_REAL)
    for name in dir(cls):
        if not name.startswith("__"):
            traced = inspect.isfunction(inspect.getattr_static(cls, name))
            members[name] = kinds.INLINED if traced else kinds.USE_REAL
    return members


def register_value_type(cls: type, fields: Sequence[str] = ()) -> bool:
    """Tell torch.compile that instances of `cls` are constants compared by value. False if torch cannot."""
    if _register is None:
        return False
    try:
        if MEMBERS_MUST_BE_LISTED:
            _register(cls, typ=_register_kind, members=_traceable_members(cls, fields))
        else:
            _register(cls, typ=_register_kind)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def supports_value_types() -> bool:
    return _register is not None


# ------------------------------------------------------------------------------------------------- process groups
def process_group_types() -> tuple[type, ...]:
    """The classes whose instances must never be stored in a quantizer."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    return (ProcessGroup, DeviceMesh)


def group_by_name(name: str) -> Any:
    """The process group registered under a c10d name; LookupError if there is none."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise LookupError(str(error)) from error


# ------------------------------------------------------------------------------------------------- recomputation
def in_backward() -> bool:
    """Whether autograd's engine is running on this thread: a forward is then one that is computed again."""
    return torch._C._current_graph_task_id() != -1


def hidden_from_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees an operation. Selective checkpointing counts those of a forward, and expects its
    recomputation to do the same ones, which bookkeeping that must happen once cannot."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


# ------------------------------------------------------------------------------------------------- cuda
def when_cuda_starts(callback: Callable[[], None]) -> None:
    """Call it when this process starts CUDA, which importing te_dist does not; at once if it has."""
    call = getattr(torch.cuda, "_lazy_call", None)
    if call is not None:
        call(callback)


def current_raw_stream(device_index: int) -> int:
    """The current CUDA stream's handle, without building a Stream object."""
    getter = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if getter is not None:
        return int(getter(device_index))
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# The current device's index, without the checks of torch.cuda.current_device: a tensor on a GPU has passed them.
current_cuda_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


# ------------------------------------------------------------------------------------------------- autograd
def release_saved_tensors(ctx: Any) -> None:
    """Let go of a Function's saved tensors before its backward ends, unless the graph is retained."""
    release = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is not None:
        release()


# ------------------------------------------------------------------------------------------------- collectives
# Called on the group itself: torch.distributed's own functions were renamed in 2.13 and warn under their old names.
def backend_of(group: Any, device: torch.device) -> str:
    """ "gloo", "nccl", ...: what runs the group's collectives on tensors of that device."""
    try:
        return str(group._get_backend(torch.device(device.type)).name()).lower()
    except (AttributeError, RuntimeError):
        return str(torch.distributed.get_backend(group)).lower()


def start_all_gather(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    """One call that gathers each input along the first dimension into its output."""
    if len(inputs) == 1:
        return group._allgather_base(outputs[0], inputs[0])
    return group.allgather_into_tensor_coalesced(outputs, inputs)


def start_all_reduce(group: Any, tensor: torch.Tensor, op: Any) -> Any:
    from torch.distributed import AllreduceOptions

    options = AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


def start_reduce_scatter(group: Any, output: torch.Tensor, whole: torch.Tensor) -> Any:
    from torch.distributed import ReduceScatterOptions

    return group._reduce_scatter_base(output, whole, ReduceScatterOptions())


def start_send(group: Any, tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """A message to a rank of the group."""
    return group.send([tensor], rank, tag)


def start_receive(group: Any, tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """A message from a rank of the group, into the tensor."""
    return group.recv([tensor], rank, tag)


# ------------------------------------------------------------------------------------------------- DTensors
@functools.cache
def _local_parts_get_zeros() -> bool:
    """torch 2.11 and 2.12: autograd makes zeros of a gradient that a DTensor's local part does not have."""
    from torch.distributed.tensor import _api

    function = getattr(_api, "_ToTorchTensor", None)
    return function is not None and "set_materialize_grads" not in function.forward.__code__.co_names


def spread_like(part: torch.Tensor, whole: Any) -> torch.Tensor:
    """This rank's part as a DTensor that is spread as another one is. Nothing is communicated."""
    mesh, placements = whole.device_mesh, whole.placements
    made: torch.Tensor = type(whole).from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


class _LocalPart(torch.autograd.Function):
    """DTensor.to_local, of which no gradient remains no gradient."""

    @staticmethod
    def forward(ctx: Any, param: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.param = param
        part: torch.Tensor = param.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else spread_like(gradient.contiguous(), ctx.param)


def local_part(param: Any) -> torch.Tensor:
    """This rank's part of a DTensor; a weight gradient that is made elsewhere or later leaves no zeros in .grad."""
    if torch.compiler.is_compiling() or not _local_parts_get_zeros():
        return param.to_local()
    return _LocalPart.apply(param)


def whole_tensor(tensor: Any) -> torch.Tensor:
    """The whole of a DTensor, on all its ranks, for reading; any other tensor as it is. torch's own full_tensor ends
    the process where gloo carries tensors of a GPU: there through the host's memory."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    device, mesh = tensor.device, tensor.device_mesh
    takes_part = mesh.get_coordinate() is not None  # else the rank has no groups, and gets an empty tensor
    if device.type == "cuda" and takes_part and any(backend_of(g, device) == "gloo" for g in mesh.get_all_groups()):
        return tensor.detach().cpu().full_tensor().to(device)
    return tensor.full_tensor()


def default_store() -> Any:
    """The store through which the default group was made, or None."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


def saves_through_hooks() -> bool:
    """Whether saved_tensors_hooks are active, as inside non-reentrant activation checkpointing. True if unknown."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return True if top is None else top(True) is not None


@contextlib.contextmanager
def refilling(tensors: Sequence[torch.Tensor]) -> Any:
    """Inside, writing into these tensors is no change to autograd: what it has saved is put back."""
    keep = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    kept = tuple(t for t in tensors if not t.is_inference())
    if keep is None or not kept:
        yield
        return
    with keep(kept):
        yield


def traces_checkpoint() -> bool:
    """While Dynamo traces: whether it is inside activation checkpointing, so that backward may compute this part again.
    True if unknown."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        while tracer is not None:
            if "activation_checkpoint" in str(tracer.source_target):
                return True
            tracer = tracer.parent
    except (ImportError, AttributeError):
        return True
    return False


def constant_in_graphs(function: _F) -> _F:
    """torch.compiler.assume_constant_result, without its import of torch._dynamo: that takes longer than all else that
    ``import te_dist`` does, and only who compiles needs it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allow_graphs(count: int) -> None:
    """Let torch.compile keep at least `count` graphs of one function; with fullgraph=True one too many is an error."""
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * count)


# ------------------------------------------------------------------------------------------------- ends of groups
def before_destroying(callback: Callable[[Any], None]) -> None:
    """Call `callback(group)` before a process group is destroyed; with None, before all are. torch has no such hook, so
    its function is wrapped; who imported that by name earlier goes past the wrapper."""
    from torch.distributed import distributed_c10d

    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        callback(group)
        original(group)

    distributed_c10d.destroy_process_group = destroy_process_group
    torch.distributed.destroy_process_group = destroy_process_group


# ------------------------------------------------------------------------------------------------- symmetric memory
def missing_symmetric_memory(device: torch.device) -> str:
    """Why this torch has no symmetric memory on the device; "" if it has."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return f"torch {torch.__version__} was built without symmetric memory"
    if not hasattr(_SymmetricMemory, "empty_strided_p2p"):
        return f"torch {torch.__version__} has no _SymmetricMemory.empty_strided_p2p"
    return ""


def allocate_symmetric(size: int, device: torch.device, group_name: str) -> tuple[torch.Tensor, Any]:
    """`size` bytes that all ranks of the group can reach, and the handle by which they do. All ranks call this."""
    from torch._C._distributed_c10d import _SymmetricMemory

    memory = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device, group_name)
    return memory, _SymmetricMemory.rendezvous(memory)


def group_timeout(group: Any, device: torch.device) -> float:
    """Seconds after which a collective of the group counts as failed; torch's default if the group does not say."""
    try:
        return float(group._get_backend(torch.device(device.type)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 600.0
