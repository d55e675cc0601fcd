"""What a person types so that a configuration outlives a reboot: pure text; it runs nothing and reveals no secret.

A secret stands as a variable in its place: `$NAME` for a hidden variable, `$API_KEY` for the value of `--api-key`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from state.models import Holder, LaunchSpec
from tools.services.container_options import Container

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PLACEHOLDER = re.compile(r"«secret:[^»]*»")
"""What stands for a secret in a spec; its value lies on the host alone."""


def command_line(spec: LaunchSpec) -> str:
    """The whole command of a bare process, with its directory and environment, for a shell on the host."""
    return f"cd {shlex.quote(spec.cwd)} && {' '.join(['env', *_variables(spec), *_words(spec.argv)])}"


def container_run(holder: Holder, container: Container, spec: LaunchSpec) -> str:
    """The command that makes a container like the one that was found, with another command line and environment."""
    program, *rest = _words(spec.argv)
    options = shlex.join((*container.options, f"--name={holder.name}", f"--restart={container.restart or 'no'}"))
    environ = " ".join(f"-e {pair}" for pair in _variables(spec))
    place = f"--workdir={shlex.quote(spec.cwd)} --entrypoint={program}"
    made = f"{holder.scope} run -d {options} {environ} {place} {shlex.quote(container.image)} {' '.join(rest)}"
    first = f"# when the containers that are named {holder.name}… have been stopped and removed or renamed:"
    return f"{first}\n{made.rstrip()}"


def unit_commands(holder: Holder, drop_in: str) -> str:
    """The commands that put a drop-in beside the unit in place of the one that a reboot forgets."""
    user = holder.scope == "user"
    place = f"~/.config/systemd/user/{holder.name}.d" if user else f"/etc/systemd/system/{holder.name}.d"
    runtime = f"$XDG_RUNTIME_DIR/systemd/user/{holder.name}.d" if user else f"/run/systemd/system/{holder.name}.d"
    systemctl = "systemctl --user" if user else "systemctl"
    return f"""\
{"" if user else "# as root" + chr(10)}mkdir -p {place}
cat >{place}/ratchet.conf <<'END'
{drop_in}END
rm -f {runtime}/zz-ratchet-*
{systemctl} daemon-reload && {systemctl} restart {holder.name}"""


def without_secrets(text: str, argv: Sequence[str]) -> str:
    """A text made of a command line, with the name of a variable, as systemd reads it, for each secret in it."""
    names = {found: name for word, name in _secret_words(argv) for found in PLACEHOLDER.findall(word)}
    return PLACEHOLDER.sub(lambda found: f"${{{names.get(found[0], 'SECRET')}}}", text)


def _variables(spec: LaunchSpec) -> Iterator[str]:
    yield from (f"{name}={shlex.quote(value)}" for name, value in sorted(spec.env.items()))
    yield from (f'{name}="${name}"' for name in sorted(spec.hidden_env) if VARIABLE.fullmatch(name))


def _words(argv: Sequence[str]) -> list[str]:
    """The words as a shell wants them."""
    secret = dict(_secret_words(argv))
    return [_hidden(word, secret[word]) if word in secret else shlex.quote(word) for word in argv]


def _hidden(word: str, name: str) -> str:
    parts = PLACEHOLDER.split(word)
    return f'"${name}"'.join(shlex.quote(part) if part else "" for part in parts)


def _secret_words(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Words with a secret, each with a name for it that comes from its flag."""
    for at, word in enumerate(argv):
        if PLACEHOLDER.search(word):
            flag = word.partition("=")[0] if word.startswith("-") else argv[at - 1] if at else ""
            yield word, re.sub(r"\W+", "_", flag.strip("-")).upper() or "SECRET"
