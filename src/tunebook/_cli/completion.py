"""Print a script that completes verbs, options, kernels and ids in bash, zsh or fish.

The first line of the script says where to put it.
"""

from __future__ import annotations

from itertools import pairwise
from shlex import quote
from typing import TYPE_CHECKING, Final, TypeAlias

from tunebook._base.errors import clean
from tunebook._cli._filters import open_book
from tunebook._cli._formats import OWN
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._selection.env_pins import names_of
from tunebook.formats import FORMATS
from tunebook.stores._listing import Catalogue, newest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# By verb, its options: name, help, and whether the option takes a value.
_Known: TypeAlias = "dict[str, list[tuple[str, str, bool]]]"

_SHELLS: Final = ("bash", "zsh", "fish")
_FORMATS: Final = " ".join((*OWN, *FORMATS))
_FILES: Final = ("--book", "--output", "--record", "--recording", "--compare")  # options that take a file
# Verbs whose first word names an entry, by its id or its kernel, and verbs whose words name kernels.
_ENTRIES: Final = ("show", "explain", "pin", "unpin", "diff", "verify", "rm")
_KERNELS: Final = ("fit", "ls")
_MOST: Final = 200  # ids that a shell offers: nobody reads more
# Prints the words of a book: the scripts run it with the words of the line so far, for its --book.
_LIST: Final = "tunebook completion --list"

_BASH: Final = """\
# bash completion for tunebook: source it, or put it into ~/.local/share/bash-completion/completions/tunebook
_tunebook_book() {{
    local words="$({list} "$1" -- "${{COMP_WORDS[@]}}" 2>/dev/null | cut -f 1)"
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
_tunebook() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{verbs} help --help --version'
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$previous" in
        {files}) COMPREPLY=($(compgen -f -- "$current")); return ;;
        completion) COMPREPLY=($(compgen -W '{shells}' -- "$current")); return ;;
        --format) COMPREPLY=($(compgen -W '{formats}' -- "$current")); return ;;
        --kernel) _tunebook_book kernels; return ;;
        help) COMPREPLY=($(compgen -W '{verbs}' -- "$current")); return ;;
    esac
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
        *) case "${{COMP_WORDS[1]}}" in
               {entries}) _tunebook_book entries ;;
               {kernels}) _tunebook_book kernels ;;
           esac
           case "${{COMP_WORDS[1]}}" in
               diff|export|import|merge|pack) COMPREPLY+=($(compgen -f -- "$current")) ;;
           esac ;;
    esac
}}
complete -o filenames -F _tunebook tunebook
"""
_ZSH: Final = """\
#compdef tunebook
# zsh completion for tunebook: put it into a directory of $fpath as _tunebook

_tunebook_book() {{
    local -a known
    known=("${{(@f)$({list} $1 -- $words 2>/dev/null | sed 's/:/\\\\:/g; s/\\t/:/')}}")
    _describe "$1" known
}}

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
    parser.add_argument("words", nargs="*", metavar="SHELL", help=f"the shell of the script: {', '.join(_SHELLS)}")
    text = "print the kernels of the book, or kernels and the newest ids, as the scripts need them"
    parser.add_argument("--list", choices=("kernels", "entries"), help=text)


def _run(options: Namespace, terminal: Terminal) -> int:
    if options.list:
        terminal.lines(_words(options.list, options.words))  # the line so far, for its --book
        return DONE
    if len(options.words) != 1 or options.words[0] not in _SHELLS:
        unknown = f"no script for {' '.join(options.words)}; " if options.words else ""
        raise UsageError(f"{unknown}name the shell, one of {', '.join(_SHELLS)}, as in: tunebook completion bash")
    from tunebook._cli import SUMMARIES, parser_of  # noqa: PLC0415 - it loads this module

    known = {}
    for name in SUMMARIES:
        actions = [a for a in parser_of(name)._actions if a.option_strings]  # noqa: SLF001 - argparse has no other way
        known[name] = [(a.option_strings[-1], (a.help or "").replace("%%", "%"), a.nargs != 0) for a in actions]
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.words[0]]
    terminal.lines(write(known, SUMMARIES).splitlines())
    return DONE


def _words(kind: str, line: Sequence[str]) -> Iterator[str]:
    """Yield the names of a book's kernels, and ids with a tab and a description."""
    from tunebook._cli._entries import SHORT_ID, key_text  # noqa: PLC0415 - a script needs no book

    given = next((after for before, after in pairwise(line) if before == "--book"), None)
    catalogue = Catalogue(open_book(given))
    groups = catalogue.groups(lambda _op, _device: True)
    # Without the version: bash takes "@" for the end of a word.
    yield from sorted({clean(names_of(group.op)[1]) for group in groups})
    for listed in newest(groups, _MOST) if kind == "entries" else ():
        if (record := listed.record()) is not None:
            yield f"{listed.id[:SHORT_ID]}\t{clean(listed.op)} {key_text(record.problem.call_key)[:60]}"


