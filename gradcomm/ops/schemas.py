"""The operators ``torch.ops.gradcomm.*``: schemas, fakes, and the reference as what any device has.

A native library registers its kernels for a device on top (``native.py``).

``encode(source, layout, format, residual, payload, gain, key)``
    Packs a bucket. ``source``: the bucket, 1-D contiguous float32, float16 or bfloat16. ``layout``:
    int64 ``[segments, 4]`` on the CPU: offset in the bucket, elements, first block, origin
    of the random numbers (``layout.py``).
    ``format``: six integers (``format.py``). ``residual``: float32 in block space, or None for no
    error feedback. ``payload``: uint8 ``[chunks, chunk bytes]``. ``gain``: one float32, or None for 1.
    ``key``: of the random numbers. With p = gain g + e: the payload becomes the records of p, and the
    residual becomes p minus what they decode to; where p is not finite it stays as it is.

``decode_mean(payloads, layout, format, block_begin, out)``
    ``payloads``: uint8 ``[ranks, chunks, chunk bytes]``. Writes the mean over ranks of what they
    decode to into the elements of ``out`` (a bucket, as above) that the blocks from ``block_begin``
    on own; other elements stay as they are.

``reduce_encode(payloads, layout, format, block_begin, residual, payload, key)``
    What the owner of a shard does: the mean over ranks of its chunk, plus its residual, encoded into
    ``payload`` (uint8 ``[chunk bytes]``). ``residual``: float32, its block 0 being ``block_begin``.

``topk_mask_(payload, layout, format, buffer)``
    Zeroes the elements of ``buffer`` (float32, in block space like a residual) that ``payload`` (uint8
    ``[chunks, chunk bytes]``, a top-k format) sent: the momentum factor masking of Deep Gradient
    Compression (Lin et al. 2018, section 3.2: u <- u masked by what was not sent).

``orthogonalize_(rows)``
    ``rows``: float32 ``[matrices, rows, columns]``, contiguous; becomes orthonormal rows that span those
    it held, matrix by matrix: Cholesky QR twice (Yamamoto et al. 2015), in float64, of unit rows, the
    Gram matrix shifted. A row that depends on those before it becomes zero, nearly: made a unit vector
    again it would count their direction twice. A zero row stays zero. CUDA has a kernel for up to 32
    rows, which sums in another order than the reference: its result is near, and the same every time.

``lowrank_project_(gradient, matrix, q, gain, p)``
    PowerSGD's first pass over a matrix (Vogels et al. 2019, algorithm 1). ``gradient``, ``matrix``:
    float32 ``[n, m]``, contiguous; ``matrix`` holds the residual E and becomes M = gain G + E. ``q``:
    float32 ``[rank, m]``; ``p``, ``[rank, n]``, becomes (M Q^T)^T. Where gain G is not finite, or 1e37
    or more, E stays, and that row's column of ``p`` is NaN.

``lowrank_back_project_(matrix, p, q)``
    The second: ``q`` becomes P M, float32 ``[rank, m]``. Both sum in an order of their own, so that
    CPU kernels and the reference agree to rounding; each gives the same every time, by any number of
    threads.

All raise ``RuntimeError`` or ``ValueError``, before they touch memory, on a wrong length,
dtype, layout or format, and decoders on an index outside its block. On CUDA, where to look at an
index would be to wait for the device, a kernel makes such an index a NaN in its block instead.
"""

from __future__ import annotations

import torch

from . import reference

SCHEMAS = (
    "encode(Tensor source, Tensor layout, int[] format, Tensor(a!)? residual, Tensor(b!) payload, "
    "Tensor? gain, int key) -> ()",
    "decode_mean(Tensor payloads, Tensor layout, int[] format, int block_begin, Tensor(a!) out) -> ()",
    "reduce_encode(Tensor payloads, Tensor layout, int[] format, int block_begin, "
    "Tensor(a!)? residual, Tensor(b!) payload, int key) -> ()",
    "topk_mask_(Tensor payload, Tensor layout, int[] format, Tensor(a!) buffer) -> ()",
    "orthogonalize_(Tensor(a!) rows) -> ()",
    "lowrank_project_(Tensor gradient, Tensor(a!) matrix, Tensor q, Tensor? gain, Tensor(b!) p) -> ()",
    "lowrank_back_project_(Tensor matrix, Tensor p, Tensor(a!) q) -> ()",
)

_library = torch.library.Library("gradcomm", "DEF")
for _schema in SCHEMAS:
    _name = _schema.split("(")[0]
    # The second name always runs the reference: what a device's kernels call where they have none.
    for _op in (_name, f"reference_{_name}"):
        _library.define(_schema.replace(_name, _op, 1))
        _library.impl(_op, getattr(reference, _name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"gradcomm::{_op}", lambda *args, **kwargs: None, lib=_library)
