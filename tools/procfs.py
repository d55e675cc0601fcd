"""How procfs is read: fragments of POSIX sh, and the parser of what they print; runs nothing and signals nobody."""

from __future__ import annotations

import re
from typing import NamedTuple

STAT_SH = r"""
# stat_of PID: sets st_state st_ppid st_session st_ticks st_times; fails when there is no such process
stat_of() {
  st_line=
  { while read -r st_part; do st_line="$st_line$st_part "; done <"/proc/$1/stat"; } 2>/dev/null || return 1
  [ -n "$st_line" ] || return 1
  set -- ${st_line##*) }
  st_state=$1 st_ppid=$2 st_session=$4 st_ticks=${20} st_times="${12} ${13} ${14} ${15}"
}
# lives PID TICKS: true while that very process exists and is more than a zombie
lives() { stat_of "$1" && [ "$st_ticks" = "$2" ] && [ "$st_state" != Z ] && [ "$st_state" != X ]; }
nap() { sleep 0.05 2>/dev/null || sleep 1; }
read -r boot </proc/sys/kernel/random/boot_id || exit 1
"""
"""Functions for scripts: everything after the last `)` of a stat line is numbers, whatever a process calls itself.

`st_times` are utime, stime, cutime and cstime in clock ticks (proc(5)).
"""

FAMILY_SH = r"""
# family PID: sets $found to PID:TICKS of the process and all of its descendants
family() {
  rows=
  for path in /proc/[0-9]*; do
    one=${path#/proc/}
    stat_of "$one" && [ "$st_state" != Z ] && rows="$rows $one:$st_ppid:$st_ticks"
  done
  members=" $1 " grown=yes
  while [ -n "$grown" ]; do
    grown=
    for row in $rows; do
      one=${row%%:*} rest=${row#*:}
      case "$members" in *" $one "*) continue ;; esac
      case "$members" in *" ${rest%%:*} "*) members="$members$one " grown=yes ;; esac
    done
  done
  found=
  for row in $rows; do case "$members" in *" ${row%%:*} "*) found="$found ${row%%:*}:${row##*:}" ;; esac; done
}
# remaining: sets $left to those of $found that still live
remaining() {
  left=
  for row in $found; do lives "${row%:*}" "${row#*:}" && left="$left $row"; done
  [ -n "$left" ]
}
"""
"""Functions that find a process with all of its descendants; they need STAT_SH."""

ENCODE_SH = r"""
# enc: standard input as one word of text, `b64:…` or `hex:…`
if command -v base64 >/dev/null 2>&1
then enc() { printf b64:; base64 | tr -d '\n'; }
else enc() { printf hex:; od -An -v -tx1 | tr -d ' \n'; }
fi
# show NAME FILE: a line with a file's bytes, or `NAME -` when it cannot be read
show() {
  printf '%s ' "$1"
  if ( exec <"$2" ) 2>/dev/null; then enc <"$2" 2>/dev/null; else printf %s -; fi
  echo
}
"""
"""Functions that carry arbitrary bytes through text; `tools.facts` decodes them."""

LISTENING_SH = r"""
# listening PORT: address and inode of each socket that listens on the port, which is given as four hexadecimal digits
listening() {
  for table in tcp tcp6; do
    exec 3</proc/net/$table || continue
    while read -r slot mine theirs state queues timer retransmits uid timeout inode rest <&3; do
      case "$mine $state" in *:"$1 0A") echo "$mine $inode" ;; esac
    done
    exec 3<&-
  done 2>/dev/null
}
"""
"""0A is TCP_LISTEN in /proc/net/tcp, proc(5)."""

STAT_LINE = re.compile(r"^(\d+) \((.*?)\) ([A-Za-z]) ((?:-?\d+ ){40,}-?\d+)$", re.MULTILINE | re.DOTALL)


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used, proc(5); CPU times are in clock ticks."""

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    niceness: int
    start_ticks: int
    cpu_ticks: int
    reaped_cpu_ticks: int
    """Of all children that have ended and were waited for, theirs included."""


def parse_stats(text: str) -> list[Stat]:
    """Every process in concatenated stat files; names with blanks, brackets and line ends do not confuse it."""
    return [
        Stat(
            pid=int(match[1]),
            comm=match[2],
            state=match[3],
            ppid=int((rest := match[4].split())[0]),
            session=int(rest[2]),
            niceness=int(rest[15]),
            start_ticks=int(rest[18]),
            cpu_ticks=int(rest[10]) + int(rest[11]),
            reaped_cpu_ticks=int(rest[12]) + int(rest[13]),
        )
        for match in STAT_LINE.finditer(text)
    ]
