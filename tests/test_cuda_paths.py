"""What a GPU's gradients pass through, without a GPU: the enqueuing lane and the staging transport on
real ranks with CPU tensors, and the arithmetic on tensors that only say that they are on a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

import gradcomm
from gradcomm.clip import Clip
from gradcomm.codec import parse
from gradcomm.codec.base import RecordCodec
from gradcomm.kernels import prepare
from gradcomm.memory import Memory
from gradcomm.ops import OneBitFormat, QuantizeFormat, native, nvrtc
from gradcomm.part import Part, Slice
from gradcomm.runner import Runner
from gradcomm.stats import Meter, Traffic
from gradcomm.transport import GroupTransport, Staged
from gradcomm.transport.group import own_group
from gradcomm.transport.hosts import HostsTransport

from .models import CODECS, small_model, train, train_registered
from .ranks import RankError, Ranks

CPU = torch.device("cpu")


class CopiesAtOnce:
    """``gradcomm.transport.staging.Copies`` of tensors that the transport could read as they lie."""

    def needed(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_sparse

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def begin(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def mark(self) -> Callable[[], None]:
        return lambda: None


def _transport(kind: str) -> Any:
    world = dist.group.WORLD
    assert world is not None
    gloo = GroupTransport(own_group(world, CPU), CPU)
    if kind == "staged":
        return Staged(gloo, CPU, 1000, CopiesAtOnce())  # so that every bucket goes in pieces
    gloo.enqueues = True  # as NCCL does
    return gloo


def _same_as_gloo(rank: int, ranks: int, kind: str) -> None:
    for codec in CODECS if kind == "enqueued" else ("none", "fp16", "onebit", "powersgd:rank=2"):
        options = {"warmup_steps": 2, "clip_norm": "auto", "measure_every": 3}
        usual = train_registered(rank, ranks, codec, options)
        threads = threading.active_count()
        transport = _transport(kind)
        ddp = DDP(small_model(), bucket_cap_mb=0.03)
        state = gradcomm.register(ddp, codec, min_numel=100, transport=transport, **options)
        assert threading.active_count() == threads + (kind == "staged")
        found = train(ddp, rank)
        stats = state.stats()
        state.close()
        transport.close()
        assert found == usual[:2], codec
        assert stats["compression_error"] == usual[2]["compression_error"]
        assert abs(stats["bytes_sent"] - usual[2]["bytes_sent"]) <= stats["calls"]
        assert stats["calls"] > usual[2]["calls"] or kind != "staged"


@pytest.mark.parametrize("kind", ["enqueued", "staged"])
def test_same_bits_as_over_gloo(ranks: Ranks, kind: str) -> None:
    ranks.run(_same_as_gloo, 2, kind, timeout=120)


def _agree_among_three(rank: int, ranks: int) -> list[str]:
    hashes = []
    for kind in ("enqueued", "staged"):
        for codec in ("none", "onebit"):
            transport = _transport(kind)
            ddp = DDP(small_model(), bucket_cap_mb=0.03)
            gradcomm.register(ddp, codec, min_numel=100, warmup_steps=2, transport=transport)
            hashes.append(train(ddp, rank)[0])
            transport.close()
    return hashes


def test_three_ranks_end_with_the_same_bits(ranks: Ranks) -> None:
    results = ranks.run(_agree_among_three, 3)
    assert results[0] == results[1] == results[2]


def _error_when_enqueuing(rank: int, ranks: int) -> str:
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(ddp, "onebit", warmup_steps=0, transport=_transport("enqueued"))

    def broken(*args: Any) -> None:
        raise ArithmeticError("a fault put in by the test")

    state._memory.flat = broken  # type: ignore[method-assign]
    try:
        train(ddp, rank, steps=1)
    except gradcomm.LaneError as error:
        return str(error)
    finally:
        state.close()
    return ""


def test_error_when_enqueuing_reaches_backward(ranks: Ranks) -> None:
    for message in ranks.run(_error_when_enqueuing, 2):
        assert "step 0, bucket 0" in message
        assert "encode of onebit by gather: ArithmeticError: a fault put in by the test" in message


def _dropped(rank: int, ranks: int) -> list[str]:
    before = set(threading.enumerate())
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state: Any = gradcomm.register(ddp, "onebit", warmup_steps=1)
    train(ddp, rank, steps=3)
    started = set(threading.enumerate()) - before
    assert started
    del ddp, state
    gc.collect()
    for thread in started:
        thread.join(10)
    return [thread.name for thread in started if thread.is_alive()]


def test_a_state_that_is_dropped_leaves_no_thread(ranks: Ranks) -> None:
    assert ranks.run(_dropped, 2) == [[], []]


_EXITS = """
import torch, torch.distributed as dist, gradcomm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
state = gradcomm.register(ddp, "onebit", warmup_steps=0)
ddp(torch.ones(2, 64)).sum().backward()
print("trained")
"""


def test_an_interpreter_that_ends_without_close_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", _EXITS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "trained"), done.stderr


# ---- on a GPU that is not there ------------------------------------------------------------------


def _mixed(rank: int, ranks: int) -> None:
    ddp = DDP(small_model())
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    ddp.module.elsewhere = weight
    gradcomm.register(ddp, "onebit")


def test_a_model_on_two_devices_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="'elsewhere' on meta; a model that is exchanged must be"):
        ranks.run(_mixed, 2)


def test_kernels_are_compiled_when_the_hook_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    device, compiled = torch.device("cuda", 1), []
    monkeypatch.setattr(native, "cuda_missing", "not built")
    monkeypatch.setattr(nvrtc, "fault", lambda: None)
    monkeypatch.setattr(nvrtc, "prepare", lambda format, device: compiled.append((format, device)))
    prepare([parse("onebit"), parse("none"), parse("powersgd"), parse("int4")], device)
    expected = [OneBitFormat(512), "orthogonalize", QuantizeFormat(512, 4)]
    assert compiled == [(what, device) for what in expected]
    monkeypatch.setattr(native, "cuda_missing", None)
    monkeypatch.setattr(torch.ops.gradcomm, "cuda_has_kernels", lambda ints: True, raising=False)
    prepare([parse("onebit")], device)
    prepare([parse("onebit")], CPU)
    assert len(compiled) == 3


def test_without_kernels_it_says_once_that_it_will_be_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "cuda_missing", "the library was not built")
    monkeypatch.setattr(nvrtc, "fault", lambda: "CuPy is not installed")
    for _ in range(2):
        prepare([parse("onebit:block=256"), parse("none")], torch.device("cuda", 0))
    monkeypatch.setattr(native, "cuda_missing", None)
    monkeypatch.setattr(torch.ops.gradcomm, "cuda_has_kernels", lambda ints: False, raising=False)
    prepare([parse("topk:rows=4000,k=1")], torch.device("cuda", 0))
    said = [r.getMessage() for r in caplog.records if "PyTorch reference" in r.getMessage()]
    assert len(said) == 2
    assert "onebit:block=256" in said[0] and "not built" in said[0] and "CuPy is not" in said[0]
    assert "rows=4000" in said[1] and "no CUDA kernels for these options" in said[1]


class Unguarded(TorchFunctionMode):
    """Some methods by other means: torch's own ask for a guard of the device, which a CPU torch has
    not."""

    ALIKE = MappingProxyType(
        {
            torch.Tensor.copy_: torch.ops.aten.copy_.default,
            torch.Tensor.__invert__: torch.ops.aten.bitwise_not.default,
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return self._item(*args)
        if func is torch.Tensor.__setitem__:
            return torch.ops.aten.copy_.default(self._item(*args[:2]), args[2])
        func = self.ALIKE.get(func, func)
        return func(*args, **(kwargs or {}))

    def _item(self, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        dim = 0
        for i in index if isinstance(index, tuple) else (index,):
            if isinstance(i, slice):
                begin, end, _ = i.indices(tensor.size(dim))
                tensor = tensor.narrow(dim, begin, max(0, end - begin))
                dim += 1
            else:
                tensor = tensor.select(dim, i)
        return tensor


class Alone:
    """A transport whose peers send what was there already."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.size, self.traffic = 1, ranks, Traffic()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.is_cuda

    def all_gather(self, rows: torch.Tensor) -> None:
        assert rows.is_cuda and rows.size(0) == self.size and rows.is_contiguous()

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        assert out.is_cuda and rows.is_cuda and out.is_contiguous() and rows.is_contiguous()

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item] * self.size

    def split(self, members: list[list[int]]) -> Alone:
        return Alone(len(members[0]))

    def close(self) -> None:
        pass


