"""Ranks by host, and a transport that tells a host's own ranks from the others."""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradcomm.stats import Traffic

if TYPE_CHECKING:
    from . import Transport

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def find_hosts(transport: Transport, host: str | None = None) -> list[list[int]]:
    """The ranks of each host, ascending; hosts in the order of their first ranks; alike on every rank.

    Hosts are told apart by what the transport knows (``MpiTransport``: MPI's groups of ranks that share
    memory), else by ``this_host``. ``host``: this rank's host by another name, for all ranks or none.
    Collective.
    """
    if host is None:
        host = host_of(transport)
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(transport.all_gather_object(host)):
        ranks.setdefault(name, []).append(rank)
    return list(ranks.values())


def host_of(transport: Transport) -> str:
    """This rank's host, in the transport's own words if it has any (a method ``host``). Collective."""
    name: str = getattr(transport, "host", this_host)()
    return name


def this_host() -> str:
    """Name and boot: hosts may share a name (``localhost``), and containers of a host its boot."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}"


def check_hosts(hosts: Any, size: int) -> list[list[int]]:
    """``hosts`` as lists of ranks of the transport: lists already, or a two-dimensional DeviceMesh with
    a row for each host. Raises ValueError unless every rank is there once and all hosts have as many.
    """
    if isinstance(hosts, DeviceMesh):
        if hosts.ndim != 2:
            raise ValueError(
                f"gradcomm: hosts is a DeviceMesh of {hosts.ndim} dimensions; use two, the first of "
                "hosts, the second of their ranks"
            )
        hosts = hosts.mesh.tolist()
    good = isinstance(hosts, Sequence) and all(isinstance(h, Sequence) for h in hosts)
    if not good or sorted(r for h in hosts for r in h) != list(range(size)):
        raise ValueError(
            f"gradcomm: hosts={hosts!r}; give a list of ranks for each host, every rank from 0 to "
            f"{size - 1} once"
        )
    counts = sorted({len(h) for h in hosts})
    if len(counts) != 1:
        raise ValueError(
            f"gradcomm: hosts={hosts!r}: between {counts[0]} and {counts[-1]} ranks a host; "
            "exchange='hierarchy' needs as many on each, use 'shard'"
        )
    return [list(h) for h in hosts]


class HostsTransport:
    """``whole``, and two parts of it: ``local``, the ranks of this host, and ``cross``, one rank of each
    host. What they carry counts as ``whole``'s traffic. ``whole`` is its owner's to close."""

    def __init__(self, whole: Transport, hosts: list[list[int]]) -> None:
        """Collective over ``whole``. ``hosts``: as ``check_hosts`` returns them."""
        self._whole = whole
        self.rank, self.size = whole.rank, whole.size
        self.hosts = hosts
        self.local = whole.split(hosts)
        self.cross = whole.split([list(column) for column in zip(*hosts, strict=True)])
        self.local.traffic = Traffic(into=whole.traffic)
        self.cross.traffic = Traffic(into=whole.traffic)

    @property
    def traffic(self) -> Traffic:
        return self._whole.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._whole.traffic = traffic

    def all_reduce(self, tensor: Tensor) -> None:
        self._whole.all_reduce(tensor)

    def all_gather(self, rows: Tensor) -> None:
        self._whole.all_gather(rows)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        self._whole.all_to_all(out, rows)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self._whole.all_gather_object(item)

    def split(self, members: list[list[int]]) -> Transport:
        return self._whole.split(members)

    def close(self) -> None:
        self.cross.close()
        self.local.close()
