"""Print a script that completes verbs and options in bash, zsh or fish.

The first line of the script says where to put it.
"""

from __future__ import annotations

from shlex import quote
from typing import Final, TypeAlias

from tunebook._cli._formats import OWN
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, Verb
from tunebook.formats import FORMATS

# By verb, its options: name, help, and whether the option takes a value.
_Known: TypeAlias = "dict[str, list[tuple[str, str, bool]]]"

_SHELLS: Final = ("bash", "zsh", "fish")
_FORMATS: Final = " ".join((*OWN, *FORMATS))
_FILES: Final = ("--book", "--output", "--record", "--recording")  # options that take a file

_BASH: Final = """\
# bash completion for tunebook: source it, or put it into ~/.local/share/bash-completion/completions/tunebook
_tunebook() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{verbs} --help --version'
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$previous" in
        {files}) COMPREPLY=($(compgen -f -- "$current")); return ;;
        completion) COMPREPLY=($(compgen -W '{shells}' -- "$current")); return ;;
        --format) COMPREPLY=($(compgen -W '{formats}' -- "$current")); return ;;
    esac
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
        *) case "${{COMP_WORDS[1]}}" in
               diff|export|import|merge|pack) COMPREPLY=($(compgen -f -- "$current")) ;;
           esac ;;
    esac
}}
complete -o filenames -F _tunebook tunebook
"""
_ZSH: Final = """\
#compdef tunebook
# zsh completion for tunebook: put it into a directory of $fpath as _tunebook

_tunebook() {{
    local -a verbs
    verbs=(
{verbs}
    )
    if (( CURRENT == 2 )); then
        _describe 'verb' verbs
        return
    fi
    case $words[2] in
{cases}
    esac
}}

if [ "$funcstack[1]" = "_tunebook" ]; then
    _tunebook "$@"
else
    compdef _tunebook tunebook
fi
"""


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="the shell of the script")


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli import SUMMARIES, parser_of  # noqa: PLC0415 - it loads this module

    known = {}
    for name in SUMMARIES:
        actions = [a for a in parser_of(name)._actions if a.option_strings]  # noqa: SLF001 - argparse has no other way
        known[name] = [(a.option_strings[-1], (a.help or "").replace("%%", "%"), a.nargs != 0) for a in actions]
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    terminal.lines(write(known, SUMMARIES).splitlines())
    return DONE


def _bash(known: _Known, summaries: dict[str, str]) -> str:
    words = {verb: " ".join(option for option, _, _ in options) for verb, options in known.items()}
    cases = "\n".join(f"        {verb}) words={text!r} ;;" for verb, text in words.items())
    verbs, shells = " ".join(summaries), " ".join(_SHELLS)
    return _BASH.format(verbs=verbs, shells=shells, formats=_FORMATS, files="|".join(_FILES), cases=cases)


def _zsh(known: _Known, summaries: dict[str, str]) -> str:
    verbs = "\n".join(f"        {quote(f'{verb}:{summary}')}" for verb, summary in summaries.items())
    values = {"--format": f":value:({_FORMATS})", **dict.fromkeys(_FILES, ":file:_files")}
    cases = []
    for verb, options in known.items():
        specs = []
        for option, text, valued in options:
            said = text.replace("[", "(").replace("]", ")").replace(":", " -")
            specs.append(quote(f"{option}[{said}]{values.get(option, ':value: ') if valued else ''}"))
        rest = f"'*:shell:({' '.join(_SHELLS)})'" if verb == "completion" else "'*:file:_files'"
        cases.append(f"        {verb})\n            _arguments -S {' '.join(specs)} {rest} ;;")
    return _ZSH.format(verbs=verbs, cases="\n".join(cases))


def _fish(known: _Known, summaries: dict[str, str]) -> str:
    lines = []
    for verb, options in known.items():
        lines.append(f"-n __fish_use_subcommand -f -a {verb} -d {quote(summaries[verb])}")
        for option, text, valued in options:
            value = f" -r -f -a '{_FORMATS}'" if option == "--format" else " -r" if valued else ""
            lines.append(f"-n '__fish_seen_subcommand_from {verb}' -l {option[2:]}{value} -d {quote(text)}")
    lines.append(f"-n '__fish_seen_subcommand_from completion' -f -a '{' '.join(_SHELLS)}'")
    head = "# fish completion for tunebook: put it into ~/.config/fish/completions/tunebook.fish\n"
    return head + "\n".join(f"complete -c tunebook {line}" for line in lines)


VERB = Verb("tunebook completion bash > tunebook-completion.bash", _run, (), _arguments, __doc__)
