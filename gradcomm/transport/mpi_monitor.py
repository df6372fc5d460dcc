"""A barrier that says who is missing."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Through ``store``, whose keys are of this barrier alone, so that it works where MPI does not.

    Raises RuntimeError on all that come, which names the ranks that did not reach rank 0 within
    ``timeout``; without ``wait_all_ranks`` the first of them only.
    """
    store.set(f"rank {rank}", "")
    if rank != 0:
        store.wait(["end"], timeout)
        found = store.get("end").decode()
    else:
        end = time.monotonic() + timeout.total_seconds()
        missing: list[int] = []
        for other in range(1, size):
            left = timedelta(seconds=max(0.001, end - time.monotonic()))
            try:
                store.wait([f"rank {other}"], left)
            except RuntimeError:  # the store's timeout
                missing.append(other)
                if not wait_all_ranks:
                    break
        found = f"ranks {missing}" if missing else ""
        store.set("end", found)
    if found:
        raise RuntimeError(
            f"gradcomm: {found} of {size} did not reach monitored_barrier within {timeout}"
        )
