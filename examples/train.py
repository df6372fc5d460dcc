"""A small DDP training, the same under torchrun, mpirun and srun.

    torchrun --nproc-per-node 2 examples/train.py
    mpirun -np 2 python examples/train.py [--backend mpi4py | --over-mpi]
    srun -n 2 python examples/train.py

The model learns to add two numbers written in binary. Prints the loss and, at the end, a hash of the
parameters, which must be the same on every rank.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomm
from gradcomm.verify import digest

BITS = 8


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[size, 2 * BITS]`` and targets ``[size, BITS + 1]``, float32, each a bit."""
    numbers = torch.randint(0, 2**BITS, (size, 2), generator=generator)
    places = torch.arange(BITS + 1)
    bits = (numbers.unsqueeze(-1) >> places[:BITS]) & 1
    return bits.flatten(1).float(), ((numbers.sum(1, keepdim=True) >> places) & 1).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="onebit", help="any of gradcomm's, or 'ddp' for no hook")
    parser.add_argument("--backend", help="nccl, gloo, mpi4py; by default what fits the device")
    parser.add_argument("--over-mpi", action="store_true", help="payloads over MPI.COMM_WORLD")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()

    world = gradcomm.launch.init(arguments.backend)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2 * BITS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, BITS + 1)
    ).to(world.device)
    ddp = DistributedDataParallel(model)
    state = None
    if arguments.codec != "ddp":
        transport = None
        if arguments.over_mpi:
            from mpi4py import MPI

            transport = MPI.COMM_WORLD
        state = gradcomm.register(ddp, arguments.codec, warmup_steps=20, transport=transport)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(world.rank)  # each rank's own data
    for step in range(arguments.steps):
        inputs, targets = batch(128, generator)
        outputs = ddp(inputs.to(world.device))
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, targets.to(world.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.rank == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    mine = digest(torch.cat([p.detach().flatten() for p in model.parameters()]))
    hashes: list[str] = [""] * world.world_size
    dist.all_gather_object(hashes, mine)
    if world.rank == 0:
        print(f"{world.world_size} ranks by {world.launcher}, backend {dist.get_backend()}: {hashes}")
        if state is not None:
            stats = state.stats()
            print(f"sent {stats['bytes_sent']} bytes, {stats['ratio']:.1f} times fewer than plain")
    if len(set(hashes)) != 1:
        raise SystemExit("ranks hold different parameters")
    if state is not None:
        state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
