"""What one process is, exactly enough to start it again elsewhere, and who descends from it; it never signals one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from state.models import Frozen, ProcessId
from tools.facts.base import Fact, as_text, decode, lines
from tools.procfs import ENCODE_SH, Stat, parse_stats

LIMIT_NAMES = {
    "Max cpu time": "cpu",
    "Max file size": "fsize",
    "Max data size": "data",
    "Max stack size": "stack",
    "Max core file size": "core",
    "Max resident set": "rss",
    "Max processes": "nproc",
    "Max open files": "nofile",
    "Max locked memory": "memlock",
    "Max address space": "as",
    "Max file locks": "locks",
    "Max pending signals": "sigpending",
    "Max msgqueue size": "msgqueue",
    "Max nice priority": "nice",
    "Max realtime priority": "rtprio",
    "Max realtime timeout": "rttime",
}
"""Names in /proc/PID/limits → names of getrlimit(2) without RLIMIT_, in lower case."""


class ProcessFacts(Frozen):
    """One process as procfs shows it. Text is UTF-8 with surrogate escapes, so that every byte can be had back."""

    process: ProcessId
    name: str = Field(description="the kernel's 15-byte name")
    ppid: int
    session: int
    state: str = Field(description="R, S, D, T, Z … as in proc(5)")
    user: str = Field(description="login name, or the number where it has none")
    argv: tuple[str, ...] = Field(description="() for zombies and kernel threads")
    cwd: str | None = Field(description="None where it may not be read")
    exe: str | None
    environ: dict[str, str] | None = Field(description="at exec; None where it may not be read")
    limits: dict[str, str] = Field(
        description="soft:hard by name, e.g. nofile, where they may be read; and umask, niceness and affinity"
    )
    stdio: tuple[str | None, str | None, str | None] = Field(description="where 0, 1 and 2 lead")
    rss_mb: float
    threads: int

    @property
    def has_tty(self) -> bool:
        """True when one of its standard streams is a terminal, which a restart cannot bring back."""
        return any(link is not None and link.startswith(("/dev/tty", "/dev/pts/")) for link in self.stdio)


@dataclass(frozen=True)
class ProcessFact(Fact[ProcessFacts | None]):
    """Everything about one process in one round trip; None when there is no such process."""

    pid: int
    private = True

    def command(self) -> str:
        """Raw files as encoded words; the stat file comes first and last, to notice that the pid changed hands."""
        return f"""{ENCODE_SH}
p=/proc/{self.pid:d}
[ -d $p ] || exit 0
link() {{ if l=$(readlink "$2" && echo .); then printf '%s ' "$1"; printf %s "$l" | enc; echo; else echo "$1 -"; fi; }}
show boot /proc/sys/kernel/random/boot_id
show stat $p/stat
for name in cmdline environ limits status; do show $name $p/$name; done
for name in cwd exe fd/0 fd/1 fd/2; do link $name $p/$name 2>/dev/null; done
while read -r key value rest; do [ "$key" = Uid: ] && echo "user $(id -nu "$value" 2>/dev/null || echo "$value")"
done 2>/dev/null <$p/status
show again $p/stat
"""

    def parse(self, output: bytes) -> ProcessFacts | None:
        """None also when the process ended, or its number went to another one, while it was looked at."""
        words = {name: values for name, *values in lines(output)}
        files = {name: decode(values[0]) for name, values in words.items() if name != "user"}
        stat, again = _only(files.get("stat")), _only(files.get("again"))
        if stat is None or again is None or stat.start_ticks != again.start_ticks:
            return None
        status = _fields(files["status"] or b"")
        return ProcessFacts(
            process=ProcessId(
                pid=stat.pid, start_ticks=stat.start_ticks, boot_id=as_text(files["boot"] or b"").strip()
            ),
            name=stat.comm,
            ppid=stat.ppid,
            session=stat.session,
            state=again.state,
            user=words["user"][0],
            argv=tuple(as_text(part) for part in _parts(files["cmdline"] or b"")),
            cwd=_link(files["cwd"]),
            exe=_link(files["exe"]),
            environ=_environ(files["environ"]),
            limits=_limits(files["limits"] or b"") | _manners(status, stat),
            stdio=(_link(files["fd/0"]), _link(files["fd/1"]), _link(files["fd/2"])),
            rss_mb=int(status.get("VmRSS", "0 kB").split()[0]) / 1024,
            threads=int(status.get("Threads", "0")),
        )


@dataclass(frozen=True)
class DescendantsFact(Fact[tuple[ProcessId, ...]]):
    """All living descendants of a process, nearest first, without itself."""

    pid: int

    def command(self) -> str:
        """Every process's stat file in one go."""
        return "cat /proc/sys/kernel/random/boot_id /proc/[0-9]*/stat 2>/dev/null; :"

    def parse(self, output: bytes) -> tuple[ProcessId, ...]:
        """() when it has none or does not exist; zombies are left out."""
        text = as_text(output)
        boot = text.split("\n", 1)[0]
        stats = [stat for stat in parse_stats(text) if stat.state != "Z"]
        family = descent(stats, [self.pid])
        by_pid = {stat.pid: stat for stat in stats}
        return tuple(
            ProcessId(pid=pid, start_ticks=by_pid[pid].start_ticks, boot_id=boot) for pid in family if pid != self.pid
        )


