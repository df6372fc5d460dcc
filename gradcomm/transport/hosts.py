"""Which ranks share a host."""

from __future__ import annotations

import pathlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Transport

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def hosts(transport: Transport, host: str | None = None) -> list[list[int]]:
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
