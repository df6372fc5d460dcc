"""Where training stands, and how it changes course: steps, codec, loss scale."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcomm import checks
from gradcomm.auto import fastest
from gradcomm.buckets import BucketKey, Buckets
from gradcomm.clip import Clip
from gradcomm.codec import Auto, Codec, Dense
from gradcomm.exchange import choose
from gradcomm.handshake import agree
from gradcomm.kernels import prepare
from gradcomm.lane import Baton, Lane
from gradcomm.memory import Memory
from gradcomm.plan import PlainRule, Plan
from gradcomm.replay import Replay
from gradcomm.runner import Runner
from gradcomm.scale import LossScale
from gradcomm.schedule import Schedule
from gradcomm.stats import Traffic
from gradcomm.transport import Transport
from gradcomm.transport.choose import choose_transport
from gradcomm.transport.group import GroupTransport
from gradcomm.transport.hosts import HostsTransport, check_hosts, find_hosts
from gradcomm.verify import CheckedTransport

logger = logging.getLogger("gradcomm")

Recipe = Literal["recipe"]


class Course:
    """The part of ``CommState`` that knows what was done so far and what comes next."""

    codec: Codec
    warmup_steps: int
    clip_norm: float | Literal["auto"] | None
    error_feedback: bool | Literal["worker"]
    momentum: float
    nesterov: bool
    residual: Literal["float32", "int8"]
    seed: int
    _schedule: Schedule
    _wanted: dict[str, Any]  # the constructor's arguments, less who carries what
    _exchange: str | None
    _hosts: Any
    _chosen: str
    _plain_rule: PlainRule
    _min_numel: int
    process_group: dist.ProcessGroup | None
    _transports: list[Transport]  # one for each way of the lane
    _baton: Baton | None  # of two ways
    _transport_wanted: Any
    verify: bool
    _memory: Memory
    _buckets: Buckets
    _runners: list[Runner]  # one for each way of the lane
    _lane: Lane

    def _start(self) -> None:
        self._bound = self._closed = False
        self._complete = False  # whether all parameters are known
        self._agreed = False  # whether ranks have compared where they stand since the last load
        self._step = 0
        self._since = self.warmup_steps  # the first step that is compressed
        self._flush_at = -1
        self._seen: set[int] = set()
        self._turn = 0  # the next bucket's number in its step
        self._graph_task = -1
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._scale = LossScale()
        self._pending: tuple[Any, bool] | None = None  # a state, strict: to be taken in the first step
        self._replay: Replay | None = None
        self._layout: list[BucketKey] = []  # that the replay is to follow

    @property
    def step(self) -> int:
        """Steps begun so far: backward passes that synchronized."""
        return self._step + bool(self._seen)

    # ---- another codec ------------------------------------------------------------------------

    def set_codec(self, codec: Codec | str, *, exchange: str | None = None) -> None:
        """Another codec, or other options of it, from the next step on; it ends a schedule.

        Residuals are carried over where the new codec uses error feedback and takes the same
        parameters. Where it does not, the next step is exchanged plain with all residuals added
        (``flush``), and the new codec begins after it. Momentum is carried over, PowerSGD's factors
        and units begin anew. There is no new warm-up; a density ramp, or first refreshes,
        come again only after ``"none"``. Clipping and error feedback follow the new codec's
        recipe unless ``register`` was told otherwise.
        ``exchange``: as in ``register``; by default chosen.

        Collective, between two steps. Raises ValueError for a bad codec, DisagreementError on every rank
        when ranks differ or one of them has an error.
        """
        checks.between_steps("set_codec")
        error: Exception | None = None
        try:
            schedule = Schedule(codec)
            schedule.check_exchange(exchange)
            schedule.check_residual(self.residual, exchange)
        except Exception as problem:
            if not self._bound:
                raise
            error = problem
        if self._bound:
            said = None if error else schedule.at(0).spec()
            self._agree("set_codec", {"codec": said, "exchange": exchange}, error)
        self._schedule, self._exchange = schedule, exchange
        self._wanted.update(codec=schedule.at(0), exchange=exchange)
        if self._bound:
            self._change(schedule.at(0), self.step)
        else:
            self._use(schedule.at(0))

    def flush(self) -> None:
        """The next step is exchanged plain with all residuals added: none is left after it. For the last
        step before an evaluation or the end of training. A residual stays where that step's mean is not
        finite. Collective, between two steps."""
        checks.between_steps("flush")
        checks.bound(self._bound, "flush")
        self._agree("flush", {}, None)
        self._flush_at = self.step

    def attach_scaler(self, scaler: Any) -> None:
        """Follows the loss scale of a ``torch.amp.GradScaler``: when it moves from s to s', residuals,
        momentum and running norms are multiplied by s'/s before the next step, and a ``clip_norm`` is
        taken to be of the gradient before scaling. On every rank. Raises TypeError for what is no
        scaler."""
        self._scale.attach(scaler)

    def _agree(self, doing: str, mine: dict[str, Any], error: Exception | None) -> None:
        with self._lane.between():
            try:
                told = {"error": None if error is None else str(error), "step": self.step, **mine}
                remedy = f"call {doing} on every rank alike, after the same step"
                agree(self._transport, told, doing, remedy)
            except Exception as disagreement:
                raise (error or disagreement) from (disagreement if error else None)

    def _use(self, codec: Codec) -> None:
        """Options that follow the codec."""
        self.codec = codec
        recipe, clip, feedback = codec.recipe, self._wanted["clip_norm"], self._wanted["error_feedback"]
        self.clip_norm = recipe.clip_norm if clip == "recipe" else clip
        self.error_feedback = recipe.error_feedback if feedback == "recipe" else feedback

    def _plan(self, codec: Codec) -> Plan:
        chosen = choose(codec, self._transport.size, self._exchange)
        return Plan(codec, chosen, self._plain_rule, self._min_numel)

    def _change(self, codec: Codec, at: int) -> None:
        """The codec from step ``at``, the next one, on. The same on every rank."""
        with self._lane.between():
            device = self._memory.device or torch.device("cpu")
            if isinstance(codec, Auto):
                codec, _ = fastest(self._transport, device)
            old, everything = self.codec, self._buckets.parameters
            kept = {p.key for p in everything if not p.plain} if self.error_feedback else set()
            plan = self._plan(codec)
            prepare([codec], device)
            if plan.exchange != self._chosen:
                self._leave_hosts()
                self._carry(plan.exchange)
            self._use(codec)
            self._chosen = plan.exchange
            self._buckets.change(plan)
            self._memory.settle()
            for slot in ("q", "rms"):
                self._memory.forget(slot)
            if old.by_index != codec.by_index:
                for p in everything:
                    self._memory.reorder(p.key, p.tensor, codec.by_index)
            if any(p.plain or not self.error_feedback for p in everything if p.key in kept):
                self._flush_at = at
            if isinstance(old, Dense):
                self._since = max(at, self.warmup_steps)
            self._follow()
        if self._transport.rank == 0:
            logger.info("gradcomm: from step %d on %s by %s", at, codec.spec(), self._chosen)

    def _follow(self) -> None:
        """Tells the runner."""
        clip = self._runner.clip
        if self.clip_norm is None:
            clip = None
        elif clip is None or clip.norm != self.clip_norm:
            clip = Clip(self.clip_norm)
        for runner in self._runners:
            runner.since, runner.seed, runner.error_feedback = (
                self._since,
                self.seed,
                self.error_feedback,
            )
            runner.clip = clip

    def _begin_step(self) -> None:
        """What is due before the first bucket of a step."""
        self._turn = 0
        codec = self._schedule.change(self._step)
        if codec is not None and codec != self.codec:
            self._change(codec, self._step)
        ratio = self._scale.move()
        if ratio is not None:
            with self._lane.between():
                self._memory.scale(ratio)
                if self._runner.clip is not None:
                    self._runner.clip.scale(ratio)
        if self._runner.clip is not None and self._scale.attached:
            self._runner.clip.loss_scale = 1.0 if self._scale.last is None else self._scale.last

    # ---- who carries it, and another process group --------------------------------------------

    @property
    def _transport(self) -> Transport:
        return self._transports[0]

    @property
    def _runner(self) -> Runner:
        """The first; clip, meter, memory and options are the same for all."""
        return self._runners[0]

    def _open_transports(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """One, or a second one where a transport can have one. Collective."""
        first = choose_transport(self._transport_wanted, group, device)
        second = first.second() if self._transport_wanted is None and hasattr(first, "second") else None
        self._transports, self._baton = [first], None
        if second is not None:
            self._transports.append(second)
            self._share(Baton())

    def _share(self, baton: Baton) -> None:
        self._baton = baton
        for transport in self._transports:
            assert isinstance(transport, GroupTransport)
            transport.aside = baton.aside

    def _close_transports(self) -> None:
        for transport in self._transports:
            transport.close()

    def _carry(self, chosen: str) -> None:
        """What an exchange goes over from here on. Collective."""
        for runner, transport in zip(self._runners, self._transports, strict=True):
            runner.transport = self._carrier(chosen, transport)

    def _carrier(self, chosen: str, transport: Transport) -> Transport:
        whole = CheckedTransport(transport) if self.verify else transport
        if chosen != "hierarchy":
            return whole
        found = find_hosts(whole) if self._hosts is None else self._hosts
        return HostsTransport(whole, check_hosts(found, whole.size))

    def _leave_hosts(self) -> None:
        """Frees the parts of the transport that the hierarchy had."""
        for runner in self._runners:
            if isinstance(runner.transport, HostsTransport):
                runner.transport.close()

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Goes where the model's process group goes (``_update_process_group``)."""
        self._ddp = weakref.ref(ddp)

    def _follow_group(self) -> None:
        """If DDP has another process group now, so has the state. Collective over the new one."""
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or ddp.process_group is self.process_group:
            return
        if self._transport_wanted is not None:
            raise RuntimeError(
                "gradcomm: DDP's process group was changed, and transport= still has the ranks of the "
                "old one; register without transport=, which follows, or on a newly wrapped model"
            )
        with self._lane.between():
            self._leave_hosts()
            spent, baton = Traffic.of(transport.traffic for transport in self._transports), self._baton
            self._close_transports()
            self.process_group = ddp.process_group
            device = next(ddp.parameters()).device
            self._open_transports(self.process_group, device)
            if len(self._transports) != len(self._runners):
                raise RuntimeError(
                    "gradcomm: DDP's process group was changed to one of another backend; register on a "
                    "newly wrapped model"
                )
            self._transport.traffic = spent
            if self._baton is not None and baton is not None:
                self._share(baton)  # which the lane has
            plan = self._plan(self.codec)
            # Owners' residuals go back to ranks, times the old number of them.
            self._buckets.change(plan)
            self._memory.settle()
            self._memory.ranks, self._chosen = self._transport.size, plan.exchange
            self._carry(self._chosen)