def _bash(known: _Known, summaries: dict[str, str]) -> str:
    words = {verb: " ".join(option for option, _, _ in options) for verb, options in known.items()}
    cases = "\n".join(f"        {verb}) words={text!r} ;;" for verb, text in words.items())
    verbs, shells = " ".join(summaries), " ".join(_SHELLS)
    files, entries = "|".join(_FILES), "|".join(_ENTRIES)
    return _BASH.format(
        verbs=verbs,
        shells=shells,
        formats=_FORMATS,
        files=files,
        entries=entries,
        kernels="|".join(_KERNELS),
        cases=cases,
        list=_LIST,
    )


def _zsh(known: _Known, summaries: dict[str, str]) -> str:
    verbs = "\n".join(f"        {quote(f'{verb}:{summary}')}" for verb, summary in summaries.items())
    values = {"--format": f":value:({_FORMATS})", "--kernel": ":kernel:{_tunebook_book kernels}"}
    values |= dict.fromkeys(_FILES, ":file:_files")
    entries = dict.fromkeys(_ENTRIES, "'*:entry:{_tunebook_book entries}'")
    kernels = dict.fromkeys(_KERNELS, "'*:kernel:{_tunebook_book kernels}'")
    last = {**entries, **kernels, "completion": f"'*:shell:({' '.join(_SHELLS)})'"}
    cases = []
    for verb, options in known.items():
        specs = []
        for option, text, valued in options:
            said = text.replace("[", "(").replace("]", ")").replace(":", " -")
            specs.append(quote(f"{option}[{said}]{values.get(option, ':value: ') if valued else ''}"))
        rest = last.get(verb, "'*:file:_files'")
        cases.append(f"        {verb})\n            _arguments -S {' '.join(specs)} {rest} ;;")
    return _ZSH.format(verbs=verbs, cases="\n".join(cases), list=_LIST)


def _fish(known: _Known, summaries: dict[str, str]) -> str:
    lines = []
    for verb, options in known.items():
        lines.append(f"-n __fish_use_subcommand -f -a {verb} -d {quote(summaries[verb])}")
        for option, text, valued in options:
            offered = {"--format": _FORMATS, "--kernel": f"({_LIST} kernels -- (commandline -opc) 2>/dev/null)"}
            value = f" -r -f -a '{offered[option]}'" if option in offered else " -r" if valued else ""
            lines.append(f"-n '__fish_seen_subcommand_from {verb}' -l {option[2:]}{value} -d {quote(text)}")
    for kind, verbs in (("entries", _ENTRIES), ("kernels", _KERNELS)):
        words = f"({_LIST} {kind} -- (commandline -opc) 2>/dev/null)"
        lines.append(f"-n '__fish_seen_subcommand_from {' '.join(verbs)}' -f -a '{words}'")
    lines.append(f"-n '__fish_seen_subcommand_from completion' -f -a '{' '.join(_SHELLS)}'")
    head = "# fish completion for tunebook: put it into ~/.config/fish/completions/tunebook.fish\n"
    return head + "\n".join(f"complete -c tunebook {line}" for line in lines)


VERB = Verb("tunebook completion bash > tunebook-completion.bash", _run, (), _arguments, __doc__)
