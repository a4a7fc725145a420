"""Data of te-dist train: sources, tokenizers, and an order that depends on nothing but seed, step and rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.corpus import builtin_corpus
from te_dist.launch.data import Batches, TokenData, check_vocabulary, load_data, shuffled
from te_dist.launch.runtime import World
from te_dist.launch.tokenizers import ByteTokenizer, padded_vocab, tokenizer_from


def load(path: Path | str, tmp_path: Path, **options: object) -> tuple[TokenData, TokenData | None]:
    config = TrainConfig(data=str(path), seq_len=8, **options)  # type: ignore[arg-type]
    return load_data(config, tokenizer_from(config.tokenizer), tmp_path / "cache", World(0, 1, 0, torch.device("cpu")))


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_shuffled_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(i, count, seed) for i in range(count)) == list(range(count))


def test_shuffled_depends_on_the_seed_and_mixes() -> None:
    orders = [[shuffled(i, 1000, seed) for i in range(1000)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    neighbours = sum(abs(a - b) == 1 for a, b in zip(orders[0], orders[0][1:], strict=False))
    assert neighbours < 20  # about 2 by chance


def test_the_builtin_corpus_is_always_the_same() -> None:
    text = builtin_corpus(10_000)
    assert text == builtin_corpus.__wrapped__(10_000) and len(text) >= 10_000
    for line in text.decode().splitlines():  # what it says is true
        if " + " in line:
            left, right = line.rstrip(".").split(" = ")
            assert sum(map(int, left.split(" + "))) == int(right)


def test_text_and_folder(tmp_path: Path) -> None:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("héllo world, " * 20)
    (tmp_path / "texts" / "deep" / "b.md").write_text("second " * 20)
    (tmp_path / "texts" / "skipped.png").write_bytes(b"\0\1")
    train, held_out = load(tmp_path / "texts" / "a.txt", tmp_path)
    assert held_out is not None
    whole = torch.cat([train.tokens, held_out.tokens]).tolist()
    assert ByteTokenizer().decode(whole) == "héllo world, " * 20
    train, held_out = load(tmp_path / "texts", tmp_path, eval_batches=0)
    assert held_out is None and train.tokens.tolist().count(256) == 2  # a separator ends each file


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_token_files_are_mapped(tmp_path: Path, suffix: str) -> None:
    np = pytest.importorskip("numpy")
    tokens = np.arange(1000, dtype=np.uint16)
    path = tmp_path / f"tokens{suffix}"
    tokens.tofile(path) if suffix == ".bin" else np.save(path, tokens)
    path.chmod(0o444)
    train, _ = load(path, tmp_path, eval_batches=0)
    assert train.tokens.dtype == torch.uint16 and train.sequences == 124
    assert train.sequence(3).tolist() == list(range(24, 33))
    assert train.sequence(3).dtype == torch.int64
    with pytest.raises(ConfigError, match="holds token 999, but the model's vocabulary has 320"):
        check_vocabulary(train, 320)
    check_vocabulary(train, 1000)


def test_unreadable_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("tiny")
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "none.bin").touch()
    (tmp_path / "bad.npy").write_bytes(b"not numpy at all")
    (tmp_path / "binary.dat").write_bytes(b"\0" * 100)
    (tmp_path / "folder").mkdir()
    for name, message in {
        "empty.txt": "is empty",
        "short.txt": "too few",
        "odd.bin": "no whole number of uint16",
        "none.bin": "is empty",
        "bad.npy": "is not a .npy file",
        "binary.dat": "is not text",
        "folder": "holds no text files",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / name, tmp_path)


def test_a_truncated_npy_is_refused(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    path = tmp_path / "cut.npy"
    np.save(path, np.arange(1000, dtype=np.int32))
    os.truncate(path, 500)
    with pytest.raises(ConfigError, match="cut short"):
        load(path, tmp_path)
    np.save(path, np.zeros((4, 4), dtype=np.float32))
    with pytest.raises(ConfigError, match="one-dimensional array"):
        load(path, tmp_path)


def test_ranks_read_disjoint_parts_of_what_one_process_reads() -> None:
    data = TokenData(torch.arange(1000, dtype=torch.int32), 8, "numbers")

    def batches(dp_rank: int, dp_size: int, microbatches: int) -> Batches:
        return Batches(data, data, 2, microbatches, 5, dp_rank, dp_size)

    for step in (1, 2, 40):
        alone = torch.cat(batches(0, 1, 4).step(step))
        both = torch.cat([torch.cat(batches(rank, 2, 2).step(step)) for rank in range(2)])
        assert torch.equal(alone, both)  # the same global batch, however it is split
    epoch = torch.cat([batches(0, 1, 1).step(step)[0] for step in range(1, 63)])
    assert len({int(row[0]) for row in epoch}) == 124  # every sequence once
    evaluations = [torch.cat(list(batches(rank, 2, 1).evaluation(3))) for rank in range(2)]
    assert not set(evaluations[0][:, 0].tolist()) & set(evaluations[1][:, 0].tolist())


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["<unk>", "</s>", "one", "two", "three"])}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("one two three " * 10)
    tokenizer = tokenizer_from(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.end, padded_vocab(tokenizer.vocab_size)) == (5, 1, 64)
    train, _ = load(tmp_path / "a.txt", tmp_path, tokenizer=str(tmp_path / "tokenizer.json"), eval_batches=0)
    assert train.tokens.tolist() == [2, 3, 4] * 10 + [1]
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        tokenizer_from(str(tmp_path / "bad.json"))
