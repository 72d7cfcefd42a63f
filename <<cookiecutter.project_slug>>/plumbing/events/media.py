from typing import Any, NamedTuple

import torch

from .scalar import require_local


class Medium(NamedTuple):
    """An image or a histogram that waits for the writers."""

    name: str
    content: Any
    iteration: int


def copied_image(name: str, image: Any) -> torch.Tensor:
    """Return a copy, since the owner may change the image or free a larger one around it."""
    image = torch.as_tensor(image)
    require_local(name, image)
    if image.ndim != 3:
        raise ValueError(f"image {name}: needs the shape (C, H, W), got {tuple(image.shape)}")
    return image.detach().clone()


def make_histogram(name: str, tensor: Any, bins: int) -> dict | None:
    """Return the arguments of TensorBoard's ``histogram_raw``; None without finite elements."""
    tensor = torch.as_tensor(tensor).detach()
    require_local(name, tensor)
    values = _elements(tensor)
    values = values[values.isfinite()]
    if len(values) == 0:
        return None
    # torch.histogram widens the range of equal values by itself.
    counts, edges = torch.histogram(values, bins)
    return {
        "min": values.min().item(),
        "max": values.max().item(),
        "num": len(values),
        "sum": values.sum().item(),
        "sum_squares": values.square().sum().item(),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a float64 vector on the CPU; of sparse tensors the stored ones."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.layout != torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = tensor.abs()
    # In float64 sums are exact enough, and no range of float32 values overflows.
    return tensor.flatten().cpu().double()
