"""Packages and checkouts as folders in front of a server's own packages: where they lie, how they are made; pure text.

    ROOT/overlays/DIGEST/   site or tree   what PYTHONPATH names          change.json   what it is
                            lock.txt       what was installed             base.txt      what the server had before
                            ready          there once all of it is complete

Nothing installed before is touched, so there is nothing to take back: a server without the folder does not see it.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence

from state.models import Beside, CheckoutChange, LaunchSpec, PackageChange, digest
from tools.changes.base import Overlay, overlays

PATH_VARIABLE = "PYTHONPATH"


def overlay_digest(change: Overlay) -> str:
    """The name of its folder."""
    return digest([change.model_dump(mode="json")])


def overlay_dir(root: str, change: Overlay) -> str:
    """Everything about one overlay."""
    return f"{root}/overlays/{overlay_digest(change)}"


def on_path(root: str, beside: Sequence[Beside]) -> tuple[str, ...]:
    """The folders that PYTHONPATH begins with."""
    return tuple(
        f"{overlay_dir(root, change)}/site"
        if isinstance(change, PackageChange)
        else posixpath.normpath(f"{overlay_dir(root, change)}/tree/{change.path}")
        for change in overlays(tuple(beside))
    )


def in_front(root: str, beside: Sequence[Beside], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the overlays in front of whatever PYTHONPATH it has."""
    folders = on_path(root, beside)
    if not folders:
        return dict(environ)
    before = [environ[PATH_VARIABLE]] if PATH_VARIABLE in environ else []
    return {**environ, PATH_VARIABLE: ":".join([*folders, *before])}


def parted(root: str, environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment as it is without overlays, and the digests of those that it had in front."""
    ours = f"{root}/overlays/"
    words = environ[PATH_VARIABLE].split(":") if PATH_VARIABLE in environ else []
    count = next((at for at, word in enumerate(words) if not word.startswith(ours)), len(words))
    digests = tuple(word.removeprefix(ours).split("/")[0] for word in words[:count])
    bare = {name: value for name, value in environ.items() if name != PATH_VARIABLE}
    return bare | ({PATH_VARIABLE: ":".join(words[count:])} if words[count:] else {}), digests


def there_sh(root: str, beside: Sequence[Beside]) -> str:
    """Lines of sh that end a launch whose overlays are gone: it would serve something else in silence."""
    gone = 'echo "ratchet: the folder of a changed package is gone: $ratchet_folder" >&2'
    return "".join(
        f'ratchet_folder={shlex.quote(folder)}; [ -d "$ratchet_folder" ] || {{ {gone}; exit 126; }}\n'
        for folder in on_path(root, beside)
    )


def making_sh(root: str, change: Overlay, spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    """The job that makes an overlay; the last lines that it prints say why it could not."""
    place = overlay_dir(root, change)
    head = f"cd {shlex.quote(spec.cwd)} || exit 1\nprogram={shlex.quote(spec.argv[0])}\n"
    search = f"search={shlex.quote(environ['PATH'])}\n" if "PATH" in environ else "search=$PATH\n"
    make = _packages_sh(change) if isinstance(change, PackageChange) else _checkout_sh(change)
    return f"{head}{search}umask 022\nd={shlex.quote(place)}\n{make}"


def _packages_sh(change: PackageChange) -> str:
    install = shlex.join([*change.options, "--", *change.requirements])
    return f"""{_INTERPRETER_SH}
if [ -e "$d/ready" ]; then
  [ "$(cat "$d/ready")" = "$python" ] && exit 0
  echo "$d was made for $(cat "$d/ready"), the server runs by $python: remove the folder" >&2
  exit 1
fi
part=$d/part.$$
"$python" -m pip freeze --all >"$d/base.txt" || exit 1
"$python" -m pip install --no-deps --no-input --disable-pip-version-check --target "$part" {install} || exit 1
"$python" -m pip freeze --all --path "$part" >"$d/lock.txt" || exit 1
[ -e "$d/site" ] || mv "$part" "$d/site" || exit 1
printf '%s\\n' "$python" >"$d/ready.part" && mv -f "$d/ready.part" "$d/ready"
"""


def _checkout_sh(change: CheckoutChange) -> str:
    repository, commit = shlex.quote(change.repository), shlex.quote(f"{change.commit}^{{commit}}")
    inside, missing = shlex.quote(change.path), shlex.quote(f"{change} has no folder {change.path}")
    return f"""
[ -e "$d/ready" ] && exit 0
found=$(git -C {repository} rev-parse --verify {commit}) || exit 1
git -C {repository} worktree prune || exit 1
if [ -e "$d/tree" ]; then git -C {repository} worktree remove --force "$d/tree" || exit 1; fi
git -C {repository} worktree add --detach "$d/tree" "$found" >&2 || exit 1
if [ ! -d "$d/tree/"{inside} ]; then echo {missing} >&2; exit 1; fi
echo "$found" >"$d/lock.txt" || exit 1
git -C {repository} rev-parse HEAD >"$d/base.txt" || exit 1
: >"$d/ready"
"""


_INTERPRETER_SH = r"""
# The interpreter that runs the server: the program itself, or what its first line names.
path=$(PATH=$search; command -v "$program") || { echo "there is no program $program" >&2; exit 1; }
case "${path##*/}" in
  python*) python=$path ;;
  *)
    read -r first <"$path"
    case "$first" in
      '#!'*/env\ *python*) python=$(PATH=$search; command -v "${first##* }") ;;
      '#!'*/sh) python=$(sed -n "2s/^'''exec' [\"']*\([^\"' ]*\).*/\1/p" "$path") ;;
      '#!'*python*) python=${first#'#!'}; python=${python# } ; python=${python%% *} ;;
      *) python= ;;
    esac
    ;;
esac
if [ -z "$python" ]; then echo "$path is no Python program: its interpreter is not known" >&2; exit 1; fi
"""
