"""An executor beside the reference, on one run of one format: for kernels that are not the CPU's."""

from __future__ import annotations

import torch
from cases import same_bytes, same_values
from test_equal_bytes import chunk_residual, decoded, encode_steps, make_bucket

from gradcomm.ops import Format, reference


def check_encode(ops: object, format: Format, run: dict) -> None:
    bucket = make_bucket(format, run)
    for ours, theirs in zip(
        encode_steps(ops, bucket, run), encode_steps(reference, bucket, run), strict=True
    ):
        assert same_bytes(ours[0], theirs[0])
        assert ours[1] is None or same_bytes(ours[1], theirs[1])


def check_decoders(ops: object, format: Format, run: dict, ranks: int) -> None:
    """decode_mean of whole payloads and of one chunk, reduce_encode of that chunk."""
    bucket = make_bucket(format, run)
    payloads = torch.stack(
        [
            encode_steps(reference, bucket, {**run, "seed": run["seed"] + 10 * rank})[0][0]
            for rank in range(ranks)
        ]
    )
    assert same_values(
        decoded(ops, bucket, payloads, run["dtype"]), decoded(reference, bucket, payloads, run["dtype"])
    )
    chunk = run["seed"] % bucket.chunks
    begin, mine = chunk * bucket.chunk_blocks, payloads[:, chunk : chunk + 1].contiguous()
    outs, results = [], []
    for each in (ops, reference):
        out = torch.full((bucket.numel,), 7.0, dtype=run["dtype"])
        each.decode_mean(mine, bucket.layout.table, format.ints(), begin, out)
        outs.append(out)
        residual = chunk_residual(bucket, begin) if run["feedback"] else None
        payload = torch.full((bucket.chunk_bytes,), 0xA5, dtype=torch.uint8)
        each.reduce_encode(
            mine, bucket.layout.table, format.ints(), begin, residual, payload, run["key"]
        )
        results.append((payload, residual))
    assert same_values(*outs)
    assert same_bytes(results[0][0], results[1][0])
    assert not run["feedback"] or same_bytes(results[0][1], results[1][1])
