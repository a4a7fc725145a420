"""Fixtures: the device axis, and pools of ranks that stay alive for all tests of a file."""

from __future__ import annotations

import gc
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

try:
    import hypothesis
except ImportError:  # GPU machines may lack it; the tests that need it skip themselves
    pass
else:
    hypothesis.settings.register_profile("te_dist", deadline=None, max_examples=40, derandomize=True)
    hypothesis.settings.load_profile("te_dist")


# A shell that starts pytest in the background makes it ignore Ctrl-C, and with it all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take long begin first, so that no worker is left alone with one of them at the end (with xdist's
# --no-loadscope-reorder, which keeps this order). While there are both, one that starts processes, which wait for each
# other now and then, beside one that does not.
LONG = (
    "test_train_processes.py", "test_modules_compile.py", "test_launch.py", "test_ops_compile.py",
    "test_fsdp_training.py", "test_modules_training.py", "test_parallel_training.py", "test_grouped_linear.py",
    "test_tensor_parallel.py", "test_cpu_variants.py", "test_train_parallel.py", "test_train.py",
    "test_parallel_faults.py", "test_overlap.py", "test_accelerate.py", "test_examples.py", "test_fsdp_checkpoint.py",
    "test_parallel_compile.py", "test_fsdp_gather.py", "test_fsdp_memory.py", "test_fsdp_ops.py",
    "test_ops_parallel.py", "test_docs.py",
)  # fmt: skip

STOP_AT = time.monotonic() + float(os.environ.get("TE_DIST_TEST_SECONDS", "inf"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # two workers would collect different names; one process alone would never notice
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: a test's name must not hold an address")
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))
    if "TE_DIST_TEST_SEEN" in os.environ:  # a file of names of tests to leave out
        seen = set(Path(os.environ["TE_DIST_TEST_SEEN"]).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in seen])
        items[:] = [item for item in items if item.nodeid not in seen]
    share = os.environ.get("TE_DIST_TEST_SHARE")  # "2/8": every eighth, from the third on
    if share:
        first, step = map(int, share.split("/"))
        # Mixed, always in the same way: a share that runs out of time has seen something of every file.
        mine = sorted(items[first::step], key=lambda item: zlib.crc32(item.nodeid.encode()))
        config.hook.pytest_deselected(items=list(set(items).difference(mine)))
        items[:] = mine
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: garbage collections, of which the compiler makes many, need not look
    through it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    if time.monotonic() > STOP_AT:
        pytest.skip("TE_DIST_TEST_SECONDS have passed")


@pytest.fixture(scope="module")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """pools(2).run(fn, *args) runs fn(rank, world, *args) on two gloo ranks; fn must be importable.

    Another file has new ones, which are forked in no time: every group that a test makes leaves threads of gloo's in
    its ranks that wake up a hundred times a second. Those of two hundred groups take each rank a tenth of a core, while
    other tests run."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            folder = tmp_path_factory.mktemp(f"ranks{world}")
            pools[world] = RankPool(world, Path(folder))
        return pools[world]

    yield pool
    for existing in pools.values():
        existing.close()


@pytest.fixture
def two_ranks(rank_pools: Callable[[int], RankPool]) -> Callable[..., list[Any]]:
    return lambda fn, *args, **kwargs: rank_pools(2).run(fn, *args, **kwargs)
