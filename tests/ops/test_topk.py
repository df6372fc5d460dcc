"""The two top-k formats: native kernels and reference agree in every byte, and both keep the largest."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradcomm import ops
from gradcomm.ops import native, reference
from gradcomm.ops.format import EXACT, FLOAT16, FLOAT32, INT8, THRESHOLD, Format
from gradcomm.ops.format import TopKBlockFormat, TopKSparseFormat
from gradcomm.ops.layout import Layout

VALUES = (FLOAT32, FLOAT16, INT8)
UNUSED = 0xFFFFFFFF
SPECIALS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -3e-45, 3e38, -3.4028234663852886e38,
            65520.0, 1e5, 1e-31, 1e-8)

needs_native = pytest.mark.skipif(native.missing is not None, reason=f"no native kernels: {native.missing}")
executors = pytest.mark.parametrize("executor", [pytest.param(ops, marks=needs_native), reference],
                                    ids=["native", "reference"])
few = settings(derandomize=True, deadline=None, max_examples=60)


@st.composite
def block_formats(draw: st.DrawFn) -> TopKBlockFormat:
    rows = draw(st.sampled_from([1, 2, 7, 100, 256, 257, 300]))
    k = draw(st.one_of(st.just(1), st.integers(1, min(rows, 5)), st.just(min(rows, 20))))
    return TopKBlockFormat(16 * rows, rows, k, draw(st.sampled_from(VALUES)))


@st.composite
def sparse_formats(draw: st.DrawFn) -> TopKSparseFormat:
    block = draw(st.sampled_from([16, 48, 128, 512]))
    span = draw(st.integers(1, 24))
    k = draw(st.one_of(st.integers(1, min(block * span, 40)), st.integers(1, block * span)))
    return TopKSparseFormat(block, span, k, draw(st.sampled_from(VALUES)),
                            draw(st.sampled_from([EXACT, THRESHOLD])))


@dataclasses.dataclass
class Case:
    format: Format
    layout: Layout
    numel: int  # of the bucket
    chunks: int
    dtype: torch.dtype
    kind: str
    feedback: bool
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def bucket(self, generator: torch.Generator) -> Tensor:
        g = torch.randn(self.numel, generator=generator)
        if self.kind == "zeros":
            g.zero_()
        elif self.kind == "equal":
            g = g.sign() * 0.25
        elif self.kind == "few":
            g *= torch.rand(self.numel, generator=generator) < 0.02
        elif self.kind == "wide":
            g *= 10.0 ** torch.randint(-44, 38, (self.numel,), generator=generator)
        elif self.kind == "specials":
            for x in SPECIALS:
                g[torch.randint(self.numel, (1 + self.numel // 100,), generator=generator)] = x
        elif self.kind == "one nan":
            g[torch.randint(self.numel, (1,), generator=generator)] = float("nan")
        elif self.kind == "only specials":
            g = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (self.numel,), generator=generator)]
        return g.to(self.dtype)

    @property
    def blocks(self) -> int:
        return -(-max(1, self.layout.blocks) // (self.chunks * self.format.span)) * self.chunks * self.format.span

    def payload(self) -> Tensor:
        records = self.blocks // self.format.span // self.chunks
        return torch.full((self.chunks, records * self.format.record_bytes), 0xAA, dtype=torch.uint8)

    def residual(self, generator: torch.Generator) -> Tensor | None:
        if not self.feedback:
            return None
        e = torch.zeros(self.blocks * self.format.block)
        for first, numel in self.layout.places():
            e[first : first + numel] = torch.randn(numel, generator=generator) * 0.5
        return e


@st.composite
def cases(draw: st.DrawFn, formats: st.SearchStrategy[Format]) -> Case:
    format = draw(formats)
    segments, offset = [], 0
    for _ in range(draw(st.integers(1, 4))):
        offset += draw(st.sampled_from([0, 3]))
        numel = draw(st.one_of(st.integers(1, 40), st.integers(1, 3 * format.block + 20),
                               st.just(2 * format.block)))
        segments.append((offset, numel))
        offset += numel
    layout = Layout.of(segments, format.block)
    return Case(format, layout, offset + draw(st.sampled_from([0, 5])), draw(st.integers(1, 4)),
                draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
                draw(st.sampled_from(["normal", "zeros", "equal", "few", "wide", "specials", "one nan",
                                      "only specials"])),
                draw(st.booleans()), draw(st.integers(0, 2**31)))


any_case = cases(st.one_of(block_formats(), sparse_formats()))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_floats(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for which NaN it is: a sum of two NaNs may be either."""
    a, b = a.float(), b.float()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


# ---- native and reference ----------------------------------------------------------------------------


