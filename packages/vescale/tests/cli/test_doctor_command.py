"""``vescale doctor`` on one machine, and on ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from vescale.cli import machine_checks
from vescale.cli.doctor import lines
from vescale.cli.finding import Finding
from vescale.cli.main import main
from vescale.cli.rank_checks import Ranks, check_shared
from vescale_testing import World


@pytest.fixture(autouse=True)
def without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_every_finding_has_a_line_and_every_trouble_a_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json", "--shared", str(tmp_path)]) == 0
    found = [Finding(**each) for each in json.loads(capsys.readouterr().out)]
    names = [finding.name for finding in found]
    assert names == [
        "torch", "packages", "backends", "devices", "links", "memory", "cores", "/dev/shm",
        "open files", f"directory {tmp_path}",
    ]  # fmt: skip
    assert all(bool(finding.remedy) == (finding.status != "ok") for finding in found)
    assert not list(tmp_path.iterdir())
    assert main(["doctor"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= len(found) - 1


def test_a_directory_that_cannot_be_written_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--shared", str(tmp_path / "missing")]) == 1
    assert "error  directory" in capsys.readouterr().out


def test_too_many_threads_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "512")
    (cores,) = [f for f in machine_checks.check_machine() if f.name == "cores"]
    assert cores.status == "warn"
    assert "OMP_NUM_THREADS=1" in cores.remedy
    assert lines([cores])[1].strip() == f"-> {cores.remedy}"


def _on_ranks(directory: str) -> list[Finding]:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), "token")
    return [*ranks.compare(), check_shared(Path(directory), ranks)]


def test_ranks_compare_versions_and_time_a_collective(world2: World, tmp_path: Path) -> None:
    for versions, collective, directory in world2.run(_on_ranks, str(tmp_path)):
        assert (versions.status, versions.text) == ("ok", "2, all with the same versions")
        assert collective.status == "ok"
        assert collective.text.startswith("all-reduce of 16 MiB takes")
        assert directory.text.startswith("seen by all 2 ranks")
    assert not list(tmp_path.iterdir())


def _apart(root: str) -> Finding:
    own = Path(root) / str(dist.get_rank())
    own.mkdir()
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), "token")
    return check_shared(own, ranks, within_seconds=0)


def test_a_directory_of_each_rank_alone_is_not_shared(world2: World, tmp_path: Path) -> None:
    for finding in world2.run(_apart, str(tmp_path)):
        assert finding.status == "error"
        assert "ranks [0, 1] do not see files of all others" in finding.text


class _Others(Ranks):
    """Ranks of which the second has another version of torch."""

    def gathered(self, value: object) -> list[object]:  # pyright: ignore[reportIncompatibleMethodOverride]: for one test
        assert isinstance(value, dict)
        return [value, value | {"torch": "1.0"}]


def test_another_version_on_a_rank_is_an_error() -> None:
    finding = _Others(0, 2, "token").same_versions()
    assert finding.status == "error"
    assert "and 1.0 on rank 1" in finding.text


@pytest.mark.slow
def test_torchrun_starts_a_doctor_of_all_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "vescale", "doctor", "--shared", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all with the same versions") == 1
