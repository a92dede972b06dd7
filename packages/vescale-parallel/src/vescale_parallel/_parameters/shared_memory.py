"""Parameters whose memory another tensor of the model has, too: refused.

On one device ``decoder.weight.data = encoder.weight.data`` makes two parameters of one memory, and
an optimizer updates it twice a step; ``self.transposed = self.embed.weight.t()`` is a tensor that
follows every update. Ranks have parameters in memory of their own, so that either would go on with
other numbers than on one device, and nothing would say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vescale_parallel._model.copies import tensors_in_attributes


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a model with a trained parameter in whose memory another tensor of it lies.

    One parameter in several places is tied, and no such case.

    Raises:
        ValueError: With the names of both.
    """
    trained = {id(p): fqn for fqn, p in model.named_parameters() if p.requires_grad}
    of_storages: defaultdict[object, list[tuple[str, Tensor]]] = defaultdict(list)
    for fqn, x in _tensors(model):
        if not is_lazy(x) and x.layout == torch.strided and x.numel():
            of_storages[x.untyped_storage()].append((fqn, x))
    for tensors in of_storages.values():
        for fqn, x in tensors:
            for other, y in tensors if id(x) in trained else ():
                if x is not y and _overlap(x, y):
                    raise ValueError(
                        f"{fqn!r} is trained, and {other!r} is another tensor in the same memory: "
                        "ranks have parameters in memory of their own, where it would not follow. "
                        "Have one nn.Parameter in both places (tied weights: a.weight = b.weight, "
                        "without .data), use the parameter where it is needed "
                        "(self.embed.weight.t() in forward), or make a copy (.clone())"
                    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    for fqn, name, x in tensors_in_attributes(model):
        # What torch.nn.utils.spectral_norm leaves there is computed before every forward.
        is_computed = hasattr(model.get_submodule(fqn), f"{name}_orig")
        if id(x) not in own and not is_computed:
            yield f"{fqn}.{name}".lstrip("."), x


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common: columns of one have none."""
    size = x.element_size()
    spans = [_span(each) for each in (x, y)]
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    if max(begin for begin, _ in spans) >= min(end for _, end in spans):
        return False
    if size != y.element_size() or all(each.is_contiguous() for each in (x, y)):
        return True
    marked = torch.zeros((last - first) // size, dtype=torch.bool, device="cpu")
    of_x, of_y = (
        marked.as_strided(
            # One of the elements that are one: no operator writes to the others.
            [n if stride else 1 for n, stride in zip(each.shape, each.stride(), strict=True)],
            each.stride(),
            each.storage_offset() - first // size,
        )
        for each in (x, y)
    )
    of_x.fill_(True)
    return bool(of_y.any())


def _span(x: Tensor) -> tuple[int, int]:
    """Return between which bytes of its storage a tensor lies."""
    length = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + length * x.element_size()
