"""Which product overlaps with which collective, and how: values, and the table that names them.

A column-parallel layer with sequence parallelism (qkv, fc1) gathers x for fprop and again for wgrad, and scatters dx; a
row-parallel one (proj, fc2) scatters y and gathers dy. So the entries of a layer mean:

    layer    product   method          what happens
    column   fprop     ring_exchange   fprop of each rank's rows as they arrive
             dgrad     bulk            x is gathered, for wgrad, while dgrad runs
                       ring_exchange   rows of dx are sent as dgrad makes them; x is gathered meanwhile
                       pipeline        the same by features
             wgrad     bulk            dx is scattered while wgrad runs
    row      fprop     pipeline        features of y are sent as fprop makes them
                       ring_exchange   rows of y are
             dgrad     ring_exchange   dgrad of each rank's rows of dy as they arrive
             wgrad     bulk            column planes of dy arrive while dgrad runs ("external" in Transformer Engine)

and "off" leaves the collective to the group's own backend.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_dist.values import Value, value_type

OFF, RING, PIPELINE, BULK = "off", "ring_exchange", "pipeline", "bulk"
PRODUCTS = ("fprop", "dgrad", "wgrad")
SPLITS = 4  # parts of a pipeline, as in Transformer Engine

# Names of layers in a table. "column" and "row" stand for those with another name.
COLUMN_NAMES, ROW_NAMES = ("qkv", "fc1", "column"), ("proj", "fc2", "row")
ALLOWED: dict[tuple[bool, str], tuple[str, ...]] = {
    (False, "fprop"): (OFF, RING),
    (False, "dgrad"): (OFF, BULK, RING, PIPELINE),
    (False, "wgrad"): (OFF, BULK),
    (True, "fprop"): (OFF, PIPELINE, RING),
    (True, "dgrad"): (OFF, RING),
    (True, "wgrad"): (OFF, BULK),
}
# Options of Transformer Engine's tables that say how its kernels share a GPU. Here copy engines do the copying.
_WITHOUT_EFFECT = frozenset(
    {"num_sm", "cga_size", "set_sm_margin", "atomic_gemm", "use_ce", "fp8_buf", "comm_priority", "gemm_priority",
     "pipeline_rs_overlap_first_gemm", "is_reduce_scatter"}
)  # fmt: skip
_OPTIONS = frozenset({"method", "num_splits", "aggregate"}) | _WITHOUT_EFFECT


@value_type
@dataclasses.dataclass(frozen=True)
class Method(Value):
    """How one product overlaps.

    Attributes:
        name: "off", "ring_exchange", "pipeline" or "bulk".
        splits: of a pipeline: into how many parts the features are cut, at most.
        aggregate: of a gathering ring_exchange: two ranks' rows in each product, in place of one's.
    """

    name: str = OFF
    splits: int = SPLITS
    aggregate: bool = False

    @property
    def is_on(self) -> bool:
        return self.name != OFF


@value_type
@dataclasses.dataclass(frozen=True)
class LayerMethods(Value):
    """The methods of a layer's three products."""

    fprop: Method = Method()
    dgrad: Method = Method()
    wgrad: Method = Method()

    def of(self, product: str) -> Method:
        return getattr(self, product)

    @property
    def is_on(self) -> bool:
        return any(self.of(product).is_on for product in PRODUCTS)


_COLUMN = LayerMethods(Method(RING), Method(BULK), Method(BULK))
_ROW = LayerMethods(Method(PIPELINE), Method(RING), Method(BULK))
NOTHING = LayerMethods()
Table = Mapping[str, LayerMethods]
DEFAULTS: dict[str, LayerMethods] = dict.fromkeys(COLUMN_NAMES, _COLUMN) | dict.fromkeys(ROW_NAMES, _ROW)


