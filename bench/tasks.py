"""What is learned: a model, its data by rank, and a measure of how well it has learned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench import textdata
from bench.model import ByteModel

if TYPE_CHECKING:
    from bench.train import Settings


class Task(Protocol):
    """``measure``: what ``evaluate`` gives, less being better. Ranks draw different data."""

    measure: str

    def model(self) -> nn.Module:
        """A model, drawn from torch's own random numbers."""

    def loss(self, model: nn.Module) -> Tensor:
        """The training loss of this rank's next batch."""

    def evaluate(self, model: nn.Module) -> float:
        """The same on every rank. Collective."""


class Bytes:
    """A byte-level transformer on text, ``settings.batch`` windows a rank and step."""

    measure = "held-out loss"

    def __init__(self, settings: Settings, rank: int) -> None:
        self._s, self._rank = settings, rank
        self._train, self._held_out = textdata.load(settings.text)
        self._draw = torch.Generator().manual_seed(settings.seed * 1000 + rank)

    def model(self) -> nn.Module:
        return ByteModel(self._s.width, self._s.depth, self._s.context)

    def loss(self, model: nn.Module) -> Tensor:
        windows = textdata.sample(self._train, self._s.batch, self._s.context, self._draw)
        return model(windows)  # type: ignore[no-any-return]

    def evaluate(self, model: nn.Module) -> float:
        """Over the same windows every time, each rank a share of them."""
        ranks = dist.get_world_size()
        draw = torch.Generator().manual_seed(self._rank)
        total = torch.zeros((), dtype=torch.float64)
        batches = math.ceil(self._s.held_out / ranks / 8)
        for _ in range(batches):
            total += model(textdata.sample(self._held_out, 8, self._s.context, draw))
        dist.all_reduce(total)
        return total.item() / (ranks * batches)


class Mnist1d:
    """A convolutional network on mnist1d (Greydanus, Kobak, "Scaling down deep learning", ICML 2024),
    which is generated, not downloaded; 94 % of its test set is what the paper's has right."""

    measure = "test error, %"

    def __init__(self, settings: Settings, rank: int) -> None:
        from mnist1d.data import get_dataset_args, make_dataset

        data = make_dataset(get_dataset_args())
        x, y = torch.tensor(data["x"]).float(), torch.tensor(data["y"])
        self._x, self._y = x.unsqueeze(1), y
        self._test = torch.tensor(data["x_test"]).float().unsqueeze(1), torch.tensor(data["y_test"])
        self._batch = 100 // dist.get_world_size()  # of all ranks together, as in the paper
        self._draw = torch.Generator().manual_seed(settings.seed * 1000 + rank)

    def model(self) -> nn.Module:
        width = 25  # the paper's
        return nn.Sequential(
            nn.Conv1d(1, width, 5, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(10),
        ).train()

    def loss(self, model: nn.Module) -> Tensor:
        chosen = torch.randint(len(self._y), (self._batch,), generator=self._draw)
        return F.cross_entropy(model(self._x[chosen]), self._y[chosen])

    def evaluate(self, model: nn.Module) -> float:
        x, y = self._test
        return 100 * float((model(x).argmax(1) != y).float().mean())


class Convex:
    """Least squares with a known optimum: min over W of mean |X W - Y|², whose rows are not shared out
    alike: each rank has its own solution, so no rank's gradient vanishes at the optimum."""

    measure = "excess loss"
    ROWS, INPUTS, OUTPUTS = 512, 64, 64

    def __init__(self, settings: Settings, rank: int) -> None:
        ranks = dist.get_world_size()
        draw = torch.Generator().manual_seed(settings.seed)
        x = torch.randn(ranks, self.ROWS, self.INPUTS, generator=draw)
        own = torch.randn(ranks, self.INPUTS, self.OUTPUTS, generator=draw)
        y = x @ own + 0.1 * torch.randn(ranks, self.ROWS, self.OUTPUTS, generator=draw)
        self._all_x, self._all_y = x.flatten(0, 1), y.flatten(0, 1)
        best = torch.linalg.lstsq(self._all_x.double(), self._all_y.double()).solution
        self._least = F.mse_loss(self._all_x.double() @ best, self._all_y.double()).item()
        self._start = self._all_y.double().square().mean().item() - self._least
        self._x, self._y = x[rank], y[rank]

    def model(self) -> nn.Module:
        model = nn.Linear(self.INPUTS, self.OUTPUTS, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def loss(self, model: nn.Module) -> Tensor:
        return F.mse_loss(model(self._x), self._y)

    def evaluate(self, model: nn.Module) -> float:
        """(f(W) - f*) / (f(0) - f*)"""
        reached = F.mse_loss(model(self._all_x).double(), self._all_y.double()).item()
        return (reached - self._least) / self._start


TASKS: dict[str, type[Bytes] | type[Mnist1d] | type[Convex]] = {
    "bytes": Bytes,
    "mnist1d": Mnist1d,
    "convex": Convex,
}