ALL_CODECS = [
    *CODECS,
    "fp16:",
    "topk:select='exact'",
    "topk:select='threshold'",
    "powersgd:warm_start=False",
    "int4:rounding='stochastic'",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ALL_CODECS)
def test_nothing_asks_a_gpu_for_a_value_or_strays_to_the_cpu(text: str, dtype: torch.dtype) -> None:
    """A fake tensor has a device and a shape, and no values: who asks for one, or mixes devices, fails.
    What the operators do inside, which are fakes too, is shown elsewhere."""
    codec = parse(text)
    shapes = [torch.Size(s) for s in ((64, 48), (64, 48), (48, 32), (64,))]
    slices, offset = [], 0
    for key, shape in enumerate(shapes):
        stride = torch.empty(shape, device="meta").stride()
        slices.append(Slice(key, offset, shape.numel(), shape, stride, True))
        offset += shape.numel()
    for exchange in codec.exchanges:
        ranks, device = 4, torch.device("cuda", 0)
        transport: Any = Alone(ranks)
        compressed = Part(codec, exchange, slices[:3], whole=False)
        rest = Part(parse("none"), "reduce", slices[3:], whole=False)
        if exchange == "hierarchy":
            transport = HostsTransport(transport, [[0, 1], [2, 3]])
            compressed.pieces(2, compressed.chunk_blocks(ranks) * 2)  # kept: their tables are no fakes
        runner = Runner(
            transport=transport,
            memory=Memory(ranks, device),
            clip=Clip("auto"),
            since=0,
            error_feedback=True,
            momentum=0.9,
            nesterov=True,
            seed=0,
            measure_every=1,
            verify=False,
            find_unused=False,
            meter=Meter(),
        )
        with FakeTensorMode(allow_non_fake_inputs=True), Unguarded():
            for step in range(3):
                bucket = torch.empty(offset, dtype=dtype, device=device)
                runner.run([compressed, rest], (0, 1, 2, 3), bucket, step)
            held = list(runner.memory._flat.values())
            held += [owned.residual for owned in runner.memory._owned.values()]
            assert len(held) >= 1 and all(tensor.is_cuda for tensor in held)
            if isinstance(codec, RecordCodec) and exchange == "shard":
                assert runner.memory._owned
            runner.memory.drop(compressed)
