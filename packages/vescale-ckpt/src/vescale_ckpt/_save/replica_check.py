"""Replica check: do ranks have the same bytes of a tensor that each of them holds whole?

[Note: copies]
Of a tensor that every rank holds, each writes a share, and the checksum of what is written is
computed anyway. Each rank computes that of the share of the rank after it as well, from its own
copy. Over all ranks both must come to the same, block by block, or else what one rank has written
is not what another one holds. So every byte is looked at by two ranks, however many there are, and
a copy that differs anywhere in what would be stored of it is found before the checkpoint is
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._format.crc32 import U32, PartialBlockCrcs
from vescale_ckpt._format.file_layout import FilePlan
from vescale_ckpt.exceptions import MismatchError

from .two_phase_write import page_shares


class ReplicaCheck:
    """What this rank knows about copies; see [Note: copies].

    Attributes:
        written: For each file, what this rank has written of its copies.
        checked: For each file, what it holds of what the next rank has to write.
    """

    def __init__(self, plan: FilePlan, block_nbytes: int, progress: Callable[[int], None]) -> None:
        self._plan = plan
        self._block_nbytes = block_nbytes
        self.written = {
            name: PartialBlockCrcs(file.nbytes, block_nbytes, progress)
            for name, file in plan.files.items()
        }
        self.checked = {
            name: PartialBlockCrcs(file.nbytes, block_nbytes) for name, file in plan.files.items()
        }

    def registers(self) -> U32:
        """Return registers of all blocks of all files; over all ranks they XOR to zero."""
        pairs = zip(self.written.values(), self.checked.values(), strict=True)
        return np.concatenate([written.folded() ^ checked.folded() for written, checked in pairs])

    def difference(
        self, combined: U32, keys: Mapping[str, object], ranks: ControlGroup
    ) -> MismatchError:
        """Return the error about copies that differ; some registers of all ranks are not zero."""
        lines: list[str] = []
        for name, sums in self.written.items():
            own, combined = np.split(combined, [sums.num_blocks])
            for block in np.flatnonzero(own).tolist():
                start = block * self._block_nbytes
                lines += self._lines(name, start, start + self._block_nbytes, keys, ranks)
        found = list(dict.fromkeys(lines))
        more = [f"and {len(found) - 5} more"] if len(found) > 5 else []
        return MismatchError(
            "expected the same state on every rank (shards as DTensors, all else equal); nothing "
            "was saved:\n" + "\n".join(found[:5] + more)
        )

    def _lines(
        self, file: str, start: int, stop: int, keys: Mapping[str, object], ranks: ControlGroup
    ) -> list[str]:
        lines: list[str] = []
        for key in keys:
            stored = self._plan.tensors[key]
            if stored.file != file:
                continue
            for rank, (first, last) in enumerate(page_shares(stored, ranks.size)):
                if max(first, start) < min(last, stop):
                    lines.append(
                        f"tensor {key!r}: rank {(rank - 1) % ranks.size} and rank {rank} hold "
                        f"different bytes, or those of a tensor next to it do"
                    )
        return lines
