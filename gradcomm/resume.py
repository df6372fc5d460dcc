"""A state saved, loaded, copied."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradcomm import checkpoint, checks
from gradcomm.auto import CANDIDATES
from gradcomm.codec import Auto, Codec
from gradcomm.course import Course
from gradcomm.handshake import agree
from gradcomm.memory import OWNERS
from gradcomm.replay import Replay
from gradcomm.verify import digest
from gradcomm.version import __version__

logger = logging.getLogger("gradcomm")


class Resumable(Course):
    """The part of ``CommState`` that outlives the process.

    A state may be pickled and deep-copied, and so may a DDP model that has it as its hook: options and
    ``state_dict`` go along, not the process group, the transport or the scaler. But torch makes the copy
    of a model without a hook: register the copied state with it, ``gradcomm.register(copied_ddp,
    copied_state)``, which then goes on where its original was.
    """

    copied = False

    def state_dict(self) -> dict[str, Any]:
        """All of this rank's state that decides later bits: residuals, the owner's too, momentum,
        PowerSGD's factors, running norms, step counts, seed, options, loss scale, bucket layout
        (``gradcomm.checkpoint``). Tensors are copies, flat, as the gradients lie in memory.

        Each rank saves its own, under its own key, so ``torch.distributed.checkpoint`` takes a state as
        it is. Raises RuntimeError before the parameters are known.
        """
        checks.bound(self._bound, "state_dict")
        parameters = self._buckets.parameters
        index = {p.key: i for i, p in enumerate(parameters)}
        options, entries, sizes = self._fields(self.codec)
        with self._lane.between():
            (held, shares), clip = self._memory.state(), self._runner.clip
            # Slots are complete from the first step on, zero where nothing is held yet: a new state must
            # name every tensor that it is to load.
            memory = {
                slot: {
                    p.name: held[slot][p.key]
                    if p.key in held.get(slot, {})
                    else torch.zeros(sizes[slot][p.name], device=self._memory.device)
                    for p in parameters
                    if p.key in held.get(slot, {}) or p.name in sizes.get(slot, {})
                }
                for slot in {**sizes, **held}
            }
            layout = self._layout or self._buckets.layout
            norms = clip.state(layout) if clip is not None else {"mean": None, "squares": []}
        return checkpoint.pack(
            self._transport.rank,
            self._transport.size,
            progress={
                "step": self.step,
                "since": self._since,
                "flush": self._flush_at == self.step,
                "scale": self._scale.value(),
                "seed": self.seed,
            },
            options={
                **options,
                "exchange": self._chosen,
                "warmup_steps": self.warmup_steps,
                "clip_norm": self.clip_norm,
                "momentum": self.momentum,
                "nesterov": self.nesterov,
                "gradcomm": __version__,
            },
            parameters=entries,
            buckets=[[index[key] for key in keys] for keys in layout],
            clip=norms,
            shares={kind: shares.get(kind, 0) for kind in OWNERS["hierarchy"]},
            memory={slot: by_name for slot, by_name in memory.items() if by_name},
        )

    def load_state_dict(self, state: Any, strict: bool = True) -> list[str]:
        """Takes what ``state_dict`` returned, and continues from there.

        Args:
            state: this rank's own state; or a list of all ranks' states, or what ``merge_states`` made
                of them. With this rank's own of the same number of ranks, training goes on as if it had
                never stopped, bit for bit. From all ranks' of another number the mean of the residuals
                is kept.
            strict: whether what does not fit is an error, or dropped.

        Returns, in words, what did not fit and was dropped. Raises ValueError or TypeError, and changes
        nothing, when the state is malformed, or ``strict`` and of another codec, model or set of ranks:
        the message names the difference. Ranks compare where they stand in the next exchange: one that
        loaded another step makes that a DisagreementError on every rank.

        Before the first step of a state that ``register`` did not make, parameters are not known:
        then it is fitted in that step.
        """
        checks.between_steps("load_state_dict")
        if self._bound and (self._complete or self.step):
            saved = checkpoint.read(state, self._transport.rank, self._transport.size)
            return self._take(saved, strict)
        checkpoint.read(
            state, dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        )
        self._pending = state, strict
        return []

    def _take_pending(self, begun: set[int] | None = None) -> bool:
        """Takes what was loaded before the parameters were known. ``begun``: parameters of the step that
        has begun."""
        if self._pending is None:
            return False
        (state, strict), self._pending = self._pending, None
        saved = checkpoint.read(state, self._transport.rank, self._transport.size)
        self._take(saved, strict, begun or set())
        return True

    def _take(self, saved: checkpoint.Saved, strict: bool, begun: Iterable[int] = ()) -> list[str]:
        body, progress = saved.body, saved.body["progress"]
        step = progress["step"]
        codec = self.codec
        if isinstance(self._wanted["codec"], Auto):
            # What was measured when that run began.
            measured = [c for c in CANDIDATES if c.spec() == body["options"].get("codec")]
            codec = measured[0] if measured else codec
        elif self._schedule.scheduled:
            codec = self._schedule.at(max(0, step - 1))
        options, entries, sizes = self._fields(codec)
        slots, dropped = checkpoint.fit(saved, self._transport.size, options, entries, sizes, strict)

        keys = {p.name: p.key for p in self._buckets.parameters}
        if codec != self.codec:
            self._change(codec, step)
        with self._lane.between():
            self._buckets.clear()
            self._memory.load(
                {slot: {keys[n]: t for n, t in by_name.items()} for slot, by_name in slots.items()},
                body["shares"],
            )
            same_exchange = body["options"].get("exchange") == self._chosen
            self._memory.settle(kept=OWNERS.get(self._chosen, ()) if same_exchange else ())
            self._step, self._seen = step, set(begun)
            self._since, self.seed = progress["since"], progress["seed"]
            self._flush_at = step if progress["flush"] else -1
            if progress["scale"] is not None:
                self._scale.last = progress["scale"]
            names = [[body["parameters"][i][0] for i in bucket] for bucket in body["buckets"]]
            same = saved.exact and all(name in keys for bucket in names for name in bucket)
            self._layout = [tuple(keys[n] for n in bucket) for bucket in names] if same else []
            self._replay = Replay(sum(len(bucket) for bucket in names)) if self._layout else None
            self._follow()
            if self._runner.clip is not None:
                self._runner.clip.load(body["clip"], self._layout, self._memory.device)
        self._agreed = False
        if self._transport.rank == 0:
            kind = "this run's own" if saved.exact else f"the mean over {saved.ranks} ranks"
            logger.info("gradcomm: continues at step %d, residuals are %s", step, kind)
        for line in dropped:
            logger.warning("gradcomm: loading: %s", line)
        return dropped

    def _fields(self, codec: Codec) -> tuple[dict[str, Any], list[list[Any]], dict[str, dict[str, int]]]:
        """Of a state under a codec: the options that must agree, parameters, and slots by name with
        their sizes."""
        feedback = self._wanted["error_feedback"]
        feedback = codec.recipe.error_feedback if feedback == "recipe" else feedback
        options = {
            "codec": codec.spec(),
            "error_feedback": feedback,
            "momentum correction": self.momentum > 0,
        }
        plan = self._plan(codec)
        entries: list[list[Any]] = []
        sizes: dict[str, dict[str, int]] = {}

        def add(slot: str, name: str, numel: int) -> None:
            sizes.setdefault(slot, {})[name] = numel

        for p in self._buckets.parameters:
            plain = plan.is_plain(p.name, p.tensor)
            entries.append(checkpoint.entry(p.name, p.tensor, plain))
            if self.momentum and p.tensor.is_floating_point():
                add("momentum", p.name, p.tensor.numel())
            if plain:
                continue
            for slot, numel in codec.own_slots(p.tensor.shape).items():
                add(slot, p.name, numel)
            if feedback:
                kinds = OWNERS.get(plan.exchange, ())
                for slot in kinds if plan.exchange == "hierarchy" else ("residual", *kinds):
                    add(slot, p.name, p.tensor.numel())
        return options, entries, sizes

    def _compare(self) -> None:
        """Ranks stand at the same step and hold the same where they must."""
        with self._lane.between():
            shared = [*self._memory.all("q"), *self._memory.all("rms")]
            mine = {
                "step": self._step,
                "first compressed step": self._since,
                "codec": self.codec.spec(),
                "flush": self._flush_at == self._step,
                "seed": self.seed,
                "loss scaler": self._scale.attached,
                "layout": self._layout,
                "what ranks share": digest(torch.cat(shared)) if shared else None,
            }
            remedy = "load the same checkpoint on every rank, and make every change on all of them"
            agree(self._transport, mine, "continue", remedy)
        self._agreed = True

    # ---- pickling -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        wanted = dict(self._wanted)
        if isinstance(wanted["plain"], list | tuple | set) and self._bound:
            ids = {id(p.tensor): p.name for p in self._buckets.parameters}
            wanted["plain"] = [ids.get(id(item), item) for item in wanted["plain"]]
        state: Any = None if self._pending is None else self._pending[0]
        return {"arguments": wanted, "state": self.state_dict() if self._bound else state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["arguments"])  # type: ignore[misc]
        self.copied = True
        if saved["state"] is not None:
            self._pending = saved["state"], True
