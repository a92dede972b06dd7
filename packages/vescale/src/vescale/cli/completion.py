"""Shell completion, written out from the parser: what there is to type depends on nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from .command import Command

# Not called ``path``, which is PATH in zsh.
# zsh reads it, too, where ``path`` is the search path.
_BASH = """\
_vescale() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" typed="" words=""
    local i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$typed ${{COMP_WORDS[i]}}" in
            {paths}) typed="$typed ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$typed $prev" in
{values}
        *) case "$typed" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _vescale vescale
"""
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class _Level:
    """What may be typed behind some subcommands.

    Attributes:
        path: The subcommands.
        commands: Further ones, and what they do.
        actions: Options and arguments.
    """

    path: tuple[str, ...]
    commands: dict[str, str]
    actions: list[argparse.Action]

    @property
    def options(self) -> list[str]:
        """Long options, and short ones that have no long form."""
        return [
            next((s for s in a.option_strings if s.startswith("--")), a.option_strings[0])
            for a in self.actions
            if a.option_strings
        ]

    @property
    def words(self) -> list[str]:
        """All that may come next, but for free text."""
        arguments = [
            str(choice) for a in self.actions if not a.option_strings for choice in a.choices or ()
        ]
        return [*self.commands, *arguments, *self.options]


def _levels(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[_Level]:
    commands: dict[str, str] = {}
    actions: list[argparse.Action] = []
    inner: list[_Level] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            # Both are the same parsers; the former have what help says of them.
            commands |= {each.dest: each.help or "" for each in action._choices_actions}
            for name, below in action.choices.items():
                inner += _levels(below, (*path, name))
        else:
            actions.append(action)
    yield _Level(path, commands, actions)
    yield from inner


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return a script that teaches a shell what may be typed behind ``vescale``."""
    levels = list(_levels(parser))
    match shell:
        case "fish":
            return _fish(levels)
        case "zsh":
            return _ZSH + _bash(levels)
        case _:
            return _bash(levels)


def _bash(levels: list[_Level]) -> str:
    paths = "|".join(f'"{_spaced(level.path)}"' for level in levels if level.path)
    words = [
        f'            "{_spaced(level.path)}") words="{" ".join(level.words)}" ;;'
        for level in levels
    ]
    values = [
        f'        {pattern}) words="{" ".join(map(str, action.choices))}" ;;'
        for level in levels
        for action in level.actions
        if action.option_strings and action.choices
        for pattern in ["|".join(f'"{_spaced(level.path)} {o}"' for o in action.option_strings)]
    ]
    return _BASH.format(paths=paths, words="\n".join(words), values="\n".join(values))


def _spaced(path: tuple[str, ...]) -> str:
    return "".join(f" {name}" for name in path)


def _fish(levels: list[_Level]) -> str:
    lines: list[str] = []
    for level in levels:
        seen = [f"__fish_seen_subcommand_from {name}" for name in level.path]
        if level.commands:
            others = " ".join(level.commands)
            first = f"not __fish_seen_subcommand_from {others}"
            when = "; and ".join([*seen, first])
            lines += [
                f"complete -c vescale -f -n {_quoted(when)} -a {name} -d {_quoted(text)}"
                for name, text in level.commands.items()
            ]
        condition = f" -n {_quoted('; and '.join(seen))}" if seen else ""
        # Free text, such as a path, is the shell's own to complete.
        lines += [
            f"complete -c vescale{condition}{_fish_action(action)}"
            for action in level.actions
            if action.option_strings or action.choices
        ]
    return "\n".join(lines) + "\n"


def _fish_action(action: argparse.Action) -> str:
    text = "".join(
        f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
        for option in action.option_strings
    )
    if action.choices:
        exclusive = " -x" if action.option_strings else " -f"
        text += f"{exclusive} -a {_quoted(' '.join(map(str, action.choices)))}"
    elif action.option_strings and action.nargs != 0:
        text += " -r"
    return text + (f" -d {_quoted(action.help)}" if action.help else "")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def _run(options: argparse.Namespace) -> int:
    print(script(options.shell, options.parser), end="")
    return 0


COMMAND = Command(
    name="completion",
    help="print a script for your shell: source <(vescale completion bash)",
    add_arguments=_add_arguments,
    run=_run,
)
