"""Data: where tokens come from, and which of them a step sees.

A batch depends on the seed, the step and the data-parallel rank alone, so a run resumes exactly, and reads the same
sequences whatever the number of ranks is.
"""

from __future__ import annotations

import array
import ast
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.corpus import builtin_corpus
from te_dist.launch.runtime import World
from te_dist.launch.tokenizers import ByteTokenizer, Tokenizer

TOKEN_FILES = (".bin", ".npy")
TEXT_FILES = (".txt", ".md", ".py", ".rst", ".text", ".jsonl", ".json", ".csv", ".html", ".c", ".cpp", ".h")
TORCH_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32, "int64": torch.int64}
NPY_DTYPES = {"|u1": "uint8", "<u2": "uint16", "<i4": "int32", "<i8": "int64"}


def shuffled(index: int, count: int, seed: int) -> int:
    """Where a permutation of range(count), drawn by the seed, sends `index`: a Feistel network, walked until it lands
    inside. Needs no memory, however large the data is."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for turn in range(4):
            mixed = (right * 0x9E3779B1 + (seed * 4 + turn + 1) * 0x85EBCA6B) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ (mixed >> 32)) & mask)
        value = (left << half) | right
        if value < count:
            return value


@dataclasses.dataclass(frozen=True)
class TokenData:
    """Tokens in a row, cut into sequences of seq_len + 1 that share their ends."""

    tokens: Tensor  # [n], any integer dtype, perhaps memory-mapped
    seq_len: int
    name: str

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ConfigError(
                f"{self.name} holds {len(self.tokens)} tokens, fewer than one sequence of seq_len + 1 = "
                f"{self.seq_len + 1}"
            )

    @property
    def sequences(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def sequence(self, index: int) -> Tensor:
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].to(torch.int64)

    def batch(self, first: int, count: int, seed: int | None) -> Tensor:
        """Sequences number first .. first + count of an endless shuffled reading, [count, seq_len + 1]."""
        rows = []
        for number in range(first, first + count):
            epoch, index = divmod(number, self.sequences)
            where = index if seed is None else shuffled(index, self.sequences, seed * 1_000_003 + epoch)
            rows.append(self.sequence(where))
        return torch.stack(rows)


@dataclasses.dataclass(frozen=True)
class Batches:
    """Which sequences each data-parallel rank reads at each step."""

    train: TokenData
    held_out: TokenData | None
    micro_batch: int
    microbatches: int
    seed: int
    dp_rank: int
    dp_size: int

    def step(self, step: int) -> list[Tensor]:
        """The microbatches of a step (from 1 on) of this rank."""
        per_step = self.micro_batch * self.microbatches * self.dp_size
        mine = (step - 1) * per_step + self.dp_rank * self.micro_batch * self.microbatches
        return [
            self.train.batch(mine + i * self.micro_batch, self.micro_batch, self.seed) for i in range(self.microbatches)
        ]

    def evaluation(self, count: int) -> Iterator[Tensor]:
        """The first sequences of the held-out data, always the same."""
        assert self.held_out is not None
        for index in range(count):
            first = (index * self.dp_size + self.dp_rank) * self.micro_batch
            yield self.held_out.batch(first, self.micro_batch, None)


# ------------------------------------------------------------------------------------------------- sources
def load_data(
    config: TrainConfig, tokenizer: Tokenizer, cache: Path, world: World
) -> tuple[TokenData, TokenData | None]:
    """(training data, held-out data). What a tokenizer makes of text is kept under `cache`, written by rank 0."""
    tokens = _tokens(config.data, config, tokenizer, cache, world)
    name = f"data {config.data!r}"
    if config.eval_batches == 0:
        return TokenData(tokens, config.seq_len, name), None
    if config.eval_data is not None:
        held_out = _tokens(config.eval_data, config, tokenizer, cache, world)
        return (
            TokenData(tokens, config.seq_len, name),
            TokenData(held_out, config.seq_len, f"eval_data {config.eval_data!r}"),
        )
    cut = len(tokens) - max(int(len(tokens) * config.eval_fraction), config.seq_len + 1)
    if config.eval_fraction == 0 or cut <= config.seq_len:
        if config.eval_fraction == 0:
            return TokenData(tokens, config.seq_len, name), None
        raise ConfigError(
            f"{name} holds {len(tokens)} tokens, too few for sequences of seq_len {config.seq_len} to train on and to "
            f"hold out; make seq_len smaller or set eval_fraction to 0"
        )
    return (
        TokenData(tokens[:cut], config.seq_len, name),
        TokenData(tokens[cut:], config.seq_len, f"the held-out part of {name}"),
    )


def check_vocabulary(data: TokenData, vocab_size: int) -> None:
    """A token that the embedding does not have would end training in a device assert."""
    tokens = data.tokens
    step = max(1, len(tokens) // (1 << 22))  # a sample of a very large file, all of others
    sample = tokens[::step].to(torch.int64)
    low, high = int(sample.min()), int(sample.max())
    if low < 0 or high >= vocab_size:
        bad = high if high >= vocab_size else low
        raise ConfigError(
            f"{data.name} holds token {bad}, but the model's vocabulary has {vocab_size}; set vocab_size, or the "
            f"tokenizer or token_dtype of this file"
        )


def _tokens(path: str, config: TrainConfig, tokenizer: Tokenizer, cache: Path, world: World) -> Tensor:
    if path != "builtin" and Path(path).suffix in TOKEN_FILES:
        return world.attempt(lambda: _token_file(Path(path), config.token_dtype))
    texts = world.attempt(lambda: [builtin_corpus()] if path == "builtin" else _read_texts(path))
    if isinstance(tokenizer, ByteTokenizer):
        return _as_bytes(texts, tokenizer.end)
    return _encoded(texts, tokenizer, cache, world)


def _read_texts(path: str) -> list[bytes]:
    source = Path(path)
    files = [source]
    if source.is_dir():
        files = sorted(p for p in source.rglob("*") if p.suffix in TEXT_FILES and p.is_file())
    if not files:
        raise ConfigError(f"data {path!r} holds no text files ({', '.join(TEXT_FILES)})")
    texts = []
    for file in files:
        try:
            texts.append(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"data: {str(file)!r} cannot be read: {error.strerror}") from None
    if not any(texts):
        raise ConfigError(f"data {path!r} is empty")
    if b"\0" in texts[0][:4096]:
        raise ConfigError(f"data {str(files[0])!r} is not text; token files are called .bin or .npy")
    return texts


def _token_file(path: Path, dtype_name: str) -> Tensor:
    """Mapped, not read: the system loads the pages that are used."""
    try:
        size = path.stat().st_size
        offset = 0
        if path.suffix == ".npy":
            offset, dtype_name, count = _npy_header(path)
        dtype = TORCH_DTYPES[dtype_name]
        if path.suffix == ".bin":
            count, left = divmod(size, dtype.itemsize)
            if left:
                raise ConfigError(f"data {str(path)!r} has {size} bytes, which is no whole number of {dtype_name}")
        if size < offset + count * dtype.itemsize:
            raise ConfigError(f"data {str(path)!r} is cut short: {size} bytes for {count} tokens of {dtype_name}")
        if count == 0:
            raise ConfigError(f"data {str(path)!r} is empty")
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return mapped[offset : offset + count * dtype.itemsize].view(dtype)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"data {str(path)!r} cannot be read: {error}") from None


def _npy_header(path: Path) -> tuple[int, str, int]:
    """(offset of the data, dtype, number of tokens) of NumPy's file format."""
    with path.open("rb") as file:
        start = file.read(12)
        if start[:6] != b"\x93NUMPY":
            raise ConfigError(f"data {str(path)!r} is not a .npy file")
        wide = start[6] >= 2
        length = int.from_bytes(start[8:12] if wide else start[8:10], "little")
        offset = (12 if wide else 10) + length
        file.seek(offset - length)
        try:
            header = ast.literal_eval(file.read(length).decode("latin1"))
            dtype = NPY_DTYPES.get(header["descr"])
            shape = header["shape"]
        except (ValueError, SyntaxError, KeyError, TypeError):
            raise ConfigError(f"data {str(path)!r} has a damaged .npy header") from None
    if dtype is None or len(shape) != 1:
        raise ConfigError(
            f"data {str(path)!r} expects a one-dimensional array of {', '.join(NPY_DTYPES.values())} but holds "
            f"{header['descr']} {shape}"
        )
    return offset, dtype, shape[0]


def _as_bytes(texts: list[bytes], end: int) -> Tensor:
    if len(texts) == 1:
        return torch.frombuffer(bytearray(texts[0]), dtype=torch.uint8)
    separator = torch.tensor([end], dtype=torch.int32)
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int32) for text in texts if text]
    return torch.cat([piece for part in parts for piece in (part, separator)])


def _encoded(texts: list[bytes], tokenizer: Tokenizer, cache: Path, world: World) -> Tensor:
    digest = hashlib.blake2b(tokenizer.name.encode(), digest_size=8)
    for text in texts:
        digest.update(text)
    file = cache / f"tokens-{digest.hexdigest()}.bin"

    def write() -> None:
        if file.exists() or not world.is_first:
            return
        tokens = array.array("i")
        for text in texts:
            tokens.extend([*tokenizer.encode(text.decode(errors="replace")), tokenizer.end])
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as out:
            tokens.tofile(out)
        partial.rename(file)

    def read() -> Tensor:
        if not file.exists():
            raise ConfigError(f"{str(file)!r}, which rank 0 writes, is not visible here: run_dir must be shared")
        return _token_file(file, "int32")

    world.attempt(write)
    return world.attempt(read)
