"""A server in a container of docker or podman: the container that was found is kept, experiments are others like it.

For an experiment the original is renamed, never removed, and a container with its options takes its name; going back
removes ours, gives the name back and starts the original. Everything is text; nothing is run here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from state.errors import ServerError
from state.models import Holder, LaunchSpec, ProcessId
from tools.jobs import job_dir
from tools.procfs import STAT_SH
from tools.services.base import AwaitPortFree, Operation, StopJobs
from tools.services.container_options import Container
from tools.services.held import MARK, SPEC_MARK, follow_sh, place_sh
from tools.services.lasting import container_run
from tools.services.memory import NOTE_LEVEL_SH, AwaitMemory
from tools.services.process import revealed
from tools.services.stop_container import LABEL, StopContainer, engine_sh

SET_ASIDE = re.compile(r"-ratchet-[0-9a-f]{12}$")
"""What is added to the name of the container that was found, while one of ours has its name."""


def base_name(name: str) -> str:
    """The name that a container has when it is not set aside, as after a reboot in mid-session."""
    return SET_ASIDE.sub("", name)


class InContainer:
    """Holds a server in a container that was there before."""

    def __init__(
        self, root: str, port: int, grace_s: float, holder: Holder, original: LaunchSpec, container: Container
    ) -> None:
        self.root = root
        self.port = port
        self.grace_s = grace_s
        self.holder = holder
        self.original = original
        self.container = container

    def plan(self, adopted: ProcessId | None, key: str) -> tuple[Operation, ...]:
        """See `Service.plan`. The engine goes first: it is its container."""
        return (
            StopContainer(root=self.root, holder=self.holder, adopted=adopted, grace_s=self.grace_s),
            StopJobs(root=self.root, shape="*-T*", but=key, grace_s=self.grace_s),
            AwaitPortFree(port=self.port, within_s=self.grace_s + 10),
            AwaitMemory(root=self.root, but=key, within_s=self.grace_s + 10),
        )

    def launch_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str:
        """See `Service.launch_script`: the job that has the engine start a container, and follows its main process."""
        is_original = desired.process_fingerprint == self.original.process_fingerprint
        begin = _ORIGINAL_SH if is_original else self._instead_sh(desired, secrets, key)
        return f"""{place_sh(self.root, key)}{NOTE_LEVEL_SH}{STAT_SH}{engine_sh(self.holder, self.root)}
{follow_sh(desired.process_fingerprint)}
name={shlex.quote(self.holder.name)} aside={shlex.quote(self._aside)}
# named NAME: gives the original that name, unless it has it
named() {{
  now=$(eng inspect --type container -f '{{{{.Name}}}}' "$original") || exit 1
  [ "${{now#/}}" = "$1" ] || eng rename "$original" "$1" || exit 1
}}
if [ "$(main_of "$original")" != 0 ]; then echo "$original was started by somebody else meanwhile" >&2; exit 1; fi
old=$(mine) || exit 1
for one in $old; do eng rm "$one" >/dev/null || exit 1; done
{begin}
since=$(date +%s)
eng start "$container" >/dev/null || exit 1
main=$(main_of "$container")
eng logs -f --since "$since" "$container" &
logs=$!
{_CHILD_SH if self.container.init else ""}
[ "$main" = 0 ] || follow "$main"
tries=0
while [ "$(main_of "$container")" != 0 ] && [ $tries -lt 100 ]; do tries=$((tries + 1)); nap; done
tries=0
while kill -0 $logs 2>/dev/null && [ $tries -lt 40 ]; do tries=$((tries + 1)); nap; done
kill $logs 2>/dev/null
code=$(eng inspect --type container -f '{{{{.State.ExitCode}}}}' "$container")
echo "ratchet: container $container ended with exit code $code" >&2
exit "${{code:-1}}"
"""

    # --- for good --------------------------------------------------------------------------------------------

    def lasting(self, desired: LaunchSpec) -> str:
        """See `Service.lasting`."""
        return container_run(self.holder, self.container, desired)

    def persist_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str | None:
        """See `Service.persist_script`: ours takes over the restart policy of the container that was found.

        What it was is noted first, so that nothing is lost if this ends half-way; by the note it is given back.
        """
        policy = shlex.quote(self.container.restart or "no")
        return f"""{engine_sh(self.holder, self.root)}
