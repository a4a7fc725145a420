"""TransformerLayer and MultiheadAttention: against plain torch in fp64, compiled against eager, in every recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from gemm_cases import sqnr
from layer_cases import RECIPES, assert_equal, compiled, run
from torch import Tensor
from torch.nn import functional

import te_dist
from te_dist.modules import attention

HIDDEN, FFN, HEADS, GROUPS, SEQUENCE, BATCH = 64, 96, 4, 2, 24, 2
HEAD = HIDDEN // HEADS


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def layer(recipe: Any = None, **options: Any) -> te_dist.TransformerLayer:
    torch.manual_seed(7)
    given = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_gqa_groups": GROUPS,
        "params_dtype": torch.bfloat16,
        "name": "block",
    }
    return te_dist.TransformerLayer(HIDDEN, FFN, HEADS, recipe=recipe, **(given | options))


def data(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    x, dy = torch.randn(2, SEQUENCE, BATCH, HIDDEN).to(dtype)
    return x.requires_grad_(), dy


# ------------------------------------------------------------------------------------------------- reference
def attention_reference(p: dict[str, Tensor], x: Tensor, allowed: Tensor, angles: Tensor | None) -> Tensor:
    """[s, b, h] in plain torch: no fused projection, softmax written out, heads repeated for their groups."""
    if angles is None:
        angles = torch.zeros(len(x), 1, 1, HEAD, dtype=x.dtype)
    q, k, v = (
        functional.linear(x, p[f"{n}_weight"], p[f"{n}_bias"]).unflatten(-1, (-1, HEAD))
        for n in ("query", "key", "value")
    )
    pairs = torch.polar(torch.ones_like(angles[..., : HEAD // 2]), angles[..., : HEAD // 2])  # as complex numbers
    q, k = (torch.complex(*t.chunk(2, -1)) * pairs for t in (q, k))
    q, k = (torch.cat((t.real, t.imag), -1) for t in (q, k))
    k, v = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / HEAD**0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    context = torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(-2)
    return functional.linear(context, p["proj.weight"], p["proj.bias"])


def reference(module: te_dist.TransformerLayer, x: Tensor, dy: Tensor, allowed: Tensor, angles: Tensor | None) -> dict:
    exact = copy.deepcopy(module).double()
    named = dict(exact.named_parameters())

    def call(x: Tensor) -> Tensor:
        p = {n.replace("self_attention.", "").replace("layernorm_qkv.", ""): t for n, t in named.items()}
        normed = functional.layer_norm(x, (HIDDEN,), p["layer_norm_weight"], p["layer_norm_bias"])
        h = x + attention_reference(p, normed, allowed, angles)
        q = {n.removeprefix("layernorm_mlp."): t for n, t in named.items()}
        normed = functional.layer_norm(h, (HIDDEN,), q["layer_norm_weight"], q["layer_norm_bias"])
        inner = functional.gelu(functional.linear(normed, q["fc1_weight"], q["fc1_bias"]), approximate="tanh")
        return h + functional.linear(inner, q["fc2_weight"], q["fc2_bias"])

    return run(exact, x.double(), dy=dy.double(), call=call)


CAUSAL = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
PADDING = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
PADDING[1, ..., -7:] = True
ARBITRARY = torch.rand(BATCH, 1, SEQUENCE, SEQUENCE, generator=torch.Generator().manual_seed(1)) < 0.3
ARBITRARY[..., 0] = False
MASKS = {
    "causal": (None, CAUSAL),
    "no_mask": (None, torch.ones_like(CAUSAL)),
    "padding": (PADDING, ~PADDING),
    "padding_causal": (PADDING, ~PADDING & CAUSAL),
    "arbitrary": (ARBITRARY, ~ARBITRARY),
}


@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("kind", sorted(MASKS))
def test_float32_layer_is_the_textbook_one(kind: str, with_rope: bool) -> None:
    """In float32 nothing but rounding is between the two: 24 bits less what sums of up to 96 terms lose."""
    module = layer(self_attn_mask_type=kind, params_dtype=torch.float32)
    mask, allowed = MASKS[kind]
    angles = te_dist.RotaryPositionEmbedding(HEAD)(SEQUENCE) if with_rope else None
    x, dy = data(torch.float32)
    actual = run(module, x, mask, rotary_pos_emb=angles, dy=dy)
    expected = reference(module, x, dy, allowed, None if angles is None else angles.double())
    if not with_rope:  # softmax does not feel what all keys share: zero and rounding
        assert all(made.pop("self_attention.layernorm_qkv.key_bias").abs().max() < 1e-5 for made in (actual, expected))
    low = {n: s for n, v in expected.items() if (s := sqnr(actual[n], v)) < 105}
    assert not low, low


# A chain of products: qkv, proj, fc1 and fc2 add their errors to a residual stream that has none, and gradients pass
# all four, which is up to 6 dB below a single product (layer_cases.FLOORS). bf16 also rounds the stream itself.
LAYER_FLOORS = {"none": 42.0, "current": 16.5, "delayed": 16.5, "block": 20.0, "mxfp8": 20.0, "nvfp4": 4.0}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_quantized_layers_stay_close(name: str) -> None:
    module = layer(RECIPES[name])
    x, dy = data()
    if name == "delayed":
        run(module, x, dy=dy)
    actual = run(module, x, dy=dy)
    expected = reference(module, x, dy, CAUSAL, None)
    expected.pop("self_attention.layernorm_qkv.key_bias")  # close to nothing, see above
    low = {n: round(s, 1) for n, v in expected.items() if (s := sqnr(actual[n], v)) < LAYER_FLOORS[name]}
    assert not low, low


# ------------------------------------------------------------------------------------------------- compiled
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_compiled_equals_eager(name: str) -> None:
    """Without dropout: torch itself rounds the mask's gradient differently in a graph."""
    options = {"activation": "swiglu", "normalization": "RMSNorm", "fuse_qkv_params": True} if name == "mxfp8" else {}
    eager = layer(RECIPES[name], **options)
    twin, call = compiled(eager)
    angles = te_dist.RotaryPositionEmbedding(HEAD)(SEQUENCE)
    x, dy = data()
    for _ in range(2):
        assert_equal(run(twin, x, rotary_pos_emb=angles, dy=dy, call=call), run(eager, x, rotary_pos_emb=angles, dy=dy))


