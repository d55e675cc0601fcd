"""A server that systemd holds: stopped and started by its manager alone, changed by one drop-in that a reboot forgets.

An experiment is a drop-in in the manager's runtime directory; the unit's own files are never written. The original is
the unit without that drop-in, so going back to it means removing one file. Everything is text; nothing is run here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from state.models import Holder, LaunchSpec, ProcessId
from tools.changes.base import overlays
from tools.changes.overlay import PATH_VARIABLE, in_front, there_sh
from tools.jobs import job_dir
from tools.procfs import STAT_SH
from tools.services.base import AwaitPortFree, Operation, StopJobs
from tools.services.held import MARK, SPEC_MARK, follow_sh, place_sh
from tools.services.lasting import unit_commands, without_secrets
from tools.services.memory import NOTE_LEVEL_SH, AwaitMemory
from tools.services.process import revealed
from tools.services.stop_unit import StopUnit, manager_sh

ENV = "/usr/bin/env"
PLAIN_PATH = re.compile(r"/[^$%]*")
LOG_LINES = 200


class SystemdUnit:
    """Holds a server as a unit that was there before."""

    def __init__(self, root: str, port: int, grace_s: float, holder: Holder, original: LaunchSpec) -> None:
        self.root = root
        self.port = port
        self.grace_s = grace_s
        self.holder = holder
        self.original = original

    def plan(self, adopted: ProcessId | None, key: str) -> tuple[Operation, ...]:
        """See `Service.plan`. The manager goes first: ending what it holds would make it start that again."""
        return (
            StopUnit(root=self.root, holder=self.holder, adopted=adopted, grace_s=self.grace_s),
            StopJobs(root=self.root, shape="*-T*", but=key, grace_s=self.grace_s),
            AwaitPortFree(port=self.port, within_s=self.grace_s + 10),
            AwaitMemory(root=self.root, but=key, within_s=self.grace_s + 10),
        )

    def launch_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str:
        """See `Service.launch_script`: the job that has the unit started, and follows its main process."""
        original = desired.process_fingerprint == self.original.process_fingerprint
        name = f"zz-ratchet-{key.rpartition('-T')[0]}"
        place = self._drop_ins()
        files = {} if original else self._files(desired, secrets, key)
        written = _written_sh(place, name, files)
        return f"""{place_sh(self.root, key)}{NOTE_LEVEL_SH}{STAT_SH}{manager_sh(self.holder)}
{follow_sh(desired.process_fingerprint)}
if [ "$(prop MainPID)" != 0 ]; then echo "$unit was started by somebody else meanwhile" >&2; exit 1; fi
root rm -f {place}/{name}.conf {place}/{name}.env
root rmdir {place} 2>/dev/null
{there_sh(self.root, desired.beside)}{written}mgr daemon-reload || exit 1
mgr reset-failed -- "$unit" 2>/dev/null
mgr start -- "$unit" &
starter=$!
while :; do
  asking=yes
  kill -0 $starter 2>/dev/null || asking=
  main=$(prop MainPID)
  [ "${{main:-0}}" != 0 ] || [ -z "$asking" ] && break
  nap
done
[ "${{main:-0}}" = 0 ] || follow "$main"
tries=0
while case "$(prop ActiveState)" in *activating) [ $tries -lt 40 ] ;; *) false ;; esac; do
  tries=$((tries + 1))
  nap
