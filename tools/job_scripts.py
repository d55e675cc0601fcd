"""The POSIX sh behind `tools.jobs`, as pure text, so that a watcher on the host can run it too; it runs nothing itself.

All scripts take the job's directory, already checked, and speak of it as `$d`.
"""

from __future__ import annotations

import math
import shlex

from tools.procfs import STAT_SH

STEP_S = 0.05
"""One `nap` of the scripts."""

COMMAND_SH = r"""
d=$1
stat_of $$ || exit 125
printf '%s %s %s\n' $$ "$st_ticks" "$boot" >"$d/process.part" && mv -f "$d/process.part" "$d/process" || exit 125
umask "$2"
exec /bin/sh "$d/run.sh"
"""
"""Runs as the job's process: records itself, then becomes the command, which keeps pid and start time."""

WRAPPER_SH = r"""
d=$1
mkdir "$d/begun" 2>/dev/null || exit 0
never_began() { rm -f "$d/wrapper.part" "$d/process.part"; rmdir "$d/begun"; exit 1; }
cd "$d" || never_began
trap : HUP INT TERM
stat_of $$ && printf '%s %s %s\n' $$ "$st_ticks" "$boot" >wrapper.part && mv -f wrapper.part wrapper || never_began
/bin/sh -c "$2" ratchet-job "$d" "$3" </dev/null >stdout 2>stderr &
while :; do
  wait $!
  code=$?
  kill -0 $! 2>/dev/null || break
done
[ -s process ] || never_began
printf '%s\n' $code >exit.part && mv -f exit.part exit || rm -f exit.part
crowded() {
  for path in /proc/[0-9]*; do
    stat_of "${path#/proc/}" && [ "$st_session" = $$ ] && [ "$path" != /proc/$$ ] && [ "$st_state" != Z ] && return 0
  done
  return 1
}
while crowded; do sleep 5; done
"""
"""Leads the job's session, waits for the command and leaves its exit code; a signal to it only wakes it up.

It stays until the session is empty: while it lives, the session's number proves that a process is the job's.
A command that could not be recorded, on a full disk for instance, was not run: the job has not begun then, and may be
tried again.
"""

LOOK_SH = r"""
say() {
  echo "phase $1"
  [ -s "$d/process" ] && echo "process $pid $ticks $pboot"
  [ "$1" = ended ] && echo "exit $(cat "$d/exit")"
  for name in stdout stderr; do [ -f "$d/$name" ] && echo "$name $(wc -c <"$d/$name")"; done
  :
}
# identities: sets pid ticks pboot of the command and leader lticks lboot of the wrapper
identities() {
  pid=0 ticks=0 pboot=- leader=0 lticks=0 lboot=-
  [ -s "$d/process" ] && read -r pid ticks pboot <"$d/process"
  [ -s "$d/wrapper" ] && read -r leader lticks lboot <"$d/wrapper"
  :
}
command_lives() { [ "$pboot" = "$boot" ] && lives "$pid" "$ticks"; }
wrapper_lives() { [ "$lboot" = "$boot" ] && lives "$leader" "$lticks"; }
# settle: sets phase; between the end of a command and its exit code, and between begin and record, it waits
settle() {
  tries=0
  while :; do
    identities
    if [ -f "$d/exit" ]; then phase=ended; return; fi
    if command_lives; then phase=running; return; fi
    if [ ! -d "$d/begun" ]; then
      if [ -f "$d/run.sh" ]; then phase=prepared; else phase=absent; fi
      return
    fi
    if [ "$lboot" != - ] && [ "$lboot" != "$boot" ]; then phase=vanished; return; fi
    tries=$((tries + 1))
    if [ $tries -gt 200 ] || { [ $tries -gt 20 ] && ! wrapper_lives; }; then phase=vanished; return; fi
    nap
  done
}
"""

MEMBERS_SH = r"""
# members: adds ` PID:TICKS` to $found for every process of the job but its wrapper
members() {
  owner=-
  wrapper_lives && owner=$leader
  rows=
  for path in /proc/[0-9]*; do
    one=${path#/proc/}
    stat_of "$one" && [ "$st_state" != Z ] && [ "$st_ticks" -ge "$ticks" ] &&
      rows="$rows $one:$st_ppid:$st_session:$st_ticks"
  done
  marked=$(grep -lF "RATCHET_JOB=$d/" /proc/[0-9]*/environ 2>/dev/null)
  marked=" $(printf %s "$marked" | tr '\n' ' ') "
  family=" "
  command_lives && family=" $pid " && owner=$st_session
  grown=yes
  while [ -n "$grown" ]; do
    grown=
    for row in $rows; do
      one=${row%%:*} rest=${row#*:}
      parent=${rest%%:*} rest=${rest#*:}
      session=${rest%%:*} since=${rest#*:}
      case "$family" in *" $one "*) continue ;; esac
      [ "$one" = "$leader" ] && continue
      case "$family" in *" $parent "*) ;; *)
        case "$marked" in *"/$one/"*) ;; *) [ "$session" = "$owner" ] || continue ;; esac ;;
      esac
      family="$family$one " grown=yes
    done
  done
  for row in $rows; do
    one=${row%%:*}
    case "$family" in *" $one "*)
      case "$found " in *" $one:${row##*:} "*) ;; *) found="$found $one:${row##*:}" ;; esac ;;
    esac
  done
}
# remaining: sets $left to those of $found that still live
remaining() {
  left=
  for row in $found; do lives "${row%:*}" "${row#*:}" && left="$left $row"; done
  [ -n "$left" ]
}
"""


