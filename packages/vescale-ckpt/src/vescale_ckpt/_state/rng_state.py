"""The random number generators of this process as a part of the state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from vescale_ckpt.types import PerRank


class RngState:
    """Saves and loads the generators that code uses without naming one.

    Those are torch's on the CPU and on the current CUDA device if there is one, that of
    ``random``, and the global one of numpy. Every rank has its own, see :class:`PerRank`; ranks
    whose generators all are in the same state can go on on any number of ranks. Those of torch
    are unless a program seeds ranks differently, and if so it is an error. Python and numpy seed
    theirs differently in every process; unless a program seeds them alike, they stay as they are
    if the number of ranks has changed, with a warning. Generators that a program has made itself
    are not among them: ``PerRank(generator.get_state())``.

    Example:
        >>> import tempfile, torch
        >>> from vescale_ckpt import load, save
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(f"{directory}/step-1", {"rng": RngState()})
        ...     expected = torch.rand(3)
        ...     _ = load(f"{directory}/step-1", {"rng": RngState()})
        ...     torch.equal(torch.rand(3), expected)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {
                "version": version,
                "words": torch.tensor(words, device="cpu"),
                "gauss": gauss,
            },
            "numpy": {
                "name": str(name),
                "keys": torch.from_numpy(np.asarray(keys).copy()),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return {
            key: PerRank(value, strict=key not in ("python", "numpy"))
            for key, value in states.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators."""
        states = {key: saved.value for key, saved in state_dict.items()}
        torch.set_rng_state(states["torch"])
        python = states["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        numpy = states["numpy"]
        np.random.set_state(
            (
                numpy["name"],
                numpy["keys"].numpy(),
                numpy["position"],
                numpy["has_gauss"],
                numpy["cached"],
            )
        )
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
