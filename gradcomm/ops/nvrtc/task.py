"""What the kernels are told: the structs of csrc/cuda/task.cuh and matrices.cuh."""

from __future__ import annotations

import ctypes

SEGMENTS = 120  # that a task holds


class Task(ctypes.Structure):
    """csrc/cuda/task.cuh."""

    _fields_ = [
        ("format", ctypes.c_int64 * 6),
        *(
            (name, ctypes.c_int64)
            for name in ("block", "record", "block_begin", "begin", "end", "ranks", "rank_stride")
        ),
        *(
            (name, ctypes.c_uint64)
            for name in ("key", "source", "out", "gain", "residual", "payload", "payloads")
        ),
        *((name, ctypes.c_uint64) for name in ("scratch", "table")),
        *((name, ctypes.c_int64) for name in ("slab", "slabs", "step", "flat")),
        ("num_segments", ctypes.c_int64),
        ("segments", ctypes.c_int64 * (4 * SEGMENTS)),
    ]

    def put(self, rows: list[list[int]]) -> None:
        """Makes these, SEGMENTS at most, the segments."""
        self.num_segments = len(rows)
        self.segments[: 4 * len(rows)] = [x for row in rows for x in row]


class Matrices(ctypes.Structure):
    """csrc/cuda/matrices.cuh."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("count", "rows", "columns")),
    ]
