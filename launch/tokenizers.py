"""Tokenizers: bytes, built in, and those of the `tokenizers` and `transformers` packages."""

from __future__ import annotations

import os
from typing import Any, Protocol

from te_dist.launch.config import ConfigError

VOCAB_MULTIPLE = 64


class Tokenizer(Protocol):
    name: str
    vocab_size: int
    end: int  # what separates documents

    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """A token per byte of UTF-8, and one that ends a document.

    Example:
        >>> from te_dist.launch.tokenizers import ByteTokenizer
        >>> ByteTokenizer().encode("hi"), ByteTokenizer().decode([104, 105])
        ([104, 105], 'hi')
    """

    name = "bytes"
    vocab_size = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` package, or a folder, read by `transformers`."""

    def __init__(self, path: str) -> None:
        self.name = path
        if os.path.isdir(path):
            self._read_folder(path)
        else:
            self._read_json(path)

    def _read_json(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError:
            raise ConfigError(f"tokenizer {path!r} needs: pip install tokenizers") from None
        try:
            rust: Any = Rust.from_file(path)
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(f"tokenizer {path!r} cannot be read: {error}") from None
        ends = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
        known = [rust.token_to_id(token) for token in ends if rust.token_to_id(token) is not None]
        self.vocab_size = rust.get_vocab_size()
        self.end = known[0] if known else 0
        self.encode = lambda text: rust.encode(text, add_special_tokens=False).ids

    def _read_folder(self, path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError(f"tokenizer {path!r} is a folder, which needs: pip install transformers") from None
        try:
            made: Any = AutoTokenizer.from_pretrained(path)
        except Exception as error:
            raise ConfigError(f"tokenizer {path!r} cannot be read by transformers: {error}") from None
        self.vocab_size = len(made)
        self.end = made.eos_token_id if made.eos_token_id is not None else 0
        self.encode = lambda text: made.encode(text, add_special_tokens=False)

    encode: Any


def tokenizer_from(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def padded_vocab(tokens: int) -> int:
    """Rounded up, so that the head's product has a friendly shape."""
    return -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
