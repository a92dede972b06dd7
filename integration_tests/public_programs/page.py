"""The page about public programs, of the list of them and of what came out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .program import DP, PP, TP, ZERO3, Program, named

Outcomes = Mapping[str, Mapping[str, Mapping[str, Any]]]

_ROOT = Path(__file__).parents[2]
OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = _ROOT / "docs" / "reference" / "public-programs.md"

_COLUMNS = {"dp 2": DP, "ZeRO 3": ZERO3, "tp 2": TP, "pp 2": PP}
_HEAD = """# Public programs

*How much of a training script that I did not write has to change?*

Each script below is a public one at the commit that its link names. It was made small by its
own arguments, and where it insists on a GPU, a download or a logger it was freed of that. So it
ran on one device and, with the *lines* that are printed below, on two ranks under each plan.
No model was touched.

Compared are the losses of the first six backward passes and the norms of gradients, relative to
the largest on one device: in float64, where rounding hides nothing, or in float32 if a script
insists on it.

| column | |
| --- | --- |
| lines | that a person writes or changes, imports included |
| dp 2, ZeRO 3, tp 2, pp 2 | `{plans}` |
| < 1e-15 | the largest difference from one device |
| * | with a [warning](#warnings) |
| refused | by an [error](#refused) |
| empty | not tried: nothing to cut that way, or see the script's note |

"""
_LINES = """
## The lines

`CONSTRAINTS` are those of the plan in the table. Without any, `generate_plan` chooses.

"""
_AGAIN = """## Run them again

These commands clone the repositories, run all scripts (half an hour on two cores) and write this
page.

```bash
{clones}
python -m pip install {requires}
python -m integration_tests.public_programs CLONES
```
"""


def outcomes_kept() -> Outcomes:
    """Return what came out when the programs were run last."""
    return json.loads(OUTCOMES.read_text(encoding="utf-8"))


def clone_commands(programs: Iterable[Program], clones: Path) -> list[str]:
    """Return the commands that clone each repository at the commit that was read."""
    once = {program.repository: program for program in programs}
    return [
        line
        for repository, program in once.items()
        for line in _clone_commands(repository, clones / program.folder, program.commit)
    ]


def _clone_commands(repository: str, clone: Path, commit: str) -> tuple[str, str]:
    cloned = f"git clone --filter=blob:none https://github.com/{repository} {clone}"
    return cloned, f"git -C {clone} checkout --quiet {commit}"


def page(programs: Sequence[Program], outcomes: Outcomes) -> str:
    """Return the page."""
    plans = "`, `".join(named(each) for each in _COLUMNS.values())
    requires = sorted({name for program in programs for name in program.requires})
    parts = [
        _HEAD.format(plans=plans),
        _table(programs, outcomes),
        _LINES,
        *(_section(program) for program in programs),
        "## Refused\n\n",
        _said(programs, outcomes, lambda outcome: [outcome["error"]] if outcome["error"] else []),
        "\n## Warnings\n\n",
        _said(programs, outcomes, lambda outcome: outcome["warnings"]),
        "\n",
        _AGAIN.format(
            clones="\n".join(clone_commands(programs, Path("CLONES"))),
            requires=" ".join(requires),
        ),
    ]
    return "".join(parts)


def _table(programs: Sequence[Program], outcomes: Outcomes) -> str:
    head = ["script", "lines", *_COLUMNS]
    rows = [head, ["---"] * len(head)]
    for program in programs:
        found = outcomes.get(program.name, {})
        cells = [_cell(found.get(named(each))) for each in _COLUMNS.values()]
        rows.append([_link(program), str(program.lines), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _link(program: Program) -> str:
    url = f"https://github.com/{program.repository}/blob/{program.commit}/{program.script}"
    return f"[{program.name}]({url})"


def _cell(outcome: Mapping[str, Any] | None) -> str:
    """Return what the table says of a plan; nothing of one that was not tried."""
    if outcome is None:
        return ""
    if outcome["error"]:
        return "refused"
    found = [each for each in (outcome["loss"], outcome["gradient"]) if each is not None]
    worst = max(found)
    exponent = 0 if worst == 0 else math.ceil(math.log10(worst))
    text = "0" if worst == 0 else f"< 1e{exponent}"
    return text + (" *" if outcome["warnings"] else "")


def _section(program: Program) -> str:
    edits = "\n@@\n".join(
        (f"# {edit.file}\n" if edit.file else "") + edit.shown() for edit in program.edits
    )
    note = f"\n{program.note}\n" if program.note else ""
    return f"### {program.name}\n{note}\n```diff\n{edits}\n```\n\n"


def _said(programs: Sequence[Program], outcomes: Outcomes, texts: Any) -> str:
    """Return a list of texts, each with the scripts and plans that said it."""
    who: dict[str, list[str]] = {}
    columns = {named(each): title for title, each in _COLUMNS.items()}
    for program in programs:
        for plan, outcome in outcomes.get(program.name, {}).items():
            for text in texts(outcome):
                who.setdefault(_short(text), []).append(f"{program.name} {columns[plan]}")
    return "".join(
        f"- {'; '.join(sorted(set(names)))}:\n  `{text}`\n" for text, names in who.items()
    )


def _short(text: str) -> str:
    """Return the first sentence of a message, or its beginning."""
    first = text.split(". ")[0].replace("`", "'").replace("\n", " ")
    first = re.sub(r"'[\w.<>:]*\.\d+\.[\w.<>:]*'", "'...'", first)  # of one layer
    return first if len(first) < 300 else first[:297] + "..."