def test_dropout_compiles_and_is_off_in_eval() -> None:
    module = layer(RECIPES["current"], hidden_dropout=0.5, attention_dropout=0.5)
    twin, call = compiled(module)
    x, dy = data()
    dropped = run(twin, x, dy=dy, call=call)["y"]
    assert torch.equal(dropped, run(module, x, dy=dy)["y"])
    expected = layer(RECIPES["current"])(x)
    assert not torch.equal(dropped, expected)
    assert torch.equal(module.eval()(x), expected)


# ------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_trains(name: str) -> None:
    """A few steps towards a fixed target, two microbatches each with cached weights: the loss halves."""
    module = layer(RECIPES[name], params_dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    x, target = (t.detach() for t in data())
    losses = []
    for _ in range(14):
        total = 0.0
        for first, (part, goal) in enumerate(zip(x.split(1, 1), target.split(1, 1), strict=True)):
            loss = (module(part, is_first_microbatch=first == 0) - goal).float().square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_checkpointed_and_cached_equal_plain(name: str) -> None:
    """With dropout: the generator is where it was when forward runs again."""
    x, dy = data()
    plain, checkpointed, cached = (layer(RECIPES[name], hidden_dropout=0.3, attention_dropout=0.3) for _ in range(3))

    def call(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(checkpointed, x, use_reentrant=False)

    for _ in range(2):
        expected = run(plain, x, dy=dy)
        assert_equal(run(checkpointed, x, dy=dy, call=call), expected)
        assert_equal(run(cached, x, is_first_microbatch=True, dy=dy), expected)
    with te_dist.frozen_weights():
        assert torch.equal(cached.eval()(x), cached(x))


def test_main_grad_of_every_weight() -> None:
    expected = layer(None, fuse_qkv_params=True)
    fused = layer(None, fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    weights = [n for n, p in fused.named_parameters() if p.dim() == 2]
    for name in weights:
        fused.get_parameter(name).main_grad = torch.zeros_like(fused.get_parameter(name), dtype=torch.float32)
    x, dy = data()
    want, got = run(expected, x, dy=dy), run(fused, x, dy=dy)
    assert sorted(set(want) - set(got)) == sorted(weights)
    for name in weights:
        assert sqnr(fused.get_parameter(name).main_grad, want[name].double()) > 50, "bf16 and float32 of one sum"


# ------------------------------------------------------------------------------------------------- layouts
def test_names_are_transformer_engines() -> None:
    split = [
        f"self_attention.layernorm_qkv.{n}_{kind}" for kind in ("weight", "bias") for n in ("query", "key", "value")
    ]
    norms = [
        f"{n}.layer_norm_{kind}"
        for n in ("self_attention.layernorm_qkv", "layernorm_mlp")
        for kind in ("weight", "bias")
    ]
    rest = ["self_attention.proj.weight", "self_attention.proj.bias"]
    rest += [f"layernorm_mlp.fc{i}_{kind}" for i in (1, 2) for kind in ("weight", "bias")]
    assert sorted(layer().state_dict()) == sorted([*split, *norms, *rest])
    fused = [f"self_attention.layernorm_qkv.{kind}" for kind in ("weight", "bias")]
    assert sorted(layer(fuse_qkv_params=True).state_dict()) == sorted([*fused, *norms, *rest])
    assert sorted(layer(output_layernorm=True, normalization="RMSNorm", bias=False).state_dict()) == sorted(
        ["layernorm.weight", "layernorm_mlp.layer_norm_weight", "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight",
         "self_attention.proj.weight", *[f"self_attention.qkv.{n}_weight" for n in ("query", "key", "value")]]
    )  # fmt: skip
    assert layer().self_attention.proj.spec.name == "block.self_attention.proj"


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_and_separate_qkv(interleaved: bool) -> None:
    """One weight with the rows in the documented order computes the same."""
    separate = layer(RECIPES["mxfp8"])
    fused = layer(RECIPES["mxfp8"], fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    state = separate.state_dict()
    prefix = "self_attention.layernorm_qkv."
    for kind in ("weight", "bias"):
        q, k, v = (state.pop(f"{prefix}{n}_{kind}") for n in ("query", "key", "value"))
        if interleaved:
            q, k, v = (t.view(GROUPS, -1, HEAD, *t.shape[1:]) for t in (q, k, v))
            state[prefix + kind] = torch.cat((q, k, v), 1).flatten(0, 2)
        else:
            state[prefix + kind] = torch.cat((q, k, v))
    fused.load_state_dict(state)
    x, _ = data()
    assert torch.equal(fused(x), separate(x))


def test_batch_first_and_other_masks_per_call() -> None:
    sequence_first, batch_first = layer(RECIPES["current"]), layer(RECIPES["current"], attn_input_format="bshd")
    x, _ = data()
    angles = te_dist.RotaryPositionEmbedding(HEAD, rotary_percent=0.5, interleaved=False)(SEQUENCE + 3)
    y = batch_first(x.transpose(0, 1), rotary_pos_emb=angles)
    # Another order of rows, hence of attention's sums; everything else is row by row.
    assert sqnr(y.transpose(0, 1), sequence_first(x, rotary_pos_emb=(angles, angles)).double()) > 45
    other = layer(RECIPES["current"], self_attn_mask_type="padding")
    assert torch.equal(sequence_first(x, PADDING, self_attn_mask_type="padding"), other(x, PADDING))


def test_residual_variants() -> None:
    """What each option adds up, from the layer's own parts."""
    x, _ = data()
    base = layer()
    attention, mlp = base.self_attention, base.layernorm_mlp
    parallel = layer(parallel_attention_mlp=True)
    parallel.load_state_dict(base.state_dict())
    assert torch.equal(parallel(x), x + (attention(x) + mlp(x)))
    post = layer(apply_residual_connection_post_layernorm=True)
    post.load_state_dict(base.state_dict())
    attended, normed = post.self_attention(x)
    made, normed_again = post.layernorm_mlp(normed + attended)
    assert torch.equal(post(x), normed_again + made)
    last = layer(output_layernorm=True, zero_centered_gamma=True)
    between = x + last.self_attention(x)
    assert torch.equal(last(x), last.layernorm(between + last.layernorm_mlp(between)))


@pytest.mark.parametrize("slow", [False, True])
def test_attention_where_the_cpu_multiplies_no_bf16(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """There it is made in float32: torch would take a hundred times as long, and all else of a model is quick."""
    monkeypatch.setattr(attention, "SLOW_CPU_DTYPES", frozenset([torch.bfloat16] if slow else []))
    seen: list[torch.dtype] = []
    plain = functional.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.extend(t.dtype for t in (q, k, v))
        return plain(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    module = layer()
    x, dy = data()
    actual = run(module, x, dy=dy)
    assert seen == [torch.float32 if slow else torch.bfloat16] * 3
    expected = reference(module, x, dy, CAUSAL, None)
    expected.pop("self_attention.layernorm_qkv.key_bias")  # close to nothing, see above
    low = {n: round(s, 1) for n, v in expected.items() if (s := sqnr(actual[n], v)) < LAYER_FLOORS["none"]}
    assert not low, low
    assert all(t.dtype == torch.bfloat16 for t in actual.values())


def test_attention_returns() -> None:
    x, _ = data()
    options = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    for input_layernorm in (False, True):
        torch.manual_seed(2)
        plain = te_dist.MultiheadAttention(HIDDEN, HEADS, input_layernorm=input_layernorm, **options)
        apart = te_dist.MultiheadAttention(
            HIDDEN, HEADS, input_layernorm=input_layernorm, return_bias=True, return_layernorm_output=input_layernorm,
            **options,
        )  # fmt: skip
        apart.load_state_dict(plain.state_dict())
        out, bias, *normed = apart(x)
        assert sqnr(out.float() + bias, plain(x).double()) > 50
        assert bias is apart.proj.bias
        assert [t.shape for t in normed] == ([x.shape] if input_layernorm else [])


def test_kv_channels_init_methods_and_meta() -> None:
    module = layer(
        kv_channels=8, device="meta", init_method=torch.nn.init.ones_, output_layer_init_method=torch.nn.init.zeros_
    )
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    attention = module.self_attention
    assert attention.proj.weight.shape == (HIDDEN, 8 * HEADS)
    assert attention.layernorm_qkv.key_weight.shape == (8 * GROUPS, HIDDEN)
    assert (attention.layernorm_qkv.query_weight == 1).all() and (module.layernorm_mlp.fc1_weight == 1).all()
    assert not attention.proj.weight.any() and not module.layernorm_mlp.fc2_weight.any()
    assert "query_weight" not in repr(module) and "MultiheadAttention" in repr(module)


@pytest.mark.parametrize("make", [te_dist.Linear, te_dist.LayerNormLinear])
def test_split_parameters_with_delayed_wgrad(make: Any) -> None:
    torch.manual_seed(1)
    whole = make(16, 12, recipe=RECIPES["current"], parameters_split={"a": 4, "b_": 8})
    delayed = make(16, 12, recipe=RECIPES["current"], parameters_split={"a": 4, "b_": 8}, delay_wgrad_compute=True)
    delayed.load_state_dict(whole.state_dict())
    x, dy = torch.randn(6, 16, requires_grad=True), torch.randn(6, 12)
    expected = run(whole, x, dy=dy)
    run(delayed, x, dy=dy)
    assert delayed.a_weight.grad is None
    delayed.backward_dw()
    for name in ("a_weight", "b_weight", "a_bias", "b_bias"):
        assert torch.equal(delayed.get_parameter(name).grad, expected[name]), name
    assert "recipe" in repr(whole)
    with pytest.raises(ValueError, match=rf"{make.__name__}.*fuse_wgrad_accumulation.*no parameters_split"):
        make(16, 12, parameters_split=("a", "b"), fuse_wgrad_accumulation=True)


# ------------------------------------------------------------------------------------------------- rotary
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_depends_on_distance_only(interleaved: bool) -> None:
    """q_i . k_j after rotation is a function of i - j, and position 0 stays as it is."""
    from te_dist.modules.rotary import apply_rotary_pos_emb

    embedding = te_dist.RotaryPositionEmbedding(16, interleaved=interleaved, seq_len_interpolation_factor=2.0)
    assert embedding.to(torch.bfloat16)(12).dtype == torch.float32
    q, k = torch.randn(2, 1, 1, 1, 20).expand(2, 12, 1, 1, 20)
    rotated = [apply_rotary_pos_emb(t, embedding(12), interleaved=interleaved) for t in (q, k)]
    assert torch.equal(rotated[0][0], q[0])
    assert torch.equal(rotated[0][..., 16:], q[..., 16:])
    scores = torch.einsum("sbhd,tbhd->st", *rotated)
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert torch.equal(embedding(4, offset=3), embedding(7)[3:])
    with pytest.raises(ValueError, match=r"rotary_pos_emb expects angles \[at least 12, 1, 1, at most 20\]"):
        apply_rotary_pos_emb(q, embedding(11))
    with pytest.raises(ValueError, match=r"even number of rotated dimensions but got 7"):
        te_dist.RotaryPositionEmbedding(14, rotary_percent=0.5)


# ------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "option",
    [
        {"tp_size": 2}, {"sequence_parallel": True}, {"layer_type": "decoder"}, {"drop_path_rate": 0.1},
        {"window_size": (4, 0)}, {"qk_norm_type": "RMSNorm"}, {"ub_tp_comm_overlap": True},
        {"softmax_type": "learnable"}, {"activation_params": {"limit": 7.0}},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_not_built(option: dict[str, Any]) -> None:
    ((name, _),) = option.items()
    with pytest.raises(ValueError, match=rf"TransformerLayer 'block' has not built {name}="):
        layer(**option)


def test_other_refusals() -> None:
    x, _ = data()
    module = layer()
    layer(tp_size=1, seq_length=512, ub_overlap_ag=True, window_size=(-1, -1))  # ask for nothing
    with pytest.raises(TypeError, match=r"'block' got an unexpected argument 'dropuot'"):
        layer(dropuot=0.1)
    with pytest.raises(ValueError, match=r"'block.self_attention' has not built inference_params="):
        module(x, inference_params={})
    with pytest.raises(TypeError, match=r"unexpected argument 'mask'"):
        module(x, mask=PADDING)
    with pytest.raises(ValueError, match=r"'block.self_attention'.*'causal' has no use for an attention_mask"):
        module(x, PADDING)
    with pytest.raises(ValueError, match=r"attn_mask_type 'padding' expects an attention_mask"):
        module(x, self_attn_mask_type="padding")
    with pytest.raises(TypeError, match=r"bool attention_mask, True where masked, but got torch.float32"):
        module(x, PADDING.float(), self_attn_mask_type="padding")
    with pytest.raises(ValueError, match=r"attn_mask_type in .* but got 'bottom_right'"):
        layer(self_attn_mask_type="bottom_right")
    with pytest.raises(ValueError, match=r"3 dimensions \(sbhd\) but got shape \[24, 64\]"):
        module(x[:, 0])
    with pytest.raises(ValueError, match=r"num_gqa_groups to divide num_attention_heads 4 but got 3"):
        layer(num_gqa_groups=3)
    with pytest.raises(ValueError, match=r"num_attention_heads to divide hidden_size 64.*got 5"):
        te_dist.MultiheadAttention(64, 5)
    with pytest.raises(ValueError, match=r"qkv_format in .* but got 'thd'"):
        layer(attn_input_format="thd")
    with pytest.raises(ValueError, match=r"fuse_wgrad_accumulation expects fuse_qkv_params=True"):
        layer(fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match=r"return_layernorm_output expects input_layernorm=True"):
        te_dist.MultiheadAttention(64, 4, return_layernorm_output=True)
    with pytest.raises(ValueError, match=r"apply_residual_connection_post_layernorm expects"):
        layer(apply_residual_connection_post_layernorm=True, output_layernorm=True)
