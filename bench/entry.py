"""What the benchmarks call a codec: one that ``gradcomm.register`` reads, a schedule, options of
``register``; separated by blanks:

    onebit:refresh=16,normalize=True
    int8 10%>onebit 90%>int8            # by step, or by share of all steps
    topk:density=0.02 momentum=0.9
"""

from __future__ import annotations

import ast
import re
from typing import Any

from gradcomm.codec import parse
from gradcomm.schedule import CodecRule

_OPTION = re.compile(r"(\w+)=(.*)")
_LATER = re.compile(r"(\d+)(%?)>(.*)")


def read(entry: str, steps: int) -> tuple[CodecRule, dict[str, Any]]:
    """The codec rule, for a run of ``steps``, and the options that an entry names. Raises ValueError."""
    words = entry.split()
    if not words:
        raise ValueError("no codec: give a name, onebit, say")
    rule, options = {0: parse(words[0])}, {}
    for word in words[1:]:
        if found := _LATER.fullmatch(word):
            number, percent, codec = found.groups()
            rule[int(number) * steps // 100 if percent else int(number)] = parse(codec)
        elif found := _OPTION.fullmatch(word):
            options[found[1]] = ast.literal_eval(found[2])
        else:
            raise ValueError(f"{entry!r}: {word!r} is neither step>codec nor option=value")
    return (rule if len(rule) > 1 else rule[0]), options
