"""Muon for weight matrices: momentum whose update is made near-orthogonal before it is applied.

The method and the quintic's coefficients are Keller Jordan's ("Muon: an optimizer for hidden layers
in neural networks", 2024). Matrices of one shape are stacked, so a step is a handful of batched
products rather than hundreds of small ones.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

QUINTIC: Final = (3.4445, -4.7750, 2.0315)
ITERATIONS: Final = 5


def orthogonalised(batch: Tensor) -> Tensor:
    """The nearest near-orthogonal matrices to `batch` [N, rows, columns]: singular values near 1.

    Newton-Schulz in bf16 on accelerators; the CPU keeps fp32, where bf16 products are slow.
    """
    wide = batch.shape[1] <= batch.shape[2]
    x = batch if wide else batch.transpose(1, 2)
    x = x.bfloat16() if batch.is_cuda else x.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x if wide else x.transpose(1, 2)).float()
    return result


class Muon:
    """Owns the momentum of the given matrices; `learning_rate` may be set between steps."""

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        *,
        learning_rate: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        groups: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self._groups = list(groups.values())
        self._momenta = [torch.zeros_like(torch.stack(list(group))) for group in self._groups]
        self._momentum = momentum
        self._weight_decay = weight_decay
        self.learning_rate = learning_rate

    @torch.no_grad()
    def step(self) -> None:
        """Applies one update from the gradients, which must all be present."""
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradient, 1 - self._momentum)
            update = orthogonalised(gradient.lerp(momentum, self._momentum))
            rows, columns = group[0].shape
            scale = self.learning_rate * max(1.0, rows / columns) ** 0.5
            weights: list[Tensor] = list(group)
            torch._foreach_mul_(weights, 1 - self.learning_rate * self._weight_decay)
            torch._foreach_add_(weights, list(update.unbind(0)), alpha=-scale)
