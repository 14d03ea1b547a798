"""`tunebook completion`: scripts for shells, which complete verbs and options without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._cli._formats import OWN
from tunebook._cli._verb import DONE, Verb
from tunebook.formats import FORMATS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal

_SHELLS: Final = ("bash", "zsh", "fish")
_WITH_FILES: Final = frozenset({"diff", "merge", "export", "import"})
_VALUES: Final = {"--format": (*OWN, *FORMATS)}


class _Known(NamedTuple):
    """What a shell is told about a verb: each option with its help, and those that take a value."""

    summary: str
    options: dict[str, str]
    valued: frozenset[str]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="which shell the script is for")


def _run(options: Namespace, terminal: Terminal) -> int:
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    terminal.lines(write(_known()))
    return DONE


def _known() -> dict[str, _Known]:
    from tunebook._cli import VERBS, load, parser_of  # noqa: PLC0415 - it loads this module

    known = {}
    for name in VERBS:
        verb = load(name)
        actions = [a for a in parser_of(verb)._actions if a.option_strings]  # noqa: SLF001 - there is no other way
        options = {a.option_strings[-1]: (a.help or "").replace("%%", "%") for a in actions}
        valued = frozenset(a.option_strings[-1] for a in actions if a.nargs != 0)
        known[name] = _Known(verb.summary, options, valued)
    return known


def _bash(known: dict[str, _Known]) -> list[str]:
    cases = [f"        {name}) words={' '.join(verb.options)!r} ;;" for name, verb in known.items()]
    files = "|".join(sorted(_WITH_FILES))
    return [
        "# bash completion for tunebook: source it, or put it into ~/.local/share/bash-completion/completions/tunebook",
        "_tunebook() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f"        words='{' '.join(known)} --help --version'",
        '        COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "        return",
        "    fi",
        '    case "$previous" in',
        '        --book|--output|--recording) COMPREPLY=($(compgen -f -- "$current")); return ;;',
        *(
            f"        {word}) COMPREPLY=($(compgen -W '{' '.join(values)}' -- \"$current\")); return ;;"
            for word, values in {"completion": _SHELLS, **_VALUES}.items()
        ),
        "    esac",
        '    case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac",
        '    case "$current" in',
        '        -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;',
        f'        *) case "${{COMP_WORDS[1]}}" in {files}) COMPREPLY=($(compgen -f -- "$current")) ;; esac ;;',
        "    esac",
        "}",
        "complete -o filenames -F _tunebook tunebook",
    ]


def _zsh(known: dict[str, _Known]) -> list[str]:
    lines = ["#compdef tunebook", "# zsh completion for tunebook: put it into a directory of $fpath as _tunebook", ""]
    lines += ["_tunebook() {", "    local -a verbs", "    verbs=("]
    lines += [f"        {_quoted(f'{name}:{verb.summary}')}" for name, verb in known.items()]
    lines += ["    )", "    if (( CURRENT == 2 )); then", "        _describe 'verb' verbs", "        return", "    fi"]
    lines += ["    case $words[2] in"]
    for name, verb in known.items():
        specs = [_zsh_option(option, text, valued=option in verb.valued) for option, text in verb.options.items()]
        rest = f"'*:shell:({' '.join(_SHELLS)})'" if name == "completion" else "'*:file:_files'"
        lines += [f"        {name})", f"            _arguments -S {' '.join(specs)} {rest} ;;"]
    return [*lines, "    esac", "}", "", 'if [ "$funcstack[1]" = "_tunebook" ]; then', '    _tunebook "$@"', "else",
            "    compdef _tunebook tunebook", "fi"]  # fmt: skip


def _zsh_option(option: str, text: str, *, valued: bool) -> str:
    said = text.replace("[", "(").replace("]", ")").replace(":", " -")
    return _quoted(f"{option}[{said}]{_zsh_value(option) if valued else ''}")


def _zsh_value(option: str) -> str:
    if option in _VALUES:
        return f":value:({' '.join(_VALUES[option])})"
    return ":file:_files" if option in {"--book", "--output", "--recording"} else ":value: "


def _fish(known: dict[str, _Known]) -> list[str]:
    lines = ["# fish completion for tunebook: put it into ~/.config/fish/completions/tunebook.fish"]
    for name, verb in known.items():
        alone = "-n __fish_use_subcommand"
        lines.append(f"complete -c tunebook {alone} -f -a {name} -d {_quoted(verb.summary)}")
        for option, text in verb.options.items():
            needs = " -r" if option in verb.valued else ""
            needs += f" -f -a '{' '.join(_VALUES[option])}'" if option in _VALUES else ""
            seen = f"-n '__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c tunebook {seen} -l {option[2:]}{needs} -d {_quoted(text)}")
    return [*lines, f"complete -c tunebook -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(_SHELLS)}'"]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


VERB = Verb(
    "completion",
    "print a completion script for a shell",
    "tunebook completion bash > tunebook-completion.bash",
    _arguments,
    _run,
    "Print a script that completes verbs and options in bash, zsh or fish; its first lines say where to put it.",
)
