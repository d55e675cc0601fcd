"""Patched files as an aside: bytes from before and from after, and sh that changes one for the other; it runs nothing.

All patches of a configuration are one aside, so that a file goes from its original to what is wanted and back, and
never from one patched state to another. A file that is neither as it was nor as we left it is somebody else's.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence

from state.models import PatchChange
from tools.changes.base import Aside, Planned, aside_dir
from tools.changes.diff import parsed, patched

LIST = "files"
"""Names the patched files, one `NUMBER PATH` a line."""


def paths_of(changes: Sequence[PatchChange]) -> tuple[str, ...]:
    """Every file that the patches are about, once. ValueError for a diff that is none."""
    found: dict[str, None] = {}
    for change in changes:
        for name in (file.path for file in parsed(change.diff)):
            found[posixpath.normpath(f"{change.directory}/{name}")] = None
    return tuple(found)


def all_patched(changes: Sequence[PatchChange], before: Mapping[str, bytes]) -> dict[str, bytes]:
    """Every file with all patches applied in order. ValueError where one does not fit."""
    texts = dict(before)
    for change in changes:
        for file in parsed(change.diff):
            path = posixpath.normpath(f"{change.directory}/{file.path}")
            try:
                texts[path] = patched(texts[path], file.hunks)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
    same = [path for path, text in texts.items() if text == before[path]]
    if same:
        raise ValueError(f"{same[0]} stays as it is")
    return texts


def aside(root: str, plan: Planned, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Aside:
    """The aside of a configuration's patches."""
    changes = [change for change in plan.changes if isinstance(change, PatchChange)]
    folders = tuple(dict.fromkeys(folder for change in changes for folder in change.clear))
    files = {f"{number}.before": before[path] for number, path in enumerate(after)}
    files |= {f"{number}.after": text for number, text in enumerate(after.values())}
    listed = "".join(f"{number} {path}\n" for number, path in enumerate(after))
    each = [f"file {shlex.quote(path)} {number}" for number, path in enumerate(after)]
    each += [f"folder {shlex.quote(path)} {number}" for number, path in enumerate(folders)]
    head = f"a={shlex.quote(aside_dir(root, plan.digest))} tag={plan.digest}\n{_COMMON_SH}"
    scripts = {"probe": _PROBE_SH, "do": _DO_SH, "undo": _UNDO_SH, "fits": _FITS_SH}
    for name, (functions, end) in scripts.items():
        files[name] = "\n".join([head, functions, *each, end, ""]).encode("utf-8", "surrogateescape")
    files[LIST] = listed.encode("utf-8", "surrogateescape")
    return Aside(plan.digest, plan.when, "; ".join(map(str, changes)), files)


def check_sh(change: PatchChange, path: str) -> str:
    """Sh that says why a file cannot be patched, if it cannot."""
    return f"""
folder={shlex.quote(change.directory)} file={shlex.quote(path)}
no() {{ echo "$1" >&2; exit 1; }}
real=$(cd "$folder" 2>/dev/null && pwd -P) || no "there is no folder $folder"
[ "$real" = "$folder" ] || no "$folder is reached by a symbolic link: write $real"
home=$(cd 2>/dev/null && pwd -P)
[ "$real" != "$home" ] || no "$folder is a home directory: name the folder in it that is meant"
[ -L "$file" ] && no "$file is a symbolic link"
[ -f "$file" ] || no "there is no file $file"
within=$(cd "${{file%/*}}" && pwd -P) || no "${{file%/*}} cannot be entered"
[ "$within" = "${{file%/*}}" ] || no "$file is reached by a symbolic link: $within"
case "$within/" in "$folder"/*) ;; *) no "$file is not in $folder" ;; esac
[ -w "$file" ] && [ -w "$within" ] || no "$file or its folder cannot be written by this login"
owner=$(ls -ldn "$file") && set -- $owner
[ "$(id -u)" = 0 ] || [ "$3" = "$(id -u)" ] || no "$file belongs to another user"
"""


