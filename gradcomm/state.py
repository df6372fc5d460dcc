"""The state of the hook: options, parameters, memory, lane; what the user saves and reads."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from gradcomm import checks
from gradcomm.auto import CANDIDATES, fastest
from gradcomm.backward import Backward
from gradcomm.buckets import Buckets
from gradcomm.clip import Clip
from gradcomm.codec import Auto
from gradcomm.course import Recipe
from gradcomm.exchange import choose
from gradcomm.handshake import agree
from gradcomm.kernels import prepare
from gradcomm.lane import make_lane
from gradcomm.memory import Memory
from gradcomm.plan import MIN_NUMEL, PlainRule
from gradcomm.runner import Runner
from gradcomm.schedule import CodecRule, Schedule
from gradcomm.stats import Meter, Traffic
from gradcomm.streams import Streams
from gradcomm.transport.hosts import check_hosts
from gradcomm.version import __version__

logger = logging.getLogger("gradcomm")


class CommState(Backward):
    """What ``comm_hook`` needs: codec, options, memory and lane. One for each DDP model.

    Args:
        codec: a codec, or its name, ``"topk:density=0.01"``, say; or a schedule of several by the step
            from which each holds, ``{0: "none", 100: "topk:density=0.05", 1000: "topk"}``. What a change
            does to residuals: see ``set_codec``.
        process_group: the ranks that average; by default all. Must be the group that DDP uses.
        transport: who carries the payloads: by default a new process group like ``process_group``. An
            ``mpi4py`` communicator of the same ranks in the same order, or a ``Transport``, which the
            state does not close.
        warmup_steps: so many first steps are exchanged plain.
        plain: parameters that always go plain, besides all of fewer than two dimensions and all
            smaller than ``min_numel``: parameters, their names or ``fnmatch`` patterns, or a
            predicate on (name, parameter).
        min_numel: parameters with fewer elements go plain.
        clip_norm: each rank's gradient is clipped to this norm before the memory sees it
            (``gradcomm.clip``), and a clip of your own after backward should go: it would throw away
            what the memory believes was sent. ``"auto"``: to twice the running mean of the norm, which
            only takes spikes off. None: no clipping.
        momentum: momentum correction (Lin et al., "Deep Gradient Compression", 2018), for SGD with
            momentum: each rank's own momentum u = momentum u + g is exchanged in place of its gradient,
            so the optimizer's own must be 0. It costs one float32 an element. 0: off. With weight decay
            use ``gradcomm.optim.SGD``.
        nesterov: with ``momentum``: g + momentum u is exchanged in place of u.
        error_feedback: whether what was not sent is remembered and added the next time. ``"worker"``:
            by the ranks, not by the owners of chunks in the shard exchange, where it costs accuracy
            (docs/results.md) and saves 4 / ranks bytes an element.
        residual: how what a rank remembers rests between exchanges: ``"float32"``, or ``"int8"``, 1.03
            bytes an element in place of 4, rounded at random (after Xie et al., "LoCo", 2024). It costs
            two more passes over the bucket. Not for powersgd or the hierarchy; owners of chunks keep
            float32.
        exchange: ``"reduce"``, ``"gather"``, ``"shard"`` or ``"hierarchy"``; by default chosen by codec
            and ranks.
        hosts: for ``exchange="hierarchy"``, which ranks share a host: a list of ranks for each, or a
            DeviceMesh of two dimensions, hosts first; by default found by name. As many on each.
        seed: of all random numbers; the same on every rank.
        measure_every: every so many steps the exact mean is exchanged too, to measure the compression
            error that ``stats()`` reports. 0: never, since it costs a plain exchange.
        verify: checks every payload by a checksum, and the result's hash across ranks after every bucket
            (slow; for debugging).

    ``"recipe"``, the default of three options, is what the codec's docstring recommends.

    Raises ValueError for a bad codec or option.
    """

    def __init__(
        self,
        codec: CodecRule,
        *,
        process_group: dist.ProcessGroup | None = None,
        transport: Any = None,
        warmup_steps: int | Recipe = "recipe",
        plain: PlainRule = None,
        min_numel: int = MIN_NUMEL,
        clip_norm: float | Literal["auto"] | Recipe | None = "recipe",
        error_feedback: bool | Literal["worker"] | Recipe = "recipe",
        momentum: float = 0.0,
        nesterov: bool = False,
        residual: Literal["float32", "int8"] = "float32",
        exchange: str | None = None,
        hosts: Any = None,
        seed: int = 0,
        measure_every: int = 0,
        verify: bool = False,
    ) -> None:
        self._schedule = Schedule(codec)
        self._wanted = dict(
            codec=self._schedule.rule, warmup_steps=warmup_steps, plain=plain, min_numel=min_numel,
            clip_norm=clip_norm, error_feedback=error_feedback, momentum=momentum, nesterov=nesterov,
            residual=residual, exchange=exchange, hosts=hosts, seed=seed, measure_every=measure_every,
            verify=verify,
        )  # fmt: skip
        self._use(self._schedule.at(0))
        self.warmup_steps = self.codec.recipe.warmup_steps if warmup_steps == "recipe" else warmup_steps
        self.seed, self.measure_every, self.verify = seed, measure_every, verify
        self.momentum, self.nesterov = momentum, nesterov
        checks.options(
            self.warmup_steps, self.clip_norm, self.error_feedback, momentum, nesterov, min_numel,
            measure_every,
        )  # fmt: skip
        self._plain_rule, self._min_numel, self.residual = plain, min_numel, residual
        self._exchange, self._hosts = exchange, hosts
        self._schedule.check_exchange(exchange)
        self._schedule.check_residual(residual, exchange)
        self.process_group, self._transport_wanted = process_group, transport
        self._start()

    # ---- set-up -----------------------------------------------------------------------------

    def bind(self, named: list[tuple[str, Tensor]], complete: bool, find_unused: bool = True) -> None:
        """Makes the lane and compares with the other ranks. Collective over the group.

        ``named``: the parameters, all of them if ``complete``. ``find_unused``: whether a step may leave
        some without a gradient. Raises DisagreementError on every rank when ranks differ, or when one
        of them has an error.
        """
        checks.still_open(self._closed)
        streams = Streams(checks.one_device(named))
        with streams.use(streams.current()):  # object collectives go by the current device
            self._bind(named, streams, complete, find_unused)

    def _bind(
        self, named: list[tuple[str, Tensor]], streams: Streams, complete: bool, find_unused: bool
    ) -> None:
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        assert group is not None
        device = streams.device
        error: Exception | None = None
        hosts: list[list[int]] | None = None
        self._open_transports(group, device)
        ranks = self._transport.size
        if isinstance(self.codec, Auto):
            prepare(CANDIDATES, device)
            self.codec, measured = fastest(self._transport, device)
            logger.info("gradcomm: auto chose %s; ms to exchange 4 MiB: %s", self.codec.spec(), measured)
        self._chosen = chosen = choose(self.codec, ranks, self._exchange)
        prepare([self.codec], device)
        plan = self._plan(self.codec)
        self._memory = Memory(ranks, device, self.residual)
        self._buckets = Buckets(plan, self._memory)
        runner = Runner(
            transport=self._transport,
            memory=self._memory,
            clip=Clip(self.clip_norm) if self.clip_norm is not None else None,
            since=self._since,
            error_feedback=self.error_feedback,
            momentum=self.momentum,
            nesterov=self.nesterov,
            seed=self.seed,
            measure_every=self.measure_every,
            verify=self.verify,
            find_unused=find_unused,
            meter=Meter(streams),
        )
        self._runners = [runner, *(runner.beside(t) for t in self._transports[1:])]
        try:
            for name, tensor in named:
                self._buckets.add(tensor, name)
            if complete:
                plan.check_used()
            if chosen == "hierarchy" and self._hosts is not None:
                hosts = check_hosts(self._hosts, ranks)
        except Exception as problem:
            error = problem
        mine = {
            "error": None if error is None else str(error),
            "version": __version__,
            "codec": self.codec.spec(),
            "schedule": self._schedule.spec() if self._schedule.scheduled else None,
            "warmup_steps": self.warmup_steps,
            "clip_norm": self.clip_norm,
            "error_feedback": self.error_feedback,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "residual": self.residual,
            "exchange": chosen,
            "hosts": hosts,
            "seed": self.seed,
            "measure_every": self.measure_every,
            "verify": self.verify,
            "parameters (name, shape, dtype, plain)": [
                (p.name, tuple(p.tensor.shape), str(p.tensor.dtype), p.plain)
                for p in self._buckets.parameters
            ],
        }
        try:
            agree(self._transport, mine)
        except Exception as disagreement:
            raise (error or disagreement) from (disagreement if error else None)
        self._carry(chosen)
        self._lane = make_lane(streams, getattr(self._transport, "enqueues", False), self._baton)
        self._bound, self._complete = True, complete
        if self._transport.rank == 0:
            logger.info("gradcomm: %s", self.describe())
        if complete:
            self._take_pending()

    def describe(self) -> str:
        """The recipe in one line."""
        everything = self._buckets.parameters
        plain = [p for p in everything if p.plain]
        total = sum(p.tensor.numel() for p in everything)
        share = sum(p.tensor.numel() for p in plain) / max(1, total)
        return (
            f"{self.codec.spec()} by {self._chosen} among {self._transport.size} ranks; "
            f"first {self.warmup_steps} steps plain; {len(plain)} of {len(everything)} parameters "
            f"({share:.1%} of elements) always plain; local clip "
            f"{'off' if self.clip_norm is None else self.clip_norm}; error feedback "
            f"{'on' if self.error_feedback else 'off'}"
            f"{', residuals at rest in 8 bits' * (self.residual == 'int8')}; momentum correction "
            f"{self.momentum or 'off'}{', Nesterov' * self.nesterov}"
        )

    # ---- what the user sees -----------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What was measured since registering.

        ``steps``; ``bytes_sent``, ``bytes_received`` by this rank, as the transport was given them;
        ``bytes_plain``, what an all-reduce of the gradients would have sent; ``ratio`` of the two;
        ``encode_ms``, ``wire_ms``, ``decode_ms``: means a step, in the lane, mostly hidden behind
        backward; ``wait_ms``: what backward waited for the lane (on a GPU: its stream);
        ``sent_by_codec``, ``elements_by_codec``: totals; ``compression_error``: mean of the relative
        errors sampled (``measure_every``), else None; ``residual_norm`` (computed now),
        ``memory_bytes`` (residuals), ``scratch_bytes`` (payloads).
        """
        if not self._bound:
            return Meter().report(0, Traffic())
        self._lane.drain()
        traffic = Traffic.of(transport.traffic for transport in self._transports)
        report = self._runner.meter.report(self.step, traffic)
        report["residual_norm"] = self._memory.norm()
        report["memory_bytes"] = self._memory.bytes()
        report["scratch_bytes"] = sum(runner.scratch.bytes() for runner in self._runners)
        return report

    def close(self) -> None:
        """Ends the lane's thread and the transport it made. A backward after it raises RuntimeError."""
        self._closed = True
        if self._bound:
            self._lane.close()
            self._leave_hosts()
            if self._transport is not self._transport_wanted:
                self._close_transports()
            self._bound = False
