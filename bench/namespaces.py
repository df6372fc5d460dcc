"""Hosts on one machine: network namespaces at a switch, their links of a given rate, delay and loss.

Needs root (CAP_NET_ADMIN) and the commands ``ip`` and ``tc``; ``missing()`` says what is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

_COUNTER = itertools.count()

#: The name that a host's one network interface has inside it.
INTERFACE = "eth0"


def missing(link: Link) -> str | None:
    """Why no hosts with such links can be made here, or None if they can."""
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
    packages |= {"nft": "nftables"} if link.loss else {}
    for command, package in packages.items():
        if shutil.which(command) is None:
            return f"there is no command {command!r} (Debian: apt install {package})"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(1, link):  # a queueing discipline may lack its kernel module, too
            return None
    except RuntimeError as problem:
        return str(problem)


@dataclasses.dataclass(frozen=True)
class Link:
    """Of every host to the switch, the same in both directions.

    ``mbit``: megabits a second, None for as fast as the machine copies. ``delay_ms``: added one way,
    half of it at each end. ``loss``: share of the packets for a host that do not reach it.
    """

    mbit: float | None = None
    delay_ms: float = 0.0
    loss: float = 0.0

    def name(self) -> str:
        rate = "unshaped" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return rate + delay + (f", {self.loss:.2%} loss" if self.loss else "")


class Hosts:
    """A context manager: ``count`` hosts with names of their own and addresses of one subnet, gone when
    it is left."""

    def __init__(self, count: int, link: Link) -> None:
        self.link = link
        tag = f"gc{os.getpid()}n{next(_COUNTER)}"
        self._switch = f"{tag}s"
        self.names = [f"{tag}h{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._switch):
            # With a namespace go its interfaces and their other ends.
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def command(self, host: int, command: list[str]) -> list[str]:
        """The command, as run on a host."""
        name = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        rename = ["unshare", "--uts", "sh", "-c", name, self.names[host]]
        return ["ip", "netns", "exec", self.names[host], *rename, *command]

    def cut(self, host: int) -> None:
        """Pulls the host's cable: nothing comes in or goes out, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            _run("ip", "netns", "add", name)
            pair = ["type", "veth", "peer", "name", INTERFACE, "netns", name]
            _run("ip", "-n", self._switch, "link", "add", port, *pair)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._shape(name, INTERFACE)
            self._shape(self._switch, port)
            if self.link.loss:
                self._lose(name)

    def _lose(self, namespace: str) -> None:
        """By the firewall, since fewer kernels have netem."""
        nft = ["ip", "netns", "exec", namespace, "nft"]
        drop = f"iifname {INTERFACE} numgen random mod 10000 < {round(1e4 * self.link.loss)} drop"
        _run(*nft, "add table ip loss")
        _run(*nft, "add chain ip loss in { type filter hook input priority 0; }")
        _run(*nft, f"add rule ip loss in {drop}")

    def _shape(self, namespace: str, device: str) -> None:
        """The sender's end of one direction: first delay, then the rate."""
        parent = ["root"]
        if self.link.delay_ms:
            delay = ["delay", f"{self.link.delay_ms / 2}ms"]
            netem = ["handle", "1:", "netem", "limit", "100000", *delay]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, *netem)
            parent = ["parent", "1:1"]
        if self.link.mbit is not None:
            tbf = ["tbf", "rate", f"{self.link.mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, *tbf)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def run(
    script: str, arguments: list[str], ranks: int, link: Link | None, per_host: int = 1
) -> list[Any]:
    """Runs ``python script *arguments`` on ranks, ``per_host`` on each host, neighbours together, or all
    on loopback if ``link`` is None; returns what each gave to ``answer``.

    One thread a rank. Every rank is told its number and a store by ``add_rank_arguments``' options.
    Raises SystemExit when a rank fails; no process and no namespace is left behind.
    """
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradcomm-")))
        hosts = None if link is None else stack.enter_context(Hosts(-(-ranks // per_host), link))
        interface = "lo" if hosts is None else INTERFACE
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        processes = []
        for rank in range(ranks):
            own = ["--rank", str(rank), "--folder", str(folder)]
            command = [sys.executable, script, *arguments, *own]
            if hosts is not None:
                command = hosts.command(rank // per_host, command)
            processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        try:
            waiting = dict(enumerate(processes))
            while waiting:
                time.sleep(0.1)
                for rank in [r for r, p in waiting.items() if p.poll() is not None]:
                    if code := waiting.pop(rank).returncode:
                        raise SystemExit(f"rank {rank} ended with {code}; its error is above")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(_answer(folder, rank).read_text()) for rank in range(ranks)]


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """``rank``: None in the process that the user started."""
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)


def init_rank(arguments: argparse.Namespace, ranks: int) -> None:
    """In a rank: the default process group, over Gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{arguments.folder / 'store'}"
    dist.init_process_group("gloo", store, rank=arguments.rank, world_size=ranks)


def answer(arguments: argparse.Namespace, value: Any) -> None:
    """In a rank: what ``run`` returns for it."""
    _answer(arguments.folder, arguments.rank).write_text(json.dumps(value))


def _answer(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"{rank}.json"


def bytes_sent() -> int | None:
    """What this host's interface has sent so far, headers and all; None where this is no such host."""
    with contextlib.suppress(OSError), open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes") as file:
        return int(file.read())
    return None
