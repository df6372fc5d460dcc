"""The DDP side: a bucket in, a future of its mean out.

No postponed annotations here: DDP reads the hook's.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradcomm import checks
from gradcomm.schedule import CodecRule
from gradcomm.state import CommState


def comm_hook(state: CommState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook for torch's own call: ``ddp.register_comm_hook(gradcomm.CommState(codec),
    gradcomm.comm_hook)``. Ranks compare options in the first backward."""
    return state.exchange(bucket)


def register(
    ddp: DistributedDataParallel,
    codec: CodecRule | CommState,
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> CommState:
    """Compresses the gradients of a DDP model from its next backward on.

    Args:
        ddp: the model, without a communication hook so far; or what ``torch.compile`` made of it.
        codec: a codec, or its name, ``"onebit"`` or ``"topk:density=0.01"``, say; a schedule of several,
            ``{0: "none", 100: "onebit"}``; or a ``CommState`` not used so far, an unpickled one, say.
        process_group: the ranks that average; by default, and normally, DDP's own.
        options: those of ``CommState``, all of which have defaults under which the codec trains well.

    Returns the state: ``state.stats()``, ``state.state_dict()``.

    Collective: every rank calls it with the same arguments. Raises TypeError or ValueError for bad
    arguments, DisagreementError on every rank when ranks differ or one of them fails.
    """
    ddp = getattr(ddp, "_orig_mod", ddp)  # torch.compile(ddp)
    checks.ddp(ddp)
    group = process_group if process_group is not None else ddp.process_group
    checks.group(group)
    if isinstance(codec, CommState):
        state = codec
        checks.unused(state.step, options)
    else:
        state = CommState(codec, **options)
    state.process_group = group
    named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
    find_unused = ddp.find_unused_parameters or ddp.static_graph
    state.bind(named, complete=True, find_unused=find_unused)
    if process_group is None:
        state.follow(ddp)
    ddp._comm_hooks.clear()  # of a copied model: those of its original
    ddp.register_comm_hook(state, comm_hook)
    return state
