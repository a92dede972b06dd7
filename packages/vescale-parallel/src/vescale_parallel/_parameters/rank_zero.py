"""Have all ranks begin with rank 0's model, whatever they drew.

[Note: whose numbers] Every rank constructs the model, and one that has not seeded its generator
draws numbers of its own. As under DistributedDataParallel, rank 0's count. Of tensors that exist
the values are sent, one tensor at a time and only those that differ; of a deferred model what it
draws from, so that no rank ever makes more than its own part. The generators of all ranks go on
from where rank 0's is, for forward draws from them, too. What is built otherwise on some rank
(another shape, another initializer) is an error, as no rank could be said to be right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import named_failures
from vescale_parallel._mesh.agreement import all_equal, check_agreement, digest_of
from vescale_parallel._mesh.process_group import this_device
from vescale_parallel._model.copies import tensors_in_attributes
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._trace.generators import generator_state

_REAL = (Tensor, nn.Parameter, nn.Buffer)
_SMALL_NUMEL = 1 << 16  # sent in any case


class Construction(Protocol):
    """How a deferred model's values come about."""

    def fingerprint(self) -> str:
        """Return what is equal on two ranks if they make the same values."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """Return the same of each tensor by name; takes longer."""
        ...

    def recorded_draws(self) -> Any:
        """Return what it draws from, as something that can be pickled."""
        ...

    def replace_draws(self, draws: Any) -> None:
        """Draw from what another rank recorded instead, as far as both recorded the same."""
        ...


def take_model_of_rank_zero(model: nn.Module, construction: Construction | None) -> None:
    """Give all ranks rank 0's values and generators, in place. Every rank must call this.

    Says so once, at the user's line, if there was a difference.

    Raises:
        ValueError: On every rank, if the models were not built in the same way.
    """
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    described = {
        "values": digest_of(_sums(_real(named))),
        "construction": construction.fingerprint() if construction is not None else "",
        "random state": hashlib.sha256(b"".join(generator_state())).hexdigest()[:16],
    }
    equal = all_equal(described)
    if all(equal.values()):
        return
    # What was drawn may lie in attributes, too.
    kept = enumerate(tensors_in_attributes(model))
    named += [(f"{fqn}.{name} ({number})", tensor) for number, (fqn, name, tensor) in kept]
    differing = [k for k, same in _which_are_equal(_sums(_real(named))).items() if not same]
    _send_values(_real(named), set(differing))
    if construction is not None and not equal["construction"]:
        recorded = construction.fingerprints()
        differing += [name for name, same in _which_are_equal(recorded).items() if not same]
        _send_construction(construction)
    _send_generators()
    if dist.get_rank() == 0:
        _tell(differing)


def _which_are_equal(values: Mapping[str, str]) -> dict[str, bool]:
    """Return which texts all ranks have alike; one that a rank lacks is an error of the model."""
    check_agreement(model=dict.fromkeys(values, "held"))
    return all_equal(values)


def _tell(differing: list[str]) -> None:
    what = "states of the random number generator"
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        what = f"values of {differing[0]!r}{more}"
    warn_at_user_line(
        f"ranks came with different {what}; all of them take rank 0's. For runs that repeat, call "
        "torch.manual_seed(0) on every rank before the model is constructed"
    )


def _real(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that have values, each once."""
    seen: set[int] = set()
    for name, tensor in named:
        has_values = type(tensor) in _REAL and not tensor.is_meta
        if has_values and tensor.layout is torch.strided and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _sums(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: repr(float(_sum(tensor))) for name, tensor in named}


def _sum(tensor: Tensor) -> Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().sum(dtype=dtype).abs()


def _send_values(named: Iterable[tuple[str, Tensor]], differing: set[str]) -> None:
    for name, tensor in named:
        # A permutation has the same sum.
        if name in differing or tensor.numel() <= _SMALL_NUMEL or not tensor.is_floating_point():
            values = _of_rank_zero(tensor.detach())
            if dist.get_rank() != 0:
                tensor.detach().copy_(values)


def _of_rank_zero(tensor: Tensor) -> Tensor:
    """Return rank 0's values of a tensor, on this rank's device."""
    # Backends do not send every dtype.
    sent = tensor.to(this_device()).resolve_conj().resolve_neg().contiguous().view(-1)
    sent = sent.clone() if sent.data_ptr() == tensor.data_ptr() else sent
    if sent.numel():
        with named_failures():
            dist.broadcast(sent.view(torch.uint8), src=0)
    return sent.view(tensor.shape)


def _send_construction(construction: Construction) -> None:
    sent = [construction.recorded_draws() if dist.get_rank() == 0 else None]
    with named_failures():
        dist.broadcast_object_list(sent, src=0)
    if dist.get_rank() != 0:
        construction.replace_draws(sent[0])
    check_agreement(construction=construction.fingerprints())


def _send_generators() -> None:
    torch.set_rng_state(_of_rank_zero(torch.get_rng_state()).cpu())
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(_of_rank_zero(torch.cuda.get_rng_state()).cpu())
