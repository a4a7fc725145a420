"""Ctrl-C and SIGTERM: asked for once, training saves and ends; asked for twice, it ends at once."""

from __future__ import annotations

import signal
import types
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, notes the first signal in ``number`` instead of dying of it; the second one acts as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us handles signals
                return self
        return self

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.number = number
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *exc: object) -> None:
        self.restore()


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
