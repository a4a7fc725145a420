"""A small corpus that every machine generates alike: sums, sorted lists and sentences, with something to learn."""

from __future__ import annotations

import functools
import random

PEOPLE = [
    "Ada",
    "Bao",
    "Chidi",
    "Dora",
    "Emil",
    "Fatima",
    "Goro",
    "Hana",
    "Ines",
    "Jomo",
    "Kaya",
    "Lena",
    "Milo",
    "Nuru",
    "Otto",
    "Pia",
]
THINGS = [
    "apples",
    "books",
    "coins",
    "drums",
    "eggs",
    "figs",
    "gears",
    "hats",
    "keys",
    "lamps",
    "maps",
    "nails",
    "pens",
    "ropes",
    "seeds",
    "tiles",
]
PLACES = ["the barn", "the market", "the river", "the school", "the station", "the tower", "the valley", "the workshop"]
VERBS = ["counted", "found", "bought", "lost", "painted", "carried", "sold", "hid"]


def _sum(r: random.Random) -> str:
    a, b = r.randrange(100), r.randrange(100)
    return f"{a} + {b} = {a + b}."


def _sorted(r: random.Random) -> str:
    numbers = [r.randrange(100) for _ in range(r.randrange(3, 7))]
    return f"sort {' '.join(map(str, numbers))} -> {' '.join(map(str, sorted(numbers)))}."


def _story(r: random.Random) -> str:
    who, other = r.sample(PEOPLE, 2)
    what, where, many = r.choice(THINGS), r.choice(PLACES), r.randrange(3, 60)
    given = r.randrange(1, many)
    return (
        f"{who} {r.choice(VERBS)} {many} {what} at {where}. {who} gave {given} {what} to {other}. "
        f"Now {who} has {many - given} {what} and {other} has {given}."
    )


def _count(r: random.Random) -> str:
    start, step = r.randrange(50), r.randrange(1, 9)
    return "count by " + f"{step}: " + ", ".join(str(start + step * i) for i in range(8)) + "."


@functools.lru_cache(maxsize=2)
def builtin_corpus(size: int = 1 << 20, seed: int = 0) -> bytes:
    """At least `size` bytes of text."""
    r = random.Random(seed)
    kinds = (_sum, _sorted, _story, _story, _count)
    parts: list[str] = []
    length = 0
    while length < size:
        line = r.choice(kinds)(r)
        parts.append(line)
        length += len(line) + 1
    return ("\n".join(parts) + "\n").encode()