def read_table(given: Mapping[str, Any] | str | Path | None) -> dict[str, LayerMethods]:
    """The table of all layers: the defaults with what a dictionary or a YAML file says instead.

    Args:
        given: keys as Transformer Engine's ``ub_cfgs`` and Megatron-LM's ``--tp-comm-overlap-cfg`` have them,
            "{qkv,proj,fc1,fc2}_{fprop,dgrad,wgrad}", also "column_.." and "row_.." for layers with other names;
            values are a method's name, or {"method": .., "num_splits": .., "aggregate": ..}.
    """
    table = dict(DEFAULTS)
    if given is None:
        return table
    if isinstance(given, str | Path):
        given = _read_yaml(Path(given))
    if not isinstance(given, Mapping):
        raise TypeError(f"overlap_config expects a mapping or the path of a YAML file but got {type(given).__name__}")
    without_effect: set[str] = set()
    for key, value in given.items():
        layer, _, product = str(key).rpartition("_")
        if layer not in DEFAULTS or product not in PRODUCTS:
            raise ValueError(
                f"overlap_config expects keys of {list(DEFAULTS)} with _fprop, _dgrad or _wgrad behind but got {key!r}"
            )
        method = _method(str(key), value, layer in ROW_NAMES, product, without_effect)
        table[layer] = dataclasses.replace(table[layer], **{product: method})
    if without_effect:
        warnings.warn(
            f"te_dist: overlap_config: {sorted(without_effect)} have no effect, because copies do not run on a GPU's "
            f"multiprocessors here",
            stacklevel=3,
        )
    return table


def _method(key: str, value: Any, is_row: bool, product: str, without_effect: set[str]) -> Method:
    options: dict[str, Any] = {"method": value} if isinstance(value, str) else dict(value or {})
    unknown = set(options) - _OPTIONS
    if unknown:
        raise ValueError(f"overlap_config[{key!r}] expects options of {sorted(_OPTIONS)} but got {sorted(unknown)}")
    without_effect |= {name for name in _WITHOUT_EFFECT & set(options) if options[name]}
    default = DEFAULTS["row" if is_row else "column"].of(product)
    name = options.get("method", default.name)
    name = BULK if name == "external" else name
    allowed = ALLOWED[is_row, product]
    if name not in allowed:
        kind = "row" if is_row else "column"
        raise ValueError(
            f"overlap_config[{key!r}] expects a method of {allowed} for {product} of a {kind}-parallel layer but got "
            f"{name!r}"
        )
    splits = options.get("num_splits", SPLITS)
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1:
        raise ValueError(f"overlap_config[{key!r}] expects num_splits of at least 1 but got {splits!r}")
    aggregate = options.get("aggregate", False)
    if aggregate not in (True, False, 0, 1):
        raise ValueError(f"overlap_config[{key!r}] expects aggregate true or false but got {aggregate!r}")
    return Method(name, splits, bool(aggregate))


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"overlap_config: reading {path} needs pyyaml; a dictionary does not") from error
    if not path.is_file():
        raise FileNotFoundError(f"overlap_config: there is no file {path}")
    return yaml.safe_load(path.read_text()) or {}


# What layers are called in widespread models, by the last part of their name.
_KNOWN = {
    "qkv": "qkv layernorm_qkv linear_qkv qkv_proj query_key_value c_attn wqkv q k v q_proj k_proj v_proj wq wk wv",
    "proj": "proj linear_proj o_proj out_proj wo o dense",
    "fc1": "fc1 linear_fc1 gate_proj up_proj gate_up_proj w1 w3 gate up dense_h_to_4h c_fc",
    "fc2": "fc2 linear_fc2 down_proj w2 down dense_4h_to_h",
}
_NAME_OF = {word: name for name, words in _KNOWN.items() for word in words.split()}


def table_name(layer: str, stage: str, is_row: bool) -> str:
    """Under which name a layer is looked up: by its GEMM's name or its own last one, else "column" or "row"."""
    kind = ROW_NAMES if is_row else COLUMN_NAMES
    for word in (stage, layer.rpartition(".")[2]):
        name = _NAME_OF.get(word)
        if name in kind:
            return str(name)
    return kind[-1]
