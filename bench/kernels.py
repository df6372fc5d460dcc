"""How fast the operators are, beside a plain addition of the same tensors in the same run.

    python bench/kernels.py [--mib 25] [--repeats 15] [--threads 1] [--json FILE]

A row's figure is the median time of ``b.add_(a)`` (float32, as many elements as the gradient) over the
median time of the row, the two measured in turn: a machine that is busy slows both. "at least" is what
the project asks of the row. "bytes" is what a fused kernel must move for an element of the gradient,
and "of floor" the share of the row's time that moving them at the addition's rate (12 bytes) would
take. "x ours": how many times as long plain PyTorch takes as the operator that does the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gradcomm.ops as ops
from bench import machine
from gradcomm.ops import Format, Layout, OneBitFormat, QuantizeFormat

ADD_BYTES = 12  # an addition reads two floats and writes one


@dataclasses.dataclass
class Row:
    """``run`` is timed; ``moved`` bytes an element at least; ``at_least`` the figure asked for."""

    name: str
    run: Callable[[], object]
    moved: float | None = None
    at_least: float | None = None
    ours: str | None = None  # the row that does the same by the operators
    seconds: list[float] = dataclasses.field(default_factory=list)
    add_seconds: list[float] = dataclasses.field(default_factory=list)

    def result(self, numel: int) -> dict[str, object]:
        seconds = statistics.median(self.seconds)
        add = statistics.median(self.add_seconds)
        figure = add / seconds
        return {
            "name": self.name,
            "ms": seconds * 1e3,
            "gb_per_s": 4 * numel / seconds / 1e9,
            "figure": figure,
            "at_least": self.at_least,
            "bytes_per_element": self.moved,
            "of_floor": None if self.moved is None else figure * self.moved / ADD_BYTES,
        }


class Packing:
    """The operators on one gradient under one format."""

    def __init__(self, format: Format, gradient: torch.Tensor) -> None:
        self.format, self.gradient, self.ints = format, gradient, format.ints()
        self.layout = Layout.of([(0, gradient.numel())], format.block)
        self.records = -(-self.layout.blocks // format.span)
        self.bytes = self.records * format.record_bytes
        self.wire = self.bytes / gradient.numel()

    def residual(self) -> torch.Tensor:
        return torch.zeros(self.records * self.format.span * self.format.block)

    def encode(self) -> Callable[[], object]:
        residual, payload = self.residual(), torch.empty(1, self.bytes, dtype=torch.uint8)
        return lambda: ops.encode(
            self.gradient, self.layout.table, self.ints, residual, payload, None, 7
        )

    def payloads(self, ranks: int) -> torch.Tensor:
        payloads = torch.empty(ranks, 1, self.bytes, dtype=torch.uint8)
        for rank, payload in enumerate(payloads):
            source = self.gradient.roll(rank * 1001)
            ops.encode(source, self.layout.table, self.ints, None, payload, None, rank)
        return payloads

    def decode(self, ranks: int) -> Callable[[], object]:
        payloads, out = self.payloads(ranks), torch.empty_like(self.gradient)
        return lambda: ops.decode_mean(payloads, self.layout.table, self.ints, 0, out)

    def reduce(self, ranks: int) -> Callable[[], object]:
        payloads, residual = self.payloads(ranks), self.residual()
        payload = torch.empty(self.bytes, dtype=torch.uint8)
        return lambda: ops.reduce_encode(payloads, self.layout.table, self.ints, 0, residual, payload, 7)


@dataclasses.dataclass
class Case:
    """A format and the figures asked of its encoder, of decoding two payloads, of reducing them."""

    name: str
    format: Format
    encode: float | None = None
    decode: float | None = None
    reduce: float | None = None
    always: bool = False  # also the operators of which nothing is asked


def formats(numel: int) -> list[Case]:
    cases = [
        Case("onebit", OneBitFormat(512), 0.70, 1.0, 0.6),
        Case("int8", QuantizeFormat(512, 8), 0.60, 1.0, 0.6),
        Case("int4", QuantizeFormat(512, 4), 0.60, 1.0, always=True),
        Case("int2", QuantizeFormat(512, 2), 0.60, always=True),
        Case("int8 stochastic", QuantizeFormat(512, 8, False, True), 0.35),
        Case("int4 stochastic", QuantizeFormat(512, 4, False, True), 0.35),
        Case("int8 max-min", QuantizeFormat(512, 8, True), always=True),
        Case("int4 max-min", QuantizeFormat(512, 4, True), always=True),
        Case("float16", ops.CastFormat(512, 1), always=True),
        Case("bfloat16", ops.CastFormat(512, 2), always=True),
        Case("float32", ops.CastFormat(512, 0), always=True),
    ]
    blocks = -(-numel // 512)
    exact = ops.TopKSparseFormat(512, blocks, numel // 100, ops.FLOAT32, ops.EXACT)
    threshold = ops.TopKSparseFormat(512, blocks, numel // 100, ops.FLOAT32, ops.THRESHOLD)
    cases += [
        Case("block top-k 1%", ops.TopKBlockFormat(1600, 100, 1, ops.FLOAT32), 0.75, 1.5, always=True),
        Case("exact top-k 1%", exact, 0.25, 1.5),
        Case("threshold top-k 1%", threshold, always=True),
    ]
    return cases


def operator_rows(gradient: torch.Tensor) -> list[Row]:
    rows = []
    for case in formats(gradient.numel()):
        packing = Packing(case.format, gradient)
        wire = packing.wire
        if case.encode is not None or case.always:
            rows.append(Row(f"{case.name} encode + EF", packing.encode(), 12 + wire, case.encode))
        if case.decode is not None or case.always:
            rows.append(
                Row(f"{case.name} decode-mean of 2", packing.decode(2), 4 + 2 * wire, case.decode)
            )
        if case.reduce is not None or case.always:
            rows.append(
                Row(f"{case.name} reduce-encode of 2", packing.reduce(2), 8 + 3 * wire, case.reduce)
            )
    return rows


def plain_rows(gradient: torch.Tensor) -> list[Row]:
    """The same in plain PyTorch, as most people write it: error feedback, and the local decoding."""
    k = gradient.numel() // 100
    residual = torch.zeros_like(gradient)

    def onebit() -> tuple[torch.Tensor, torch.Tensor]:
        p = gradient + residual
        scale, sign = p.abs().mean(), p.sign()
        residual.copy_(p - scale * sign)
        return sign.to(torch.int8), scale

    def int8() -> tuple[torch.Tensor, torch.Tensor]:
        p = gradient + residual
        scale = p.abs().max() / 127
        q = (p / scale).round().clamp(-127, 127).to(torch.int8)
        residual.copy_(p - q.float() * scale)
        return q, scale

    def topk() -> tuple[torch.Tensor, torch.Tensor]:
        p = gradient + residual
        index = torch.topk(p.abs(), k, sorted=False).indices
        values = p[index]
        residual.copy_(p - torch.zeros_like(p).scatter_(0, index, values))
        return values, index

    return [
        Row("PyTorch: sign and mean + EF", onebit, ours="onebit encode + EF"),
        Row("PyTorch: int8 + EF", int8, ours="int8 encode + EF"),
        Row(
            "PyTorch: topk(|g|, 1%)",
            lambda: torch.topk(gradient.abs(), k),
            ours="exact top-k 1% encode + EF",
        ),
        Row("PyTorch: top-k 1% + EF", topk, ours="exact top-k 1% encode + EF"),
    ]


def measure(rows: list[Row], a: torch.Tensor, b: torch.Tensor, repeats: int) -> None:
    for repeat in range(repeats + 1):
        for row in rows:
            start = time.perf_counter()
            b.add_(a)
            middle = time.perf_counter()
            row.run()
            end = time.perf_counter()
            if repeat > 0:  # the first round warms up
                row.add_seconds.append(middle - start)
                row.seconds.append(end - middle)


def show(results: list[dict[str, object]], about: dict[str, object]) -> None:
    table = Table(
        title=" · ".join(f"{key} {value}" for key, value in about.items()), title_justify="left"
    )
    for column in ("operator", "ms", "GB/s", "figure", "at least", "bytes", "of floor", "x ours"):
        table.add_column(column, justify="left" if column == "operator" else "right", no_wrap=True)
    for r in results:
        asked, figure = r["at_least"], r["figure"]
        colour = "" if asked is None else "[green]" if figure >= asked else "[red]"
        table.add_row(
            r["name"],
            f"{r['ms']:.2f}",
            f"{r['gb_per_s']:.1f}",
            f"{colour}{figure:.2f}",
            "" if asked is None else f"{asked:.2f}",
            "" if r["bytes_per_element"] is None else f"{r['bytes_per_element']:.2f}",
            "" if r["of_floor"] is None else f"{100 * r['of_floor']:.0f} %",
            "" if r["times_ours"] is None else f"{r['times_ours']:.0f}",
        )
    Console(width=110 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=float, default=25, help="size of the float32 gradient")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    gradient = torch.randn(int(arguments.mib * 2**18))
    a, b = torch.randn_like(gradient), torch.zeros_like(gradient)
    rows = operator_rows(gradient)
    measure(rows, a, b, arguments.repeats)
    plain = plain_rows(gradient)
    measure(plain, a, b, max(3, arguments.repeats // 5))
    results = [row.result(gradient.numel()) for row in rows + plain]
    figures = {r["name"]: r["figure"] for r in results}
    for row, result in zip(rows + plain, results, strict=True):
        result["times_ours"] = figures[row.ours] / result["figure"] if row.ours in figures else None
    add = statistics.median(t for row in rows for t in row.add_seconds)
    about = {
        "date": datetime.date.today().isoformat(),
        **machine.describe(),
        "threads": arguments.threads,
        "mib": arguments.mib,
        "add_ms": round(add * 1e3, 3),
    }
    show(results, about)
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
