"""The private names of torch's FSDP2 that te_dist relies on. A torch version that moves one fails here first."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

from te_dist.parallel.fsdp.torch_fsdp import TrainingState


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def test_hooks_are_read_from_the_local_tensor() -> None:
    param = _fsdp_param.FSDPParam
    assert isinstance(param._sharded_local_tensor, property)
    gathering = source(param.all_gather_inputs.fget)
    assert "self._sharded_local_tensor" in gathering and "fsdp_pre_all_gather" in gathering
    assert ".size() != self.padded_sharded_param_size" in gathering  # which our size() answers
    made = source(param.init_unsharded_param)
    assert 'hasattr(\n' in made or "hasattr(self, \"_unsharded_param\")" in made
    assert "fsdp_post_all_gather" in made and "out=self._unsharded_param" in made
    assert "self._unsharded_inner_tensors" in made


def test_memory_belongs_to_what_fsdp_param_holds() -> None:
    param = _fsdp_param.FSDPParam
    freed = source(param.free_unsharded_param)
    assert "self.all_gather_outputs" in freed and "self._unsharded_inner_tensors" in freed
    # Outputs that are there are kept, so ours are gathered into.
    assert "len(self.all_gather_outputs) > 0" in source(param.init_all_gather_outputs)
    assert "alloc_storage" in source(param.alloc_all_gather_outputs)


def test_attributes() -> None:
    text = source(_fsdp_param.FSDPParam)
    for name in (
        "_module_info", "_orig_size", "padded_sharded_param_size", "_sharded_param_data", "sharded_param", "shard_mesh",
        "mesh_info", "fsdp_placement", "sharded_state", "_extensions_data", "unsharded_accumulated_grad", "param_dtype",
        "orig_dtype", "device", "reduce_dtype",
    ):  # fmt: skip
        assert f"self.{name}" in text or f"def {name}" in text, name
    group = source(_fsdp_param_group.FSDPParamGroup)
    for name in ("fsdp_params", "_training_state", "post_forward_mesh_info", "mesh_info", "reshard_after_backward",
                 "mp_policy", "force_sum_reduction_for_comms", "device"):  # fmt: skip
        assert f"self.{name}" in group, name
    assert {"IDLE", "FORWARD", "PRE_BACKWARD"} <= set(TrainingState.__members__)


def test_every_gradient_passes_one_function() -> None:
    """Where those that come in bf16 are widened, beside weights whose gradients are float32."""
    param = _fsdp_param.FSDPParam
    for name in ("unsharded_grad_data", "unsharded_accumulated_grad_data", "unsharded_zero_grad_data"):
        assert "self._get_grad_inner_tensor(" in source(getattr(param, name).fget), name
    assert list(inspect.signature(param._get_grad_inner_tensor).parameters) == ["self", "grad"]
    assert "self._unsharded_param.grad.dtype == self.reduce_dtype" in source(param.to_accumulated_grad_if_needed)


def test_where_a_forward_begins() -> None:
    state = _fsdp_state.FSDPState
    assert "self._root_pre_forward(" in source(state._pre_forward)
    root = source(state._root_pre_forward)
    assert root.index("self._lazy_init()") < root.index("iter_forward_root") < root.index("wait_stream")
    assert list(inspect.signature(state._root_pre_forward).parameters) == ["self", "module", "args", "kwargs"]
    assert hasattr(fully_shard, "state")
    assert "self._comm_ctx.all_gather_copy_in_stream.wait_stream" in root and "self._device_handle" in root


def test_torch_keeps_versions_of_refilled_tensors() -> None:
    from te_dist.torch_compat import refilling

    t = torch.zeros(2)
    with refilling([t]):
        t.fill_(1.0)
    assert t._version == 0
