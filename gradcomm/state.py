"""The state of the hook: options, parameters, memory, lane; what the user saves and reads."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradcomm import checks
from gradcomm.auto import fastest
from gradcomm.buckets import Buckets
from gradcomm.clip import Clip
from gradcomm.codec import Auto, Codec, parse
from gradcomm.exchange import choose
from gradcomm.handshake import agree
from gradcomm.lane import Lane
from gradcomm.memory import Memory
from gradcomm.plan import MIN_NUMEL, PlainRule, Plan
from gradcomm.runner import Runner
from gradcomm.stats import Meter, Traffic
from gradcomm.transport import Transport
from gradcomm.transport.choose import choose_transport
from gradcomm.transport.hosts import HostsTransport, check_hosts, find_hosts
from gradcomm.verify import CheckedTransport
from gradcomm.version import __version__

logger = logging.getLogger("gradcomm")

_Recipe = Literal["recipe"]


class CommState:
    """What ``comm_hook`` needs: codec, options, memory and lane. One for each DDP model.

    Args:
        codec: a codec, or its name, ``"topk:density=0.01"``, say.
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
            so the optimizer's own must be 0. It costs one float32 an element. 0: off.
        error_feedback: whether what was not sent is remembered and added the next time.
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
        codec: Codec | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        transport: Any = None,
        warmup_steps: int | _Recipe = "recipe",
        plain: PlainRule = None,
        min_numel: int = MIN_NUMEL,
        clip_norm: float | Literal["auto"] | _Recipe | None = "recipe",
        error_feedback: bool | _Recipe = "recipe",
        momentum: float = 0.0,
        exchange: str | None = None,
        hosts: Any = None,
        seed: int = 0,
        measure_every: int = 0,
        verify: bool = False,
    ) -> None:
        self.codec = parse(codec) if isinstance(codec, str) else checks.codec(codec)
        recipe = self.codec.recipe
        self.warmup_steps = recipe.warmup_steps if warmup_steps == "recipe" else warmup_steps
        self.clip_norm = recipe.clip_norm if clip_norm == "recipe" else clip_norm
        self.error_feedback = recipe.error_feedback if error_feedback == "recipe" else error_feedback
        self.seed, self.measure_every, self.verify = seed, measure_every, verify
        self.momentum = momentum
        checks.options(
            self.warmup_steps, self.clip_norm, self.error_feedback, momentum, min_numel, measure_every
        )
        self._plain_rule, self._min_numel = plain, min_numel
        self._exchange, self._hosts = exchange, hosts
        if exchange is not None:
            choose(self.codec, 1, exchange)  # a bad name is told now, not in the first backward
        self._group, self._transport_wanted = process_group, transport
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._bound = False
        self._step = 0
        self._seen: set[int] = set()
        self._graph_task = -1
        self._pending_state: dict[str, Any] | None = None

    # ---- set-up -----------------------------------------------------------------------------

    def bind(
        self,
        named: list[tuple[str, Tensor]],
        device: torch.device,
        complete: bool,
        find_unused: bool = True,
    ) -> None:
        """Makes the lane and compares with the other ranks. Collective over the group.

        ``named``: the parameters, all of them if ``complete``. ``find_unused``: whether a step may leave
        some without a gradient. Raises DisagreementError on every rank when ranks differ, or when one
        of them has an error.
        """
        group = self._group if self._group is not None else dist.group.WORLD
        assert group is not None
        error: Exception | None = None
        hosts: list[list[int]] | None = None
        self._transport = choose_transport(self._transport_wanted, group, device)
        ranks = self._transport.size
        if isinstance(self.codec, Auto):
            self.codec, measured = fastest(self._transport, device)
            logger.info("gradcomm: auto chose %s; ms to exchange 4 MiB: %s", self.codec.spec(), measured)
        self._chosen = chosen = choose(self.codec, ranks, self._exchange)
        self._plan = plan = Plan(self.codec, chosen, self._plain_rule, self._min_numel)
        self._memory = Memory(ranks)
        self._buckets = Buckets(plan, self._memory)
        self._runner = Runner(
            transport=self._transport,
            memory=self._memory,
            clip=Clip(self.clip_norm) if self.clip_norm is not None else None,
            warmup_steps=self.warmup_steps,
            error_feedback=self.error_feedback,
            momentum=self.momentum,
            seed=self.seed,
            measure_every=self.measure_every,
            verify=self.verify,
            find_unused=find_unused,
        )
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
            "warmup_steps": self.warmup_steps,
            "clip_norm": self.clip_norm,
            "error_feedback": self.error_feedback,
            "momentum": self.momentum,
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
        self._runner.transport = self._carrier(hosts)
        self._lane = Lane()
        self._bound = True
        if self._transport.rank == 0:
            logger.info("gradcomm: %s", self.describe())
        if self._pending_state is not None:
            self._take_state(self._pending_state)

    def _carrier(self, hosts: list[list[int]] | None) -> Transport:
        """What the exchange uses. Collective."""
        whole = CheckedTransport(self._transport) if self.verify else self._transport
        if self._chosen != "hierarchy":
            return whole
        found = check_hosts(find_hosts(whole), whole.size) if hosts is None else hosts
        return HostsTransport(whole, found)

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Goes where the model's process group goes (``_update_process_group``)."""
        self._ddp = weakref.ref(ddp)

    def _follow(self) -> None:
        """If DDP has another process group now, so has the state. Collective over the new one."""
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or ddp.process_group is self._group:
            return
        if self._transport_wanted is not None:
            raise RuntimeError(
                "gradcomm: DDP's process group was changed, and transport= still has the ranks of the "
                "old one; register without transport=, which follows, or on a newly wrapped model"
            )
        self._lane.drain()
        self._buckets.release()  # the owners' residuals go back to ranks, times the old number of them
        old = self._transport
        old.close()
        self._group = ddp.process_group
        self._transport = choose_transport(None, self._group, next(ddp.parameters()).device)
        self._transport.traffic = old.traffic
        self._memory.ranks = self._transport.size
        self._plan.exchange = self._chosen = choose(self.codec, self._transport.size, self._exchange)
        self._runner.transport = self._carrier(None)

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
            f"{'on' if self.error_feedback else 'off'}; momentum correction "
            f"{self.momentum or 'off'}"
        )

    # ---- each bucket ------------------------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hands a bucket to the lane; the future completes with its mean over ranks, in place."""
        buffer, params = bucket.buffer(), bucket.parameters()
        if not self._bound:
            checks.cpu(buffer.device)
            self.bind([(f"parameter {i}", p) for i, p in enumerate(params)], buffer.device, False)
        self._follow()
        keys = tuple(self._buckets.add(p).key for p in params)
        self._begin(keys)
        step, warm = self._step, self._step < self.warmup_steps
        if stale := self._buckets.stale(keys, warm):
            self._lane.drain()  # what runs there may still write to the old layout
            if self._runner.clip is not None:
                for old in stale:
                    self._runner.clip.forget(old)
        parts = self._buckets.parts(keys, buffer, warm)
        job = functools.partial(self._runner.run, parts, keys, buffer, step)
        future = self._lane.submit(job, buffer, f"step {step}, bucket {bucket.index()}")
        if torch._C._current_graph_task_id() == -1:
            self._lane.drain()  # no backward (DDP.join): nobody asks later whether it failed
        return future

    def _begin(self, keys: tuple[int, ...]) -> None:
        """A parameter that comes a second time begins a new step. Buckets' indices would not do: with
        ``static_graph`` they are all 0 in the first step."""
        if not self._seen.isdisjoint(keys):
            self._step += 1
            self._seen.clear()
        self._seen.update(keys)
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if task != -1:
                # Runs in the thread that called backward, before DDP's own: raises there what the
                # lane ran into, with its traceback.
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        start = time.perf_counter()
        self._graph_task = -1
        self._lane.drain()
        self._runner.meter.waited += time.perf_counter() - start

    # ---- what the user sees -----------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps begun so far: backward passes that synchronized."""
        return self._step + bool(self._seen)

    def stats(self) -> dict[str, Any]:
        """What was measured since registering.

        ``steps``; ``bytes_sent``, ``bytes_received`` by this rank, as the transport was given them;
        ``bytes_plain``, what an all-reduce of the gradients would have sent; ``ratio`` of the two;
        ``encode_ms``, ``wire_ms``, ``decode_ms``: means a step, in the lane, mostly hidden behind
        backward; ``wait_ms``: what backward waited for the lane; ``sent_by_codec``,
        ``elements_by_codec``: totals; ``compression_error``: mean of the relative errors sampled
        (``measure_every``), else None; ``residual_norm`` (computed now), ``memory_bytes`` (residuals),
        ``scratch_bytes`` (payloads).
        """
        if not self._bound:
            return Meter().report(0, Traffic())
        self._lane.drain()
        report = self._runner.meter.report(self.step, self._transport.traffic)
        report["residual_norm"] = self._memory.norm()
        report["memory_bytes"] = self._memory.bytes()
        report["scratch_bytes"] = self._runner.scratch.bytes()
        return report

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step count, by parameter name; tensors are copies.

        Each rank saves its own. Resume with the same codec and the same number of ranks.
        """
        checks.bound(self._bound, "state_dict")
        self._lane.drain()
        names = {p.key: p.name for p in self._buckets.parameters}
        return {
            "version": __version__,
            "codec": self.codec.spec(),
            "rank": self._transport.rank,
            "ranks": self._transport.size,
            "step": self.step,
            "memory": self._memory.state(names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what ``state_dict`` of the same rank returned.

        Raises ValueError when it is of another codec, rank, number of ranks or model. Before the
        first step of a state that was not made by ``register`` it is checked in that step.
        """
        if self._bound:
            self._lane.drain()
            self._take_state(state)
        else:
            self._pending_state = state

    def _take_state(self, state: dict[str, Any]) -> None:
        keys = {p.name: p.key for p in self._buckets.parameters}
        sizes = {p.name: p.tensor.numel() for p in self._buckets.parameters}
        checks.state(state, self.codec.spec(), self._transport.rank, self._transport.size, sizes)
        self._pending_state = None
        self._buckets.clear()
        self._memory.load(state["memory"], keys)
        self._step, self._seen = state["step"], set()

    def close(self) -> None:
        """Ends the lane's thread and the transport it made. The hook cannot be called after it."""
        if self._bound:
            self._lane.close()
            if self._runner.transport is not self._transport:
                self._runner.transport.close()
            if self._transport is not self._transport_wanted:
                self._transport.close()
            self._bound = False