@dataclass(frozen=True)
class OpenFilesFact(Fact[int | None]):
    """How many files a process that the login starts may open, its soft limit raised; None for any number."""

    def command(self) -> str:
        """The hard limit: whoever needs more than the soft one can have it."""
        return "ulimit -H -n"

    def parse(self, output: bytes) -> int | None:
        """A number or a word."""
        said = as_text(output).strip()
        return None if said == "unlimited" else int(said)


def descent(stats: Iterable[Stat], roots: Iterable[int]) -> list[int]:
    """The roots and all of their descendants, each before its children."""
    children: dict[int, list[int]] = {}
    for stat in stats:
        children.setdefault(stat.ppid, []).append(stat.pid)
    found = list(dict.fromkeys(roots))
    for pid in found:
        found += [child for child in children.get(pid, []) if child not in found]
    return found


def _only(data: bytes | None) -> Stat | None:
    found = parse_stats(as_text(data or b""))
    return found[0] if found else None


def _parts(data: bytes) -> list[bytes]:
    """NUL-terminated strings; a last one without its NUL (a rewritten title) counts too."""
    parts = data.split(b"\0")
    return parts[:-1] if parts[-1] == b"" else parts


def _environ(data: bytes | None) -> dict[str, str] | None:
    """Name → value; of a name that occurs twice the first counts, as for getenv(3)."""
    if data is None:
        return None
    pairs = [as_text(part).partition("=") for part in _parts(data) if b"=" in part]
    return {name: value for name, _, value in reversed(pairs)}


def _link(data: bytes | None) -> str | None:
    """A link's target, which the command ended with a line end and a dot, so that no line end of its own is lost."""
    return None if data is None else as_text(data.removesuffix(b"\n."))


def _fields(data: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in as_text(data).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _manners(status: dict[str, str], stat: Stat) -> dict[str, str]:
    """What a child inherits beside its limits: umask (octal), niceness, and the cores that it may use (a list)."""
    found = {"umask": status.get("Umask"), "affinity": status.get("Cpus_allowed_list"), "niceness": str(stat.niceness)}
    return {name: value for name, value in found.items() if value is not None}


def _limits(data: bytes) -> dict[str, str]:
    """Rows are a name, its soft and its hard limit, padded with blanks."""
    found = {}
    for line in as_text(data).splitlines():
        for long, short in LIMIT_NAMES.items():
            if line.startswith(long + " "):
                soft, hard = line.removeprefix(long).split()[:2]
                found[short] = f"{soft}:{hard}"
    return found
