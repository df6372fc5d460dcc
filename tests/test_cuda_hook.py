"""On a GPU: DDP with every codec over NCCL and Gloo (``bench/gpu_train.py``)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench import gpu_train, ranks

_no_gpu = None if torch.cuda.is_available() else "no CUDA device"
pytestmark = pytest.mark.skipif(_no_gpu is not None, reason=str(_no_gpu))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_over_nccl_the_host_never_waits_and_memory_is_residual_and_payload() -> None:
    rows, wrong = gpu_train.train_over("nccl", 1, gpu_train.CODECS, 10)
    assert not wrong
    assert list(rows) == [gpu_train.PLAIN, *gpu_train.CODECS]
    for codec in gpu_train.CODECS:
        stats = rows[codec][0]["stats"]
        assert stats["encode_ms"] > 0 and stats["decode_ms"] > 0  # measured by events


def test_over_gloo_two_ranks_of_one_gpu_end_with_the_same_bits() -> None:
    rows, wrong = gpu_train.train_over("gloo", 2, gpu_train.CODECS, 10)
    assert not wrong
    assert all(len(results) == 2 for results in rows.values())


def test_means_are_those_of_the_cpu_bit_for_bit() -> None:
    told = list(ranks.run(gpu_train.same_as_cpu, 2, gpu_train.RECORDS, 4))
    assert len(told) >= 2 * len(gpu_train.RECORDS)
    assert all(equal for _, _, _, _, equal in told), [t for t in told if not t[4]]
