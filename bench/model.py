"""A byte-level decoder-only transformer, small enough for a CPU core."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
HEAD = 64  # least width of an attention head, where the model is that wide


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, normalized before each (pre-norm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        most = max(1, width // HEAD)
        self.heads = next(h for h in range(most, 0, -1) if width % h == 0)
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        batch, length, width = x.shape
        heads = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class ByteModel(nn.Module):
    """``depth`` blocks of ``width``, learned positions, an output layer of its own."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2's: what is added to the residual stream shrinks with the number of additions.
                last = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte of int64 windows ``[batch, length + 1]``."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        places = torch.arange(inputs.size(1), device=inputs.device)
        logits = self.head(self.norm(self.blocks(self.bytes(inputs) + self.positions(places))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