was={self._was}
[ -s "$was" ] || echo {policy} >"$was" || exit 1
read -r policy <"$was"
for one in $(mine); do
  [ "$(main_of "$one")" = 0 ] || {{ eng update --restart="$policy" "$one" >/dev/null || exit 1; }}
done
eng update --restart=no "$original" >/dev/null || exit 1
echo "the restart policy that was found, $policy, is now that of the container that serves"
"""

    def unpersist_script(self, session_id: str) -> str | None:
        """See `Service.unpersist_script`."""
        return f"""{engine_sh(self.holder, self.root)}
was={self._was}
[ -s "$was" ] || exit 0
read -r policy <"$was"
eng update --restart="$policy" "$original" >/dev/null && rm -f "$was"
"""

    @property
    def _was(self) -> str:
        """The file that notes the restart policy which the container that was found had, as a word of sh."""
        return shlex.quote(f"{self.root}/restart-{self.holder.id[:12]}")

    @property
    def _aside(self) -> str:
        return f"{self.holder.name}-ratchet-{self.holder.id[:12]}"

    def _instead_sh(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str:
        """Makes a container of ours under the original's name; sets `container`.

        The whole environment is given in a file that is ours alone: the image's own values must not come through.
        """
        environ = {name: revealed(value, secrets) for name, value in {**desired.hidden_env, **desired.env}.items()}
        marks = {MARK: f"{job_dir(self.root, key)}/", SPEC_MARK: desired.process_fingerprint}
        lines = [f"{name}={_one_line(name, value)}" for name, value in {**environ, **marks}.items()]
        words = [revealed(word, secrets) for word in desired.argv]
        options = [
            *self.container.options,
            f"--name={self.holder.name}",
            f"--label={LABEL}={self.root}",
            "--restart=no",
            f"--workdir={desired.cwd}",
            f"--entrypoint={words[0]}",
        ]
        tail = shlex.join([self.container.image, *words[1:]])
        return f"""named "$aside"
(umask 077; printf '%s\\n' {shlex.join(lines)} >"$d/env") || exit 1
container=$(eng create {shlex.join(options)} --env-file "$d/env" {tail}) || exit 1
rm -f "$d/env\""""


def in_place_sh(holder: Holder, root: str, container: Container, command: Sequence[str]) -> str:
    """Sh that runs a command that only prints, where the server's program lies: in the container, if it runs."""
    program, rest = shlex.quote(command[0]), shlex.join(command[1:])
    options = shlex.join(one for one in container.options if not one.startswith(("--label", "--tty", "--interactive")))
    return f"""{engine_sh(holder, root)}
if [ "$(main_of "$original")" != 0 ]; then eng exec "$original" {program} {rest}
else eng run --rm {options} --entrypoint {program} {shlex.quote(container.image)} {rest}
fi"""


def _one_line(name: str, value: str) -> str:
    if "\n" in value:
        raise ServerError(
            "a variable of the server holds a line end, which no container's environment file can carry",
            where={"variable": name},
            do="start the original container by hand; its environment cannot be rebuilt from here",
        )
    return value


_ORIGINAL_SH = """named "$name"
container=$original"""
_CHILD_SH = """# The engine's init is the main process; the server is its child.
tries=0
while [ "$main" != 0 ] && [ $tries -lt 100 ]; do
  child=$(cat "/proc/$main/task/$main/children" 2>/dev/null)
  [ -n "$child" ] && main=${child%% *} && break
  tries=$((tries + 1))
  nap
done"""
