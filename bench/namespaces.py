"""Hosts on one machine: network namespaces at a switch, their links of a given rate, delay and loss.

Needs root (CAP_NET_ADMIN) and the commands ``ip`` and ``tc``; ``missing()`` says what is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess

_COUNTER = itertools.count()

#: The name that a host's one network interface has inside it.
INTERFACE = "eth0"


def missing(link: Link) -> str | None:
    """Why no hosts with such links can be made here, or None if they can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no command {command!r} (Debian: apt install iproute2)"
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
    half of it at each end. ``loss``: share of packets that a host's end drops.
    """

    mbit: float | None = None
    delay_ms: float = 0.0
    loss: float = 0.0

    def name(self) -> str:
        rate = "unshaped" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return rate + delay + (f", {self.loss:.2%} loss" if self.loss else "")


class Hosts:
    """A context manager: ``count`` hosts with addresses of one subnet, gone when it is left."""

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
        return ["ip", "netns", "exec", self.names[host], *command]

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
            self._shape(name, INTERFACE, self.link.loss)
            self._shape(self._switch, port, 0.0)

    def _shape(self, namespace: str, device: str, loss: float) -> None:
        """The sender's end of one direction: first delay and loss, then the rate."""
        parent = ["root"]
        if self.link.delay_ms or loss:
            delay = ["delay", f"{self.link.delay_ms / 2}ms"] if self.link.delay_ms else []
            drop = ["loss", f"{100 * loss}%"] if loss else []
            netem = ["handle", "1:", "netem", "limit", "100000", *delay, *drop]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, *netem)
            parent = ["parent", "1:1"]
        if self.link.mbit is not None:
            tbf = ["tbf", "rate", f"{self.link.mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, *tbf)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def bytes_sent() -> int | None:
    """What this host's interface has sent so far, headers and all; None where this is no such host."""
    with contextlib.suppress(OSError), open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes") as file:
        return int(file.read())
    return None