@needs_native
@few
@given(any_case)
def test_encode_gives_the_same_bytes_step_after_step(case: Case) -> None:
    generator = case.generator()
    e = case.residual(generator)
    other = None if e is None else e.clone()
    gain = None if case.seed % 2 else torch.tensor([0.37])
    for step in range(3):
        g = case.bucket(generator)
        payload, expected = case.payload(), case.payload()
        key = case.seed * 77777 - step
        ops.encode(g, case.layout.table, case.format.ints(), e, payload, gain, key)
        reference.encode(g, case.layout.table, case.format.ints(), other, expected, gain, key)
        assert same(payload, expected)
        if e is not None and other is not None:
            assert same(e, other)
            assert e.isfinite().all()


@needs_native
@few
@given(any_case, st.integers(1, 3))
def test_decode_and_reduce_give_the_same_bytes(case: Case, ranks: int) -> None:
    generator = case.generator()
    payloads = torch.stack([case.payload() for _ in range(ranks)])
    for payload in payloads:
        reference.encode(case.bucket(generator), case.layout.table, case.format.ints(), None, payload, None,
                         case.seed)
    e = case.residual(generator)
    per_chunk = case.blocks // case.chunks
    for begin, part in ((0, payloads), (per_chunk * (case.chunks - 1), payloads[:, -1:].contiguous())):
        out = case.bucket(generator)
        expected = out.clone()
        ops.decode_mean(part, case.layout.table, case.format.ints(), begin, out)
        reference.decode_mean(part, case.layout.table, case.format.ints(), begin, expected)
        assert same_floats(out, expected)

        own = None if e is None else e[begin * case.format.block :].clone()
        other = None if own is None else own.clone()
        flat = torch.empty(part[0].numel(), dtype=torch.uint8)
        wanted = torch.empty_like(flat)
        ops.reduce_encode(part, case.layout.table, case.format.ints(), begin, own, flat, case.seed)
        reference.reduce_encode(part, case.layout.table, case.format.ints(), begin, other, wanted, case.seed)
        assert same(flat, wanted)
        if own is not None and other is not None:
            assert same(own, other)
            assert own.isfinite().all()


@needs_native
@few
@given(any_case)
def test_mask_gives_the_same_bytes(case: Case) -> None:
    generator = case.generator()
    payload = case.payload()
    reference.encode(case.bucket(generator), case.layout.table, case.format.ints(), None, payload, None, 5)
    buffer = torch.randn(case.blocks * case.format.block, generator=generator)
    expected = buffer.clone()
    ops.topk_mask_(payload, case.layout.table, case.format.ints(), buffer)
    reference.topk_mask_(payload, case.layout.table, case.format.ints(), expected)
    assert same(buffer, expected)


