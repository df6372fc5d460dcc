"""Which codec at which step."""

from __future__ import annotations

from collections.abc import Mapping

from gradcomm import checks
from gradcomm.codec import Auto, Codec, Dense, parse
from gradcomm.codec.check import require
from gradcomm.exchange import choose

#: A codec or its name; or, by the step from which it holds, several: ``{0: "none", 100: "onebit"}``.
CodecRule = Codec | str | Mapping[int, Codec | str]


class Schedule:
    """Codecs by the step from which they hold. Steps count from 0; every rank has the same."""

    def __init__(self, rule: CodecRule) -> None:
        if isinstance(rule, Mapping):
            for step in rule:
                require(
                    type(step) is int and step >= 0,
                    f"codec={dict(rule)!r}: {step!r} is no step; use integers from 0 on",
                )
            require(0 in rule, f"codec={dict(rule)!r} says nothing of step 0; add 0: 'none', say")
        steps = dict(sorted(rule.items())) if isinstance(rule, Mapping) else {0: rule}
        self._codecs = {
            step: parse(codec) if isinstance(codec, str) else checks.codec(codec)
            for step, codec in steps.items()
        }
        require(
            len(steps) == 1 or not any(isinstance(c, Auto) for c in self._codecs.values()),
            "auto cannot be one of several scheduled codecs; name those that you want",
        )

    @property
    def scheduled(self) -> bool:
        """Whether the codec ever changes."""
        return len(self._codecs) > 1

    @property
    def rule(self) -> CodecRule:
        """What makes the same schedule."""
        return dict(self._codecs) if self.scheduled else self._codecs[0]

    def check_exchange(self, exchange: str | None) -> None:
        """Raises ValueError unless it can carry every codec: now, not in mid-training."""
        if exchange is not None:
            for codec in self._codecs.values():
                choose(codec, 1, exchange)

    def check_residual(self, residual: str, exchange: str | None) -> None:
        """Raises ValueError if a codec's residual, or an exchange's, cannot rest so."""
        require(residual in ("float32", "int8"), f"residual={residual!r}; use 'float32' or 'int8'")
        if residual == "int8":
            require(
                exchange != "hierarchy",
                "residual='int8' with exchange='hierarchy', whose residuals, of a host's mean, stay "
                "float32; leave one of them out",
            )
            for codec in self._codecs.values():
                require(
                    "reduce" not in codec.exchanges or isinstance(codec, Auto | Dense),
                    f"residual='int8' with {codec.spec()}, which works in its residual; use 'float32'",
                )

    def at(self, step: int) -> Codec:
        """The codec that holds at a step."""
        return self._codecs[max(first for first in self._codecs if first <= step)]

    def change(self, step: int) -> Codec | None:
        """The codec that begins at just this step, if one does; not the first."""
        return self._codecs.get(step) if step else None

    def spec(self) -> dict[int, str]:
        return {step: codec.spec() for step, codec in self._codecs.items()}