done
echo "ratchet: $unit ended: $(prop Result), started again by its manager $(prop NRestarts) times" >&2
{self._journal_sh() if original else ""}
status=$(prop ExecMainStatus)
case "$(prop ExecMainCode)" in 2 | 3 | killed | dumped) status=$((128 + status)) ;; esac
[ "${{main:-0}}" != 0 ] || [ "${{status:-0}}" != 0 ] || status=1
exit "${{status:-1}}"
"""

    # --- for good --------------------------------------------------------------------------------------------

    def lasting(self, desired: LaunchSpec) -> str:
        """See `Service.lasting`."""
        changed, removed = self._changes(desired)
        text = lasting_drop_in(desired.argv, [f"Environment={_setting(*pair)}" for pair in changed.items()], removed)
        return unit_commands(self.holder, without_secrets(text, desired.argv))

    def persist_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str | None:
        """See `Service.persist_script`: one drop-in that a reboot keeps, in place of the one that it forgets.

        The unit's own files stay as they are, and so does the process; what it is restarted by is the unit's own again.
        """
        session = key.rpartition("-T")[0]
        changed, removed = self._changes(desired)
        folder = "user" if self.holder.scope == "user" else "system"
        env_path = f"%E/systemd/{folder}/{_escaped(self.holder.name)}.d/{_kept(session)}.env"
        command = [revealed(word, secrets) for word in desired.argv]
        files = {
            ".env": self._env(changed, secrets, desired, key),
            ".conf": lasting_drop_in(command, [f"EnvironmentFile={env_path}"], removed),
        }
        runtime = self._drop_ins()
        return f"""{manager_sh(self.holder)}
{_written_sh(self._kept_drop_ins(), _kept(session), files)}
root rm -f {runtime}/zz-ratchet-{session}.conf {runtime}/zz-ratchet-{session}.env
root rmdir {runtime} 2>/dev/null
mgr daemon-reload || exit 1
echo "a drop-in of $unit that a reboot keeps, "{self._kept_drop_ins()}/{_kept(session)}.conf
"""

    def unpersist_script(self, session_id: str) -> str | None:
        """See `Service.unpersist_script`."""
        place, name = self._kept_drop_ins(), _kept(session_id)
        return f"""{manager_sh(self.holder)}
root sh -c '[ -e "$1.conf" ] || [ -e "$1.env" ]' sh {place}/{name} || exit 0
root rm -f {place}/{name}.conf {place}/{name}.env || exit 1
root rmdir {place} 2>/dev/null
mgr daemon-reload
"""

    def _kept_drop_ins(self) -> str:
        """Where drop-ins lie that a reboot keeps, as a word of sh."""
        configured = '"${XDG_CONFIG_HOME:-$HOME/.config}"/systemd/user'
        kept = configured if self.holder.scope == "user" else "/etc/systemd/system"
        return f"{kept}/{shlex.quote(self.holder.name + '.d')}"

    def _drop_ins(self) -> str:
        """Where drop-ins lie that a reboot forgets, as a word of sh."""
        runtime = '"$XDG_RUNTIME_DIR"/systemd/user' if self.holder.scope == "user" else "/run/systemd/system"
        return f"{runtime}/{shlex.quote(self.holder.name + '.d')}"

    def _files(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> dict[str, str]:
        """Endings and texts of the files of an experiment.

        Variables go into a file of their own, since a later EnvironmentFile= wins over everything that the unit sets,
        and only root can read it. What the unit sets itself is not repeated.
        """
        changed, removed = self._changes(desired)
        command = [revealed(word, secrets) for word in desired.argv]
        return {
            ".env": self._env(changed, secrets, desired, key),
            ".conf": drop_in(command, removed, self._env_path(key), job_dir(self.root, key), key),
        }

    def _changes(self, desired: LaunchSpec) -> tuple[dict[str, str], list[str]]:
        """Variables that are other than the unit's own, secrets as placeholders, and those that are gone."""
        before, after = ({**spec.hidden_env, **spec.env} for spec in (self.original, desired))
        changed = {name: value for name, value in after.items() if before.get(name) != value}
        if overlays(desired.beside):
            recorded = {name: after[name] for name in after if name == PATH_VARIABLE}
            changed |= in_front(self.root, desired.beside, recorded)
        return changed, sorted(name for name in before if name not in after)

    def _env(self, changed: dict[str, str], secrets: dict[str, str], desired: LaunchSpec, key: str) -> str:
        """The file of variables, with the marks by which what the manager starts is known as ours."""
        marks = {MARK: f"{job_dir(self.root, key)}/", SPEC_MARK: desired.process_fingerprint}
        shown = {name: revealed(value, secrets) for name, value in changed.items()}
        return "".join(f"{name}={_env_quoted(value)}\n" for name, value in {**shown, **marks}.items())

    def _env_path(self, key: str) -> str:
        base = "%t/systemd/user" if self.holder.scope == "user" else "/run/systemd/system"
        return f"{base}/{_escaped(self.holder.name)}.d/zz-ratchet-{key.rpartition('-T')[0]}.env"

    def _journal_sh(self) -> str:
        """The original writes to where its unit says; if that is the journal, its last lines are wanted here."""
        scope = "--user-unit" if self.holder.scope == "user" else "--unit"
        return f'root journalctl --no-pager --quiet -o cat -n {LOG_LINES} {scope} "$unit" >&2 2>/dev/null\n:'