@needs_native
@pytest.mark.parametrize("kind", ["normal", "zeros", "equal", "few", "one nan", "sorted"])
@pytest.mark.parametrize("select", [EXACT, THRESHOLD])
@pytest.mark.parametrize("k", [1, 900, 60_000])
def test_a_large_chunk_gives_the_same_bytes(kind: str, select: int, k: int) -> None:
    """Large enough that the threshold is sampled with a stride, and misjudged for some inputs."""
    n = 90_000
    format = TopKSparseFormat(512, -(-n // 512), k, INT8, select)
    layout = Layout.of([(0, n)], 512)
    case = Case(format, layout, n, 1, torch.float32, kind, True, k)
    g = case.bucket(case.generator())
    if kind == "sorted":
        g = g.sort().values ** 9
    e, other = torch.zeros(case.blocks * 512), torch.zeros(case.blocks * 512)
    payload, expected = case.payload(), case.payload()
    for key in (3, 4):
        ops.encode(g, layout.table, format.ints(), e, payload, None, key)
        reference.encode(g, layout.table, format.ints(), other, expected, None, key)
        assert same(payload, expected)
        assert same(e, other)


# ---- algebra -----------------------------------------------------------------------------------------


@executors
@few
@given(any_case)
def test_what_is_sent_and_what_is_left_make_p(executor, case: Case) -> None:
    generator = case.generator()
    case.feedback = True
    e, g, payload = case.residual(generator), case.bucket(generator), case.payload()
    assert e is not None
    p = torch.zeros_like(e)
    for (offset, numel, _), (first, _) in zip(case.layout.table.tolist(), case.layout.places(), strict=True):
        p[first : first + numel] = g[offset : offset + numel].float() + e[first : first + numel]
    executor.encode(g, case.layout.table, case.format.ints(), e, payload, None, 1)
    assert e.isfinite().all()
    out = torch.zeros(case.numel)
    executor.decode_mean(payload.unsqueeze(0), case.layout.table, case.format.ints(), 0, out)
    for (offset, numel, _), (first, _) in zip(case.layout.table.tolist(), case.layout.places(), strict=True):
        want, left, got = p[first : first + numel], e[first : first + numel], out[offset : offset + numel]
        fine = want.isfinite() & got.isfinite()
        exact = fine & ((got == 0) | (case.format.options()[2] == FLOAT32))
        assert torch.equal((left + got)[exact], want[exact])
        torch.testing.assert_close((left + got)[fine], want[fine], rtol=1e-6, atol=1e-37)
    if not p.isfinite().all():
        assert not out.isfinite().all()


@executors
@pytest.mark.parametrize("n", [100_000, 1000, 70])
def test_exact_keeps_the_largest(executor, n: int) -> None:
    k = 100
    format = TopKSparseFormat(64, -(-n // 64) + 3, k)
    layout = Layout.of([(0, n)], 64)
    g = torch.randn(n, generator=torch.Generator().manual_seed(n))
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, layout.table, format.ints(), None, payload, None, 0)
    kept = min(k, n)
    index = payload[0, : 4 * k].view(torch.int32).long() & UNUSED
    assert torch.equal(index[:kept], torch.topk(g.abs(), kept).indices.sort().values)
    assert (index[kept:] == UNUSED).all()
    assert torch.equal(payload[0, 4 * k :].view(torch.float32)[:kept], g[index[:kept]])


@executors
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("rows", [100, 1000])
def test_block_keeps_the_largest_of_each_lane(executor, rows: int, k: int) -> None:
    format = TopKBlockFormat(16 * rows, rows, k)
    g = torch.randn(16 * rows, generator=torch.Generator().manual_seed(rows))
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    layout = Layout.of([(0, 16 * rows)], 16 * rows)
    executor.encode(g, layout.table, format.ints(), None, payload, None, 0)
    out = torch.full_like(g, 9.0)
    executor.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    tile = g.view(rows, 16)
    rows_kept = torch.topk(tile.abs(), k, dim=0).indices
    assert torch.equal(out.view(rows, 16), torch.zeros_like(tile).scatter(0, rows_kept, tile.gather(0, rows_kept)))


@executors
def test_threshold_sends_about_k_of_the_largest(executor) -> None:
    n, k = 200_000, 2000
    format = TopKSparseFormat(500 // 4 * 4 + 12, -(-n // 512), k, FLOAT32, THRESHOLD)
    layout = Layout.of([(0, n)], 512)
    g = torch.randn(n, generator=torch.Generator().manual_seed(1))
    starts = set()
    for key in range(4):
        payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
        executor.encode(g, layout.table, format.ints(), None, payload, None, key)
        index = payload[0, : 4 * k].view(torch.int32).long() & UNUSED
        index = index[index != UNUSED]
        assert index.numel() > k // 2
        assert index.unique().numel() == index.numel()
        assert g[index].abs().min() > g.abs().sort().values[-2 * k]
        starts.add(int(index[0]))
    assert len(starts) > 1, "every key begins at the same block"


@executors
@pytest.mark.parametrize("position", [0, 77_777, 99_999])
@pytest.mark.parametrize("select", [EXACT, THRESHOLD])
def test_a_quota_does_not_hide_a_non_finite_element(executor, select: int, position: int) -> None:
    n = 100_000
    format = TopKSparseFormat(512, -(-n // 512), 10, FLOAT16, select)
    layout = Layout.of([(0, n)], 512)
    g = torch.randn(n)
    g[position] = float("nan")
    e = torch.zeros(format.span * 512)
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, layout.table, format.ints(), e, payload, None, 9)
    assert e.isfinite().all()
    out = torch.empty(n)
    executor.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    assert out[position].isnan()


@executors
def test_int8_of_the_largest_float_leaves_a_finite_residual(executor) -> None:
    format = TopKBlockFormat(16, 1, 1, INT8)
    layout = Layout.of([(0, 16)], 16)
    g = torch.full((16,), torch.finfo(torch.float32).max)
    e = torch.zeros(16)
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, layout.table, format.ints(), e, payload, None, 0)
    out = torch.empty(16)
    executor.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    assert e.isfinite().all() and out.isfinite().all()


@executors
@few
@given(any_case)
def test_mask_zeroes_what_was_sent_and_nothing_else(executor, case: Case) -> None:
    case.kind, case.dtype = "normal", torch.float32
    format = dataclasses.replace(case.format, value=FLOAT32)
    case.format = format
    payload, g = case.payload(), case.bucket(case.generator())
    executor.encode(g, case.layout.table, format.ints(), None, payload, None, 5)
    out = torch.empty(case.numel)
    executor.decode_mean(payload.unsqueeze(0), case.layout.table, format.ints(), 0, out)
    buffer = torch.ones(case.blocks * format.block)
    executor.topk_mask_(payload, case.layout.table, format.ints(), buffer)
    for (offset, numel, _), (first, _) in zip(case.layout.table.tolist(), case.layout.places(), strict=True):
        assert torch.equal(buffer[first : first + numel] == 0, out[offset : offset + numel] != 0)
        buffer[first : first + numel] = 1
    assert (buffer == 1).all()


# ---- what must be refused ----------------------------------------------------------------------------


@executors
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("format", "place", "width", "bad"), [
    (TopKBlockFormat(1600, 100), -5, 1, 100),
    (TopKBlockFormat(1600, 100, 3, INT8), -16, 1, 255),
    (TopKBlockFormat(16 * 300, 300, 1, FLOAT16), -4, 2, 300),
    (TopKSparseFormat(64, 4, 5), 8, 4, 256),
    (TopKSparseFormat(64, 4, 5, INT8), 8, 4, UNUSED - 1),
], ids=str)
def test_a_bad_index_is_named_and_nothing_is_written(executor, format: Format, place: int, width: int,
                                                     bad: int, rank: int) -> None:
    blocks = 4
    n = blocks * format.block
    layout = Layout.of([(0, n)], format.block)
    size = blocks // format.span * format.record_bytes
    payload = torch.empty(1, size, dtype=torch.uint8)
    executor.encode(torch.randn(n), layout.table, format.ints(), None, payload, None, 0)
    payloads = torch.stack([payload, payload])
    place %= format.record_bytes
    payloads[rank, 0, place : place + width] = torch.tensor(list(bad.to_bytes(width, "little")),
                                                            dtype=torch.uint8)
    bound = 256 if isinstance(format, TopKSparseFormat) else format.options()[0]
    message = f"index {bad}.*below {bound}"
    out, e, own = torch.full((n,), 7.0), torch.full((n,), 7.0), torch.full((size,), 7, dtype=torch.uint8)
    with pytest.raises((RuntimeError, ValueError), match=message):
        executor.decode_mean(payloads, layout.table, format.ints(), 0, out)
    with pytest.raises((RuntimeError, ValueError), match=message):
        executor.reduce_encode(payloads, layout.table, format.ints(), 0, e, own, 0)
    with pytest.raises((RuntimeError, ValueError), match=message):
        executor.topk_mask_(payloads[rank], layout.table, format.ints(), e)
    assert (out == 7).all() and (e == 7).all() and (own == 7).all()


@executors
@pytest.mark.parametrize("ints", [
    [3, 1600, 99, 1, 0, 0], [3, 16, 1, 2, 0, 0], [3, 16, 1, 0, 0, 0], [3, 16, 1, 1, 2, 0],
    [3, 16 * 65536, 65536, 1, 0, 0],
    [4, 8, 1, 1, 0, 0], [4, 16, 0, 1, 0, 0], [4, 16, 1, 17, 0, 0], [4, 16, 1, 1, 2, 0], [4, 16, 1, 1, 0, 2],
    [4, 2**20, 2**12, 1, 0, 0],
], ids=str)
def test_a_bad_format_is_refused(executor, ints: list[int]) -> None:
    layout = Layout.of([(0, 16)], 16)
    with pytest.raises((RuntimeError, ValueError), match="bad format"):
        executor.encode(torch.zeros(16), layout.table, ints, None, torch.zeros(1, 64, dtype=torch.uint8), None, 0)


@executors
def test_mask_is_for_top_k_only(executor) -> None:
    layout = Layout.of([(0, 128)], 128)
    with pytest.raises((RuntimeError, ValueError), match="top-k"):
        executor.topk_mask_(torch.zeros(1, 20, dtype=torch.uint8), layout.table, [1, 128, 0, 0, 0, 0],
                            torch.zeros(128))


@pytest.mark.parametrize("format", [TopKBlockFormat(160, 10, 2, INT8),
                                    TopKSparseFormat(160, 2, 9, FLOAT16, THRESHOLD)], ids=str)
def test_opcheck(format: Format) -> None:
    layout = Layout.of([(0, 300)], 160)
    size = 2 // format.span * format.record_bytes
    payload, e = torch.zeros(1, size, dtype=torch.uint8), torch.zeros(320)
    g, ints = torch.randn(300), format.ints()
    torch.library.opcheck(torch.ops.gradcomm.encode.default,
                          (g, layout.table, ints, e, payload, torch.tensor([1.0]), 0))
    torch.library.opcheck(torch.ops.gradcomm.decode_mean.default,
                          (torch.stack([payload, payload]), layout.table, ints, 0, g))
    torch.library.opcheck(torch.ops.gradcomm.reduce_encode.default,
                          (torch.stack([payload, payload]), layout.table, ints, 0, e, payload.view(-1), 0))
    torch.library.opcheck(torch.ops.gradcomm.topk_mask_.default, (payload, layout.table, ints, e))