def check_folder_sh(folder: str) -> str:
    """Sh that says why a cache folder cannot be set aside, if it cannot; one that is not there can."""
    return f"""
folder={shlex.quote(folder)}
no() {{ echo "$1" >&2; exit 1; }}
[ "$folder" != "$(cd 2>/dev/null && pwd -P)" ] || no "$folder is a home directory"
[ -L "$folder" ] && no "$folder is a symbolic link"
above=$(cd "${{folder%/*}}/" 2>/dev/null && pwd -P) || no "there is no folder ${{folder%/*}}"
[ "${{above%/}}" = "${{folder%/*}}" ] || no "$folder is reached by a symbolic link: ${{above%/}}/${{folder##*/}}"
[ -w "$above" ] || no "$above cannot be written by this login"
[ -e "$folder" ] || exit 0
[ -d "$folder" ] || no "$folder is no folder"
on() {{ df -P "$1" | tail -n 1 | sed 's/.* //'; }}
[ "$(on "$folder")" = "$(on "$above")" ] || no "$folder is a file system of its own"
"""


_COMMON_SH = r"""
is() { [ -f "$1" ] && [ ! -L "$1" ] && cmp -s "$1" "$a/$2"; }
part() { echo "${1%/*}/.${1##*/}.ratchet-$tag"; }
flush() { sync "$@" 2>/dev/null || sync; }
no() { echo "$1" >&2; exit 1; }
# put PATH SOURCE: the file gets these bytes and keeps mode and owner; there is no moment without a whole file
put() {
  part=$(part "$1")
  rm -f "$part"
  cp -p "$1" "$part" && cat "$a/$2" >"$part" && { [ "${2%.before}" = "$2" ] || touch -r "$a/$2" "$part"; } &&
    flush "$part" && mv -f "$part" "$1" && flush "${1%/*}" && return 0
  rm -f "$part"
  no "$1 could not be written"
}
"""
_PROBE_SH = (
    r"""
on= off= half=
file() {
  if [ -e "$(part "$1")" ]; then half=yes
  elif is "$1" "$2.after"; then on=yes
  elif is "$1" "$2.before"; then off=yes
  else half=yes
  fi
}
folder() {
  if [ -e "$1.ratchet-$tag" ] || [ -e "$a/$2.absent" ]; then
    if [ ! -e "$1" ] && [ -e "$1.ratchet-$tag.used" ]; then half=yes; else on=yes; fi
  else off=yes
  fi
}
""",
    """[ -z "$half" ] || exit 3
[ -n "$on" ] && [ -n "$off" ] && exit 3
[ -n "$on" ] || exit 1""",
)
_DO_SH = (
    r"""
file() {
  rm -f "$(part "$1")"
  is "$1" "$2.after" && return 0
  is "$1" "$2.before" || no "$1 was changed by somebody else and was left alone"
  put "$1" "$2.after"
}
folder() {
  if [ ! -e "$1.ratchet-$tag" ] && [ ! -e "$a/$2.absent" ]; then
    if [ -d "$1" ] && [ ! -L "$1" ]; then mv "$1" "$1.ratchet-$tag" || exit 1
    elif [ -e "$1" ] || [ -L "$1" ]; then no "$1 is no folder any more"
    else : >"$a/$2.absent" || exit 1
    fi
  fi
  # What grew while the same patch was applied before belongs to it.
  if [ -e "$1.ratchet-$tag.used" ] && [ ! -e "$1" ]; then mv "$1.ratchet-$tag.used" "$1" || exit 1; fi
}
""",
    "exit 0",
)
_UNDO_SH = (
    r"""
file() {
  rm -f "$(part "$1")"
  is "$1" "$2.before" && return 0
  is "$1" "$2.after" || no "$1 was changed by somebody else and was left alone"
  put "$1" "$2.before"
}
# grown PATH: what grew meanwhile makes way, and is kept
grown() {
  [ -e "$1" ] || return 0
  [ ! -e "$1.ratchet-$tag.used" ] || no "$1.ratchet-$tag.used is in the way"
  mv "$1" "$1.ratchet-$tag.used" || exit 1
}
folder() {
  if [ -e "$1.ratchet-$tag" ]; then
    grown "$1"
    mv "$1.ratchet-$tag" "$1" || exit 1
  elif [ -e "$a/$2.absent" ]; then
    grown "$1"
    rm -f "$a/$2.absent"
  fi
}
""",
    "exit 0",
)
_FITS_SH = (
    r"""
foreign=
file() {
  is "$1" "$2.after" || is "$1" "$2.before" || { echo "$1 was changed by somebody else" >&2; foreign=yes; }
}
folder() { :; }
""",
    '[ -z "$foreign" ]',
)
