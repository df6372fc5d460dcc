"""What a fault costs: the time until each other rank has an error, and what the error says.

    python bench/faults.py [--faults kill hang …] [--ranks 3] [--timeout 10] [--json faults.json]

Ranks train over Gloo with ``--timeout`` seconds; on the last one something goes wrong in step 3. Prints
a Markdown table (docs/faults.md). Links are cut and lossy in network namespaces, which need root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from bench.namespaces import INTERFACE, Hosts, Link, missing

FAULT_STEP = 3
FAULTS = {
    "kill": "killed (SIGKILL) in forward",
    "kill in exchange": "killed (SIGKILL) in the wire phase",
    "hang": "hangs in forward",
    "raise": "raises in forward",
    "out of memory": "runs out of memory in encode",
    "interrupt": "KeyboardInterrupt in backward",
    "cut": "its link is cut in mid-exchange",
    "loss": "1 % of its packets are lost",
}
LOSS_STEPS = 100
#: Faults that need network namespaces: the share of packets lost.
LOSSY = {"cut": 0.0, "loss": 0.01}


@dataclasses.dataclass
class Outcome:
    """Of one rank. ``seconds``: from the fault to the error. ``intact``: parameters are what the last
    whole step left. ``threads``: of gradcomm's, after ``close``. ``exit_code`` of the process, and
    ``gone``: seconds from the fault to its end."""

    rank: int
    error: str = ""
    message: str = ""
    step: int = -1
    seconds: float = 0.0
    intact: bool = True
    threads: int = 0
    exit_code: int | None = None
    gone: float = 0.0


def run(fault: str, ranks: int = 3, timeout: float = 10, codec: str = "onebit") -> list[Outcome]:
    """Each rank's outcome. Leaves no process behind: one that neither ends nor errs is killed after
    three times the timeout, with an exit code of None."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gradcomm", "bench.faults"])
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradcomm-")))
        hosts = None
        if fault in LOSSY:
            hosts = stack.enter_context(Hosts(ranks, Link(loss=LOSSY[fault])))
        processes = []
        for rank in range(ranks):
            namespace = None if hosts is None else hosts.names[rank]
            arguments = (rank, ranks, fault, timeout, codec, str(folder), namespace)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            processes.append(process)
        try:
            end = time.monotonic() + 60
            while not (folder / "fault").exists() and time.monotonic() < end:
                if all(p.exitcode is not None for p in processes):
                    break
                time.sleep(0.02)
            if fault == "cut" and hosts is not None:
                hosts.cut(ranks - 1)
                (folder / "fault").write_text(str(time.time()))
            began = _fault_time(folder)
            outcomes = [Outcome(rank) for rank in range(ranks)]
            waiting = dict(enumerate(processes))
            patience = began + 3 * timeout + (60 if fault == "loss" else 0)
            while waiting and time.time() < patience:
                for rank in [r for r, p in waiting.items() if p.exitcode is not None]:
                    outcomes[rank].exit_code = waiting.pop(rank).exitcode
                    outcomes[rank].gone = time.time() - began
                if fault == "hang" and list(waiting) == [ranks - 1]:
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for outcome in outcomes:
            file = folder / f"{outcome.rank}.json"
            if file.exists():
                for name, value in json.loads(file.read_text()).items():
                    setattr(outcome, name, value)
        return outcomes


def _fault_time(folder: pathlib.Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        return float((folder / "fault").read_text())
    return time.time()


def _enter(namespace: str) -> None:
    """Moves this thread, and those it starts, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(handle, 0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)


def _rank(
    rank: int, ranks: int, fault: str, timeout: float, codec: str, folder: str, namespace: str | None
) -> None:
    if namespace is not None:
        _enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    import gradcomm
    from gradcomm.verify import digest

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(f"{folder}/store", ranks)
    patience = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, timeout=patience, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.3)
    state = gradcomm.register(ddp, codec, warmup_steps=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    here = Outcome(rank)
    last = ranks - 1 == rank

    def mark() -> None:
        file = pathlib.Path(folder) / "fault-"
        file.write_text(str(time.time()))
        file.rename(pathlib.Path(folder) / "fault")

    def parameters() -> str:
        return digest(torch.cat([p.detach().flatten() for p in ddp.parameters()]))

    def in_forward() -> None:
        mark()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(3600)
        if fault == "raise":
            raise ArithmeticError("a fault put in by bench/faults.py")

    def in_exchange(*_: Any) -> Any:
        mark()
        if fault == "out of memory":
            raise MemoryError("a fault put in by bench/faults.py")
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupt(gradient: torch.Tensor) -> torch.Tensor:
        mark()
        signal.raise_signal(signal.SIGINT)
        return gradient

    steps = FAULT_STEP + LOSS_STEPS if fault == "loss" else 10**9 if fault == "cut" else FAULT_STEP + 2
    before = parameters()
    step = 0
    try:
        for step in range(steps):
            if last and step == FAULT_STEP:
                if fault in ("kill", "hang", "raise"):
                    in_forward()
                elif fault == "kill in exchange":
                    state._transport.all_gather = in_exchange  # type: ignore[method-assign]
                elif fault == "out of memory":
                    state._memory.flat = in_exchange  # type: ignore[method-assign]
                elif fault == "interrupt":
                    next(ddp.parameters()).register_hook(interrupt)
                else:
                    mark()
            optimizer.zero_grad()
            ddp(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            before = parameters()
    except BaseException as error:
        here.error, here.message = type(error).__name__, str(error)
        raise
    finally:
        here.seconds = time.time() - _fault_time(pathlib.Path(folder))
        here.step, here.intact = step, parameters() == before
        state.close()
        here.threads = sum(t.name.startswith("gradcomm") for t in threading.enumerate())
        known = {k: v for k, v in dataclasses.asdict(here).items() if k not in ("exit_code", "gone")}
        (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(known))


def table(found: dict[str, list[Outcome]]) -> str:
    lines = [
        "| the last rank | others have an error after | and are gone after | what it says |",
        "|---|---|---|---|",
    ]
    for fault, outcomes in found.items():
        others = outcomes[:-1]
        if fault == "loss":
            per_step = 1e3 * max(o.seconds for o in others) / LOSS_STEPS
            lines.append(f"| {FAULTS[fault]} | | | no error; {per_step:.0f} ms a step |")
            continue
        seconds, gone = max(o.seconds for o in others), max(o.gone for o in others)
        # Gloo names its source file first, and advises behind.
        said = re.sub(r"\[\S*/gloo/\S*\] ", "", others[0].message.split(". This is typically")[0])
        lines.append(
            f"| {FAULTS[fault]} | {seconds:.2f} s | {gone:.2f} s | `{others[0].error}: {said}` |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=10, help="of the process group, seconds")
    parser.add_argument("--codec", default="onebit")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {}
    for fault in arguments.faults:
        if fault in LOSSY and (why := missing(Link(loss=LOSSY[fault]))):
            print(f"{fault}: left out, {why}", file=sys.stderr)
            continue
        found[fault] = run(fault, arguments.ranks, arguments.timeout, arguments.codec)
    from bench.machine import describe

    machine = describe()
    setting = f"{arguments.ranks} ranks, {arguments.codec}, timeout {arguments.timeout:g} s"
    print(f"{setting}, {machine['cpu']}, {machine['cores']} cores\n")
    print(table(found))
    if arguments.json is not None:
        rows = {f: [dataclasses.asdict(o) for o in outcomes] for f, outcomes in found.items()}
        arguments.json.write_text(json.dumps({"machine": machine, "faults": rows}, indent=1))


if __name__ == "__main__":
    main()
