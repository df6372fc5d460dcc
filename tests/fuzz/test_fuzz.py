"""Any bytes may come off a wire: decoders refuse them or stay inside their buffers, all alike."""

from __future__ import annotations

import pathlib
import shutil
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomm import ops
from gradcomm.ops import native, reference
from gradcomm.ops.format import TopKBlockFormat, TopKSparseFormat

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import run

FORMATS = [
    ops.OneBitFormat(128),
    ops.QuantizeFormat(128, 4, True, False),
    ops.QuantizeFormat(64, 8),
    ops.CastFormat(64, ops.FLOAT16),
    TopKBlockFormat(160, 10, 2, 3),
    TopKBlockFormat(16 * 300, 300, 1, 0),
    TopKSparseFormat(64, 4, 9, 0),
    TopKSparseFormat(64, 4, 9, 3),
]
GUARD = 7.0


@pytest.mark.skipif(native.missing is not None, reason=f"no native kernels: {native.missing}")
@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_executors_agree_on_any_bytes(data: st.DataObject) -> None:
    """Both refuse, or both write the same means, between guards that stay as they are."""
    format = data.draw(st.sampled_from(FORMATS))
    layout = ops.Layout.of([(3, data.draw(st.integers(1, 300))), (400, 40)], format.block)
    records = -(-layout.blocks // format.span)
    size = records * format.record_bytes
    ranks = data.draw(st.integers(1, 3))
    few = data.draw(st.binary(min_size=1, max_size=64))
    raw = bytes((few * (-(-ranks * size // len(few))))[: ranks * size])
    payloads = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(ranks, 1, size)
    inside = torch.zeros(450, dtype=torch.bool)
    for offset, numel, _, _ in layout.table.tolist():
        inside[offset : offset + numel] = True
    results = []
    for executor in (torch.ops.gradcomm, reference):
        out = torch.full((450,), GUARD)
        try:
            executor.decode_mean(payloads, layout.table, format.ints(), 0, out)
        except (RuntimeError, ValueError) as error:
            assert "gradcomm" in str(error) and bool((out == GUARD).all())
            results.append(None)
            continue
        assert bool((out[~inside] == GUARD).all())
        results.append(out)
    mine, theirs = results
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the fuzzer with")
def test_the_fuzzer_runs_the_corpus_and_a_little_more(tmp_path: pathlib.Path) -> None:
    built = run.build("mutate", tmp_path, None, ["reduce_encode"])
    for binary in built.values():
        runs, problem = run.fuzz(binary, 1.0, [run.HERE / "corpus"])
        assert not problem and runs > len(list((run.HERE / "corpus").iterdir()))