def drop_in(command: Sequence[str], removed: Sequence[str], environment_file: str, folder: str, key: str) -> str:
    """The text of a drop-in: another command and environment, one start, and the output in the launch's own folder."""
    log = _escaped(folder)
    return f"""\
# Written by Ratchet for launch {key}. To go back to the unit as it was: remove this file, `systemctl daemon-reload`,
# restart the unit. A reboot does the same.
[Unit]
StartLimitIntervalSec=0
FailureAction=none
SuccessAction=none

[Service]
ExecStart=
ExecStart={exec_start(command)}
Restart=no
EnvironmentFile={environment_file}
{"".join(f"UnsetEnvironment={name}" + chr(10) for name in removed)}StandardOutput=append:{log}/stdout
StandardError=append:{log}/stderr
"""


def lasting_drop_in(command: Sequence[str], variables: Sequence[str], removed: Sequence[str]) -> str:
    """The text of a drop-in for good: another command and environment, all else as the unit has it."""
    lines = [*variables, *(f"UnsetEnvironment={name}" for name in removed)]
    return f"""\
# Written by Ratchet. To go back to the unit as it was: remove this file, `systemctl daemon-reload`, restart the unit.
[Service]
ExecStart=
ExecStart={exec_start(command)}
{"".join(line + chr(10) for line in lines)}"""


def _kept(session_id: str) -> str:
    """Name of the files of a drop-in for good: after an earlier session's, and before those of a later experiment."""
    return f"zy-ratchet-{session_id}"


def _written_sh(place: str, name: str, files: dict[str, str]) -> str:
    """Sh that writes files by their endings, each whole or not at all."""
    return "".join(
        f"printf %s {shlex.quote(text)} | root sh -c {shlex.quote(_WRITE_SH)} sh {place} {shlex.quote(name + end)}"
        " || exit 1\n"
        for end, text in files.items()
    )


def exec_start(command: Sequence[str]) -> str:
    """A command line as ExecStart= reads it. env(1) looks for a program in the unit's own PATH; systemd would not."""
    words = list(command) if PLAIN_PATH.fullmatch(command[0]) else [ENV, *command]
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    """One word of ExecStart=: C escapes, and nothing for systemd to expand (systemd.service(5), COMMAND LINES)."""
    shown = []
    for character in word:
        if character in '\\"':
            shown.append("\\" + character)
        elif character in "%$":
            shown.append(character * 2)
        elif ord(character) < 0x20 or ord(character) == 0x7F:
            shown.append(f"\\x{ord(character):02x}")
        else:
            shown.append(character)
    return '"' + "".join(shown) + '"'


def _setting(name: str, value: str) -> str:
    """A variable for Environment=: quoted, and nothing for systemd to expand (systemd.exec(5), Environment=)."""
    return '"' + re.sub(r'(["\\])', r"\\\1", f"{name}={value}").replace("%", "%%") + '"'


def _env_quoted(value: str) -> str:
    """A value in an environment file: like the shell's double quotes (systemd.exec(5), EnvironmentFile=)."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def _escaped(path: str) -> str:
    return path.replace("%", "%%")


_WRITE_SH = 'umask 022; mkdir -p "$1" && umask 077 && cat >"$1/$2.part" && mv -f "$1/$2.part" "$1/$2"'
"""Only root may read a drop-in: a command line can hold a secret."""
