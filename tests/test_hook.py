"""The hook over real Gloo ranks: every rank ends with the same bits, whatever the codec."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm

from .models import CODECS, small_model, train, train_registered
from .ranks import Ranks


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_ranks_end_with_the_same_bits(ranks: Ranks, codec: str, world: int) -> None:
    results = ranks.run(train_registered, world, codec, {"warmup_steps": 2})
    assert len({r[0] for r in results}) == 1
    assert all(r[2]["steps"] == 6 for r in results)


def _plain_against_ddp(rank: int, ranks: int) -> bool:
    plain = train(DDP(small_model()), rank)
    ddp = DDP(small_model())
    state = gradcomm.register(ddp, "none")
    hooked = train(ddp, rank)
    state.close()
    return plain == hooked


@pytest.mark.parametrize("world", [2, 3])
def test_none_is_what_ddp_does_bit_for_bit(ranks: Ranks, world: int) -> None:
    assert all(ranks.run(_plain_against_ddp, world))


def _lane_error(rank: int, ranks: int) -> tuple[str, str]:
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(ddp, "onebit", warmup_steps=0)

    def broken(*args: Any) -> None:
        raise ArithmeticError("a fault put in by the test")

    state._memory.flat = broken  # type: ignore[method-assign]
    try:
        train(ddp, rank, steps=1)
    except gradcomm.LaneError as error:
        return str(error), "".join(traceback.format_exception(error))
    finally:
        state.close()
    return "", ""


def test_error_in_the_lane_reaches_backward_with_its_traceback(ranks: Ranks) -> None:
    for message, trace in ranks.run(_lane_error, 2):
        assert "step 0, bucket 0" in message and "a fault put in by the test" in message
        assert "in broken" in trace and "ArithmeticError" in trace


def _closed(rank: int, ranks: int) -> tuple[str, str]:
    """What a backward after close says, and whether a new wrapping trains on."""
    ddp = DDP(small_model())
    state = gradcomm.register(ddp, "onebit", warmup_steps=0)
    train(ddp, rank, 2)
    state.close()
    state.close()  # twice is once
    message = ""
    try:
        train(ddp, rank, 1)
    except RuntimeError as error:
        message = str(error)
    module = ddp.module
    del ddp  # its hooks on the parameters stand in the middle of a backward
    again = DDP(module)
    state = gradcomm.register(again, "onebit", warmup_steps=0)
    ended = train(again, rank, 2)[0]
    state.close()
    return message, ended


def test_backward_after_close_is_an_error_that_names_the_remedy(ranks: Ranks) -> None:
    (message, ended), (other, same) = ranks.run(_closed, 2)
    assert "this state was closed" in message and "register that" in message and message == other
    assert ended == same
