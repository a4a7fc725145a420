"""SPEC E1-E6, E12: quantizers are immutable values, rebuild exactly, and never hold a process group."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from cases import QUANTIZERS, VALUE_QUANTIZERS, assert_same_storage, delayed, rng_for, varied

import te_dist
from te_dist import Quantizer, torch_compat
from te_dist.formats import HADAMARD_SIGN_MASK

NAMES = sorted(VALUE_QUANTIZERS)


def rebuilt_from_graph(quantizer: Quantizer) -> Quantizer:
    expression, names = quantizer.__fx_repr__()
    return eval(expression, dict(names))


@pytest.mark.parametrize("name", NAMES)
def test_equal_values_are_equal_and_quantize_alike(name: str) -> None:
    first, second = VALUE_QUANTIZERS[name](), VALUE_QUANTIZERS[name]()
    assert first is not second
    assert first == second and hash(first) == hash(second)
    assert {first: 1}[second] == 1
    x = varied((64, 96), torch.bfloat16)
    for other in (
        second,
        rebuilt_from_graph(first),
        pickle.loads(pickle.dumps(first)),
        copy.deepcopy(first),
        copy.copy(first),
    ):
        assert other == first and hash(other) == hash(first) and repr(other) == repr(first)
        rng = rng_for(first)
        assert_same_storage(other.quantize(x, rng_state=rng), first.quantize(x, rng_state=rng), name)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_counts(name: str) -> None:
    """Changing any one field gives another value: nothing that matters is outside of the key."""
    quantizer = VALUE_QUANTIZERS[name]()
    for field in type(quantizer)._value_fields:
        old = getattr(quantizer, field)
        if field == "fp4_dtype":
            continue
        if field == "fp8_dtype":
            new = "e5m2" if old == te_dist.DType.kFloat8E4M3 else "e4m3"
        elif field == "block_scaling_dim":
            new = 3 - old
        elif field == "dtype":
            new = "fp16"
        elif isinstance(old, bool):
            new = not old
        else:
            new = old + 0.25
        try:
            other = quantizer.replace(**{field: new})
        except ValueError:
            continue  # not a legal combination
        assert other != quantizer, field
        assert getattr(quantizer, field) == old, "replace must not change the original"


def test_different_classes_differ() -> None:
    values = [make() for make in VALUE_QUANTIZERS.values()]
    assert len(set(values)) == len(values)
    assert all(a != b for i, a in enumerate(values) for b in values[i + 1 :])
    assert te_dist.MXFP8Quantizer("e4m3") != "MXFP8Quantizer"


@pytest.mark.parametrize("name", NAMES)
def test_immutable(name: str) -> None:
    quantizer = VALUE_QUANTIZERS[name]()
    key = hash(quantizer)
    for field in type(quantizer)._value_fields:
        with pytest.raises(AttributeError, match="immutable"):
            setattr(quantizer, field, getattr(quantizer, field))
        with pytest.raises(AttributeError, match="immutable"):
            delattr(quantizer, field)
    with pytest.raises(AttributeError, match="no field 'extra'"):
        quantizer.extra = 1
    row = quantizer.with_usage(columnwise=False)
    assert (row.rowwise, row.columnwise) == (True, False)
    assert (quantizer.rowwise, quantizer.columnwise) == (True, True)
    assert quantizer.with_usage(rowwise=True) is quantizer
    assert hash(quantizer) == key
    with pytest.raises(ValueError, match="rowwise or columnwise"):
        row.with_usage(rowwise=False)


def test_delayed_and_unregistered_keep_identity() -> None:
    first, second = delayed(), delayed()
    assert first != second and first == first
    assert not te_dist.is_value_opaque_quantizer(first)
    with pytest.raises(TypeError, match="identity"):
        first.__fx_repr__()
    twin = copy.deepcopy(first)
    twin.scale.fill_(7)
    assert first.scale.item() == pytest.approx(3.7)
    unpickled = pickle.loads(pickle.dumps(first))
    assert torch.equal(unpickled.scale, first.scale) and unpickled.fp8_dtype == first.fp8_dtype

    class Custom(te_dist.MXFP8Quantizer):
        pass

    assert Custom("e4m3") != Custom("e4m3")
    assert not te_dist.is_value_opaque_quantizer(Custom("e4m3"))
    assert te_dist.is_value_opaque_quantizer(te_dist.MXFP8Quantizer("e4m3"))


@te_dist.register_value_quantizer
class Registered(te_dist.Float8CurrentScalingQuantizer):
    """A custom quantizer with a field of its own."""

    _value_fields = (*te_dist.Float8CurrentScalingQuantizer._value_fields, "tag")

    def __init__(self, *args: object, tag: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.tag = tag


def test_registered_subclass_is_a_value() -> None:
    assert Registered("e4m3", tag="a") == Registered("e4m3", tag="a")
    assert Registered("e4m3", tag="a") != Registered("e4m3", tag="b")
    assert Registered("e4m3") != te_dist.Float8CurrentScalingQuantizer("e4m3")
    assert rebuilt_from_graph(Registered("e4m3", tag="a")) == Registered("e4m3", tag="a")
    assert pickle.loads(pickle.dumps(Registered("e5m2", tag="x"))).tag == "x"


def test_a_tensor_is_not_a_value() -> None:
    with pytest.raises(TypeError, match="tag expects a number"):
        hash(Registered("e4m3", tag=torch.ones(1)))


@pytest.mark.parametrize("with_rht", [False, True])
@pytest.mark.parametrize("random_signs", [False, True])
def test_hadamard_matrix_survives_rebuilding(with_rht: bool, random_signs: bool) -> None:
    quantizer = te_dist.NVFP4Quantizer(with_rht=with_rht, with_random_sign_mask=random_signs)
    matrix = quantizer.rht_matrix
    signs = [-1.0 if (HADAMARD_SIGN_MASK if random_signs else 0) >> i & 1 else 1.0 for i in range(16)]
    sylvester = torch.tensor([[1.0]])
    for _ in range(4):
        sylvester = torch.cat((torch.cat((sylvester, sylvester), 1), torch.cat((sylvester, -sylvester), 1)), 0)
    expected = torch.diag(torch.tensor(signs)) @ sylvester * 0.25
    assert matrix.dtype == torch.bfloat16
    assert torch.equal(matrix.float(), expected)
    assert torch.equal(matrix.float() @ matrix.float().t(), torch.eye(16))
    for other in (rebuilt_from_graph(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert torch.equal(other.rht_matrix, matrix)
        assert other.rht_matrix_random_sign_mask_t == quantizer.rht_matrix_random_sign_mask_t
    if random_signs:
        assert signs == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def test_registration_survives_a_torch_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise TypeError("no opaque types today")

    class Late(te_dist.MXFP8Quantizer):
        pass

    monkeypatch.setattr(torch_compat, "_register", refuse)
    assert te_dist.register_value_quantizer(Late) is Late
    monkeypatch.setattr(torch_compat, "_register", None)
    te_dist.register_value_quantizer(Late)
    assert Late("e4m3") == Late("e4m3")
    with pytest.raises(TypeError, match="subclass of Quantizer"):
        te_dist.register_value_quantizer(dict)


# ------------------------------------------------------------------------------------------------- no groups
@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


class Sneaky(te_dist.Float8CurrentScalingQuantizer):
    """Stores a group as a field, straight into the instance, where no __setattr__ sees it."""

    _value_fields = (*te_dist.Float8CurrentScalingQuantizer._value_fields, "group")

    def __init__(self, *args: object, group: object = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "group", group)


def every_use_of_the_value(quantizer: Quantizer):
    yield "==", lambda: quantizer == quantizer
    yield "hash", lambda: hash(quantizer)
    yield "__fx_repr__", lambda: quantizer.__fx_repr__()
    yield "pickle", lambda: pickle.dumps(quantizer)
    yield "deepcopy", lambda: copy.deepcopy(quantizer)
    yield "copy", lambda: copy.copy(quantizer)
    yield "torch.save", lambda: torch.save(quantizer, io.BytesIO())


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_a_group_cannot_be_stored(name: str, group) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for held in (group, mesh, [group], {"tp": group}, (1, (group,))):
        quantizer = QUANTIZERS[name]()
        for attribute in ("amax_reduction_group", "group", "rowwise"):
            with pytest.raises(TypeError, match="process group"):
                setattr(quantizer, attribute, held)
        object.__setattr__(quantizer, "smuggled", held)
        for use, call in every_use_of_the_value(quantizer):
            with pytest.raises(TypeError, match="smuggled holds a process group"):
                call()
                pytest.fail(f"{use} let a group through")


def test_a_subclass_cannot_store_a_group_either(group) -> None:
    for registered in (False, True):
        cls = type("SneakyToo", (Sneaky,), {})
        if registered:
            te_dist.register_value_quantizer(cls)
        for _, call in every_use_of_the_value(cls("e4m3", group=group)):
            with pytest.raises(TypeError, match="process group"):
                call()
    with pytest.raises(TypeError, match="process group"):
        Registered("e4m3", tag=group)
    for cls in (te_dist.Float8CurrentScalingQuantizer, te_dist.Float8BlockQuantizer):
        with pytest.raises(TypeError, match="amax_reduction_group"):
            cls("e4m3", amax_reduction_group=group)


def test_no_group_is_left_after_a_call(group) -> None:
    for name, make in QUANTIZERS.items():
        quantizer = make()
        x = varied((32, 32), torch.bfloat16)
        storage = quantizer.quantize(x, amax_reduction_group=group, rng_state=rng_for(quantizer))
        for holder in (quantizer, storage.quantizer):
            assert set(holder.__dict__) == set(type(holder)._value_fields), name
            hash(holder)