ROOM_BYTES = 1 << 16
"""More than the files of a job that begins need; set aside when it is prepared."""


def prepare_script(directory: str, size: int) -> str:
    """Sh that stores its standard input as the job's command, unless begun, and sets the room for a start aside."""
    return f"""{_stored(directory, size)}
[ -d "$d/begun" ] || head -c {ROOM_BYTES} /dev/urandom >"$d/room.part" || {{ rm -f "$d/room.part"; exit 1; }}
"""


def start_script(directory: str, exports: str, size: int, within_s: float) -> str:
    """Sh that stores its standard input as the job's command, starts it unless begun, and prints its state.

    `exports` are lines of sh that set the job's environment. Fails when the input has not `size` bytes (a lost
    connection looks like its end), or nothing is recorded `within_s`.
    """
    wrapper = f"{exports}export RATCHET_JOB={shlex.quote(directory + '/')}\n{STAT_SH}{WRAPPER_SH}"
    return f"""{_stored(directory, size)}
mine=
if [ ! -d "$d/begun" ]; then
  setsid /bin/sh -c {shlex.quote(wrapper)} ratchet-wrapper "$d" {shlex.quote(STAT_SH + COMMAND_SH)} "$mask" \\
    </dev/null >>"$d/launch.log" 2>&1 &
  mine=$!
fi
tries=0
until [ -s "$d/process" ] || [ -f "$d/exit" ]; do
  tries=$((tries + 1))
  gone=
  [ -z "$mine" ] || [ -d "$d/begun" ] || kill -0 "$mine" 2>/dev/null || gone=yes
  if [ -n "$gone" ] || [ $tries -gt {_steps(within_s)} ]; then
    echo "no process was recorded in $d" >&2
    cat "$d/launch.log" >&2
    df -Pk "$d" >&2
    exit 1
  fi
  nap
done
settle
say $phase
"""


def _stored(directory: str, size: int) -> str:
    return f"""
mask=$(umask)
umask 077
d={shlex.quote(directory)}
{STAT_SH}{LOOK_SH}
mkdir -p "$d" || exit 1
if [ ! -d "$d/begun" ]; then
  command -v setsid >/dev/null || {{ echo "setsid is not installed" >&2; exit 1; }}
  rm -f "$d/room.part"
  part=$d/run.sh.$$.part
  trap 'rm -f "$part"' EXIT
  trap 'exit 1' HUP INT TERM PIPE
  cat >"$part" && chmod 600 "$part" || exit 1
  if [ "$(wc -c <"$part")" -ne {size} ]; then echo "the command arrived incomplete" >&2; exit 1; fi
  mv -f "$part" "$d/run.sh" || exit 1
fi
"""


def look_script(directory: str) -> str:
    """Sh that prints the job's state for `tools.jobs.parse_look`."""
    return f"d={shlex.quote(directory)}\n{STAT_SH}{LOOK_SH}\nsettle\nsay $phase\n"


def stop_script(directory: str, grace_s: float) -> str:
    """Sh that ends the job in `directory` and prints its state; fails and names whoever is left."""
    return f"d={shlex.quote(directory)}\n{stop_body(grace_s)}"


def stop_body(grace_s: float) -> str:
    """Sh that ends the job whose directory is in `$d`: TERM, `grace_s`, KILL. It exits, so give it a subshell.

    Children get a second after their parent is gone. Processes of another boot are never touched.
    """
    return f"""
{STAT_SH}{LOOK_SH}{MEMBERS_SH}
settle
[ -d "$d/begun" ] || {{ say $phase; exit 0; }}
[ "$lboot" = "$boot" ] || {{ say $phase; exit 0; }}
found=
members
command_lives && kill -TERM "$pid" 2>/dev/null
tries=0
while command_lives && [ $tries -lt {_steps(grace_s)} ]; do nap; tries=$((tries + 1)); done
tries=0
while remaining && ! command_lives && [ $tries -lt {_steps(1.0)} ]; do nap; tries=$((tries + 1)); done
tries=0
while members; remaining && [ $tries -lt {_steps(10.0)} ]; do
  for row in $left; do lives "${{row%:*}}" "${{row#*:}}" && kill -KILL "${{row%:*}}" 2>/dev/null; done
  nap
  tries=$((tries + 1))
done
if [ -n "$left" ]; then
  for row in $left; do stat_of "${{row%:*}}" && echo "process ${{row%:*}} is left in state $st_state" >&2; done
  exit 1
fi
settle
say $phase
"""


def _steps(seconds: float) -> int:
    return max(1, math.ceil(seconds / STEP_S))
