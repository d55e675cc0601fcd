"""A stand-in for the `llama-server` binary: the same HTTP server, out of the xllamacpp wheel, with the binary's flags.

It must not tune or default anything by itself, and it offers no flag that the library cannot carry. It is a program:
run it as `python -m tools.demo.llama_server` or by its path. It imports the standard library and xllamacpp only.
"""

import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

try:
    lib: Any = importlib.import_module("xllamacpp")
except ImportError as missing:
    sys.exit(f"error: {missing}: install the project's `demo` extra into {sys.executable}")

HELP_COLUMN = 40
"""Where llama-server starts an option's text."""
HELP_WIDTH = 70
"""How wide llama-server makes that text."""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
SPEC_TYPES = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
TRUE_WORDS, FALSE_WORDS = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


class UsageError(Exception):
    """The command line or the environment is wrong; the text is what llama-server prints before exit code 1."""


def number(text: str, function: str, low: float, high: float, digits: str = r"\d+") -> str:
    """The number `text` starts with, as C++'s std::sto* read it; the error is the function's name."""
    found = re.match(rf"\s*([+-]?{digits})", text)
    if not found or not low <= float(found.group(1)) <= high:
        raise ValueError(function)
    return found.group(1)


def stoi(text: str) -> int:
    """A signed 32-bit integer."""
    return int(number(text, "stoi", -(2**31), 2**31 - 1))


def stoul(text: str) -> int:
    """An unsigned 32-bit integer; -1 wraps, which is how the random seed is spelled."""
    return int(number(text, "stoul", -1, 2**32 - 1)) % 2**32


def stof(text: str) -> float:
    """A decimal number."""
    return float(number(text, "stof", float("-inf"), float("inf"), r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"))


def within(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser for an integer in [low, high]."""

    def parse(text: str) -> int:
        value = stoi(text)
        if not low <= value <= high:
            raise ValueError(f"invalid value, must be between {low} and {high}")
        return value

    return parse


def member(enum: str, stem: str, names: Mapping[str, str], complaint: str) -> Callable[[str], Any]:
    """A parser from a word to the member `stem + names[word]` of one of the library's enums."""

    def parse(text: str) -> Any:
        if text not in names:
            raise ValueError(f"{complaint}: {text}")
        return getattr(getattr(lib, enum), stem + names[text])

    return parse


def boolean(text: str) -> bool:
    """One of llama-server's words for true and false."""
    if text not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(f"invalid boolean value: {text}")
    return text in TRUE_WORDS


def listed(text: str) -> list[str]:
    """A comma-separated list without its empty parts; ValueError if nothing is left."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError("requires at least one value")
    return parts


def thread_count(text: str) -> int:
    """A number of threads; zero or less means one for each CPU."""
    count = stoi(text)
    return count if count > 0 else os.cpu_count() or 1


def twice(text: str) -> tuple[int, int]:
    """One integer for two attributes."""
    return stoi(text), stoi(text)


def set_of(text: str) -> set[str]:
    """A comma-separated list as a set."""
    return set(listed(text))


def priority(text: str) -> Any:
    """A scheduling priority by its number."""
    return lib.ggml_sched_priority(within(-1, 3)(text))


def cpu_range(text: str) -> tuple[list[bool], bool]:
    """A mask of the CPUs `lo-hi`, and that it is valid."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    mask = [False] * len(lib.CommonParams().cpuparams.cpumask)
    if not found or int(found.group(2)) >= len(mask):
        raise ValueError("invalid range")
    low, high = int(found.group(1)), int(found.group(2))
    return [low <= cpu <= high for cpu in range(len(mask))], True


def slot_count(text: str) -> int:
    """A number of slots; negative means automatic."""
    if (count := stoi(text)) == 0:
        raise ValueError("error: invalid value for n_parallel")
    return count


def context_size(text: str) -> tuple[int, int]:
    """The context size and the least that fitting may leave of it; an explicit 0 must not be shrunk at all."""
    size = stoi(text)
    return size, lib.CommonParams().fit_params_min_ctx if size else -1


def upper(names: Sequence[str]) -> dict[str, str]:
    """Names as the library's enum members spell them."""
    return {name: re.sub(r"\W", "_", name.upper()) for name in names}


cache_type = member("ggml_type", "GGML_TYPE_", upper(CACHE_TYPES), "Unsupported cache type")
load_mode = member("llama_load_mode", "LLAMA_LOAD_MODE_", upper(LOAD_MODES) | {"dio": "DIRECT_IO"}, "invalid value")
flash_attention = member(
    "llama_flash_attn_type",
    "LLAMA_FLASH_ATTN_TYPE_",
    {"auto": "AUTO", "-1": "AUTO"} | dict.fromkeys(TRUE_WORDS, "ENABLED") | dict.fromkeys(FALSE_WORDS, "DISABLED"),
    "error: unknown value for --flash-attn",
)
speculative_type = member(
    "common_speculative_type", "COMMON_SPECULATIVE_TYPE_", upper(SPEC_TYPES), "unknown speculative type"
)


def speculative_types(text: str) -> list[Any]:
    """Kinds of speculative decoding, after the `none` that llama-server's own list begins with."""
    return [speculative_type("none"), *(speculative_type(part) for part in listed(text))]


class Option(NamedTuple):
    """One option of the table below."""

    spelling: str
    """`-t --threads N` takes a value, `--metrics` is a flag, `--slots / --no-slots` a switch with a way back."""
    path: str
    """The attribute of the library's parameters, dotted; several, blank-separated, take a tuple; `!` inverts."""
    text: str
    env: str = ""
    parse: Callable[[str], Any] = stoi
    default: str = ""
    """Shown in the help where the library's own value would not read like llama-server's."""

    @property
    def variable(self) -> str:
        """The environment variable's full name; empty if there is none."""
        return self.env if not self.env or self.env.startswith("LLAMA_") else f"LLAMA_ARG_{self.env}"

    @property
    def names(self) -> list[str]:
        """All names, those that turn a switch off last."""
        return [word for word in self.spelling.split() if word[0] == "-"]

    @property
    def off(self) -> list[str]:
        """The names that turn a switch off."""
        return self.spelling.partition(" / ")[2].split()

    @property
    def hint(self) -> str:
        """What the help calls the value; empty for a flag or a switch."""
        last = self.spelling.split()[-1]
        return "" if last[0] == "-" else last

    def from_environment(self, environ: Mapping[str, str]) -> str | None:
        """The environment's text for this option; `LLAMA_ARG_NO_X` turns a switch off, whatever it holds."""
        if self.off and self.env and f"LLAMA_ARG_NO_{self.env}" in environ:
            return FALSE_WORDS[0]
        return environ.get(self.variable) if self.env else None

    def put(self, params: Any, value: Any) -> None:
        """Sets the attribute (or attributes) to a parsed value."""
        paths = self.path.split()
        for path, part in zip(paths, value if len(paths) > 1 else [value], strict=True):
            owner, _, last = path.lstrip("!").rpartition(".")
            setattr(get(params, owner), last, not part if path[0] == "!" else part)

    def shown_default(self, params: Any) -> str:
        """The default as the help shows it."""
        value = get(params, self.path.split()[0].lstrip("!"))
        if not isinstance(value, bool) or self.default:
            return self.default or str(value)
        return "enabled" if value != self.path.startswith("!") else "disabled"

    def usage(self, params: Any) -> str:
        """The option's lines of the help, in llama-server's layout."""
        names = self.names
        head = names[0] if len(names) == 1 else f"{names[0]}, ".ljust(7) + ", ".join(names[1:])
        head = f"{head} {self.hint}".rstrip()
        text = f"{self.text} (default: {self.shown_default(params)})" if self.path else self.text
        text += f"\n(env: {self.variable})" if self.env else ""
        lines = [piece for line in text.split("\n") for piece in wrapped(line)]
        indent = "\n" + " " * HELP_COLUMN
        start = head + indent if len(head) > HELP_COLUMN - 3 else head.ljust(HELP_COLUMN)
        return start + indent.join(lines) + "\n"


def get(params: Any, path: str) -> Any:
    """A dotted attribute of the library's parameters; the parameters themselves for an empty path."""
    for name in path.split(".") if path else ():
        params = getattr(params, name)
    return params


def wrapped(line: str) -> list[str]:
    """A line broken at blanks into pieces of at most HELP_WIDTH characters, words permitting."""
    pieces = [""]
    for word in line.split():
        joined = f"{pieces[-1]} {word}".strip()
        pieces[-1:] = [joined] if len(joined) <= HELP_WIDTH else [pieces[-1], word]
    return [piece for piece in pieces if piece]


def rows(*table: tuple[Any, ...]) -> list[Option]:
    """Options from rows of their fields."""
    return [Option(*row) for row in table]


CACHE_TEXT = f"allowed values: {', '.join(CACHE_TYPES)}\n"
PRIORITIES = "priority of process and threads: low(-1), normal(0), medium(1), high(2), realtime(3)"
# fmt: off
HELP, VERSION = rows(("-h --help --usage", "", "show this text"), ("--version", "", "show version and build"))
COMMON = rows(
    ("-t --threads N", "cpuparams.n_threads", "CPU threads used to generate", "THREADS", thread_count),
    ("-tb --threads-batch N", "cpuparams_batch.n_threads", "CPU threads used for prompts and batches", "", thread_count,
     "same as --threads"),
    ("-Cr --cpu-range lo-hi", "cpuparams.cpumask cpuparams.mask_valid", "CPUs to run on", "", cpu_range, "all"),
    ("--cpu-strict <0|1>", "cpuparams.strict_cpu", "one CPU for each thread", "", stoul, "0"),
    ("--prio N", "cpuparams.priority", PRIORITIES, "", priority, "0"),
    ("--poll <0...100>", "cpuparams.poll", "how hard threads poll for work, 0 = not at all", "", stoul),
    ("--prio-batch N", "cpuparams_batch.priority", "the same for batches, if -tb is given", "", priority, "0"),
    ("--poll-batch <0|1>", "cpuparams_batch.poll", "the same for batches, if -tb is given", "", stoi, "same as --poll"),
    ("-c --ctx-size N", "n_ctx fit_params_min_ctx", "tokens of context, 0 = the model's", "CTX_SIZE", context_size),
    ("-n --predict --n-predict N", "n_predict", "tokens to predict, -1 = infinity", "N_PREDICT"),
    ("-b --batch-size N", "n_batch", "most tokens in a logical batch", "BATCH"),
    ("-ub --ubatch-size N", "n_ubatch", "most tokens in a physical batch", "UBATCH"),
    ("--keep N", "n_keep", "tokens of the first prompt that are kept, -1 = all"),
    ("--swa-full", "swa_full", "full-size cache for sliding windows", "SWA_FULL", stoi, "false"),
    ("-fa --flash-attn [on|off|auto]", "flash_attn_type", "Flash Attention", "FLASH_ATTN", flash_attention, "'auto'"),
    ("--rope-freq-base N", "rope_freq_base", "base frequency of RoPE", "ROPE_FREQ_BASE", stof, "loaded from model"),
    ("--rope-freq-scale N", "rope_freq_scale", "scale of RoPE's frequencies, expands the context by 1/N",
     "ROPE_FREQ_SCALE", stof, "loaded from model"),
    ("--repack / -nr --no-repack", "!no_extra_bufts", "repack weights for this CPU", "REPACK"),
    ("-ctk --cache-type-k TYPE", "cache_type_k", f"KV cache data type for K\n{CACHE_TEXT}",
     "CACHE_TYPE_K", cache_type, "f16"),
    ("-ctv --cache-type-v TYPE", "cache_type_v", f"KV cache data type for V\n{CACHE_TEXT}",
     "CACHE_TYPE_V", cache_type, "f16"),
    ("-lm --load-mode MODE", "load_mode", f"how the model is loaded, one of {', '.join(LOAD_MODES)}", "LOAD_MODE",
     load_mode, "auto"),
    ("-fit --fit [on|off]", "fit_params", "shrink what was not set until it fits in memory", "FIT", boolean, "'on'"),
    ("-m --model FNAME", "model.path", "GGUF file of the model", "MODEL", str, "none"),
    ("-lv --verbosity --log-verbosity N", "verbosity", "1: errors, 2: warnings, 3: information, 4: more, 5: debugging",
     "LOG_VERBOSITY"),
)
SAMPLING = rows(("-s --seed SEED", "sampling.seed", "seed of the sampling, random for -1", "", stoul, "-1"))
SPECULATIVE = rows(
    (f"--spec-type {','.join(SPEC_TYPES)}", "speculative.types", "comma-separated kinds of speculative decoding",
     "SPEC_TYPE", speculative_types, "none"),
    ("--spec-ngram-mod-n-min N", "speculative.ngram_mod.n_min", "fewest tokens drafted", "", within(0, 1024)),
    ("--spec-ngram-mod-n-max N", "speculative.ngram_mod.n_max", "most tokens drafted", "", within(0, 1024)),
    ("--spec-ngram-mod-n-match N", "speculative.ngram_mod.n_match", "tokens looked up", "", within(1, 1024)),
    *((f"--spec-{name}-{field.replace('_', '-')} N", f"speculative.{name.replace('-', '_')}.{field}", text, "", parser)
      for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
      for field, text, parser in (("size_n", "tokens looked up", within(1, 1024)),
                                  ("size_m", "tokens drafted", within(1, 1024)),
                                  ("min_hits", "hits it takes", within(1)))),
)
SPECIFIC = rows(
    ("--kv-unified-per-slot N", "kv_unified_per_slot", "tokens of each slot", "KV_UNIFIED_PER_SLOT", stoi, "unset"),
    ("-ctxcp --ctx-checkpoints --swa-checkpoints N", "n_ctx_checkpoints", "most checkpoints of a slot",
     "CTX_CHECKPOINTS"),
    ("-cms --checkpoint-min-step N", "checkpoint_min_step", "fewest tokens between checkpoints",
     "CHECKPOINT_MIN_SPACING_NT"),
    ("-cram --cache-ram N", "cache_ram_mib", "MiB for the prompt cache, -1 = no limit, 0 = no cache", "CACHE_RAM"),
    ("-kvu --kv-unified / -no-kvu --no-kv-unified", "kv_unified",
     "one KV buffer shared by all slots, always so if their number is auto", "KV_UNIFIED"),
    ("--cache-idle-slots / --no-cache-idle-slots", "cache_idle_slots", "move idle slots to the prompt cache",
     "CACHE_IDLE_SLOTS"),
    ("--context-shift / --no-context-shift", "ctx_shift", "drop old tokens when the context is full", "CONTEXT_SHIFT"),
    ("--warmup / --no-warmup", "warmup", "run the model once before serving"),
    ("-np --parallel N", "n_parallel", "server slots, -1 = auto", "N_PARALLEL", slot_count),
    ("-cb --cont-batching / -nocb --no-cont-batching", "cont_batching", "continuous batching", "CONT_BATCHING"),
    ("-a --alias STRING", "model_alias", "names of the model for the API, comma-separated", "ALIAS", set_of, "none"),
    ("--host HOST", "hostnames", "addresses to listen on, comma-separated", "HOST", listed, "127.0.0.1"),
    ("--port PORT", "port", "port to listen on, 0 = any free one", "PORT"),
    ("--reuse-port", "reuse_port", "let several sockets bind the port", "REUSE_PORT"),
    ("--api-key KEY", "api_keys", "keys that requests may carry, comma-separated", "LLAMA_API_KEY", listed, "none"),
    ("-to --timeout N", "timeout_read timeout_write", "read and write timeout in seconds", "TIMEOUT", twice),
    ("--sse-ping-interval N", "sse_ping_interval", "seconds between pings of a stream, -1 = none", "SSE_PING_INTERVAL"),
    ("--threads-http N", "n_threads_http", "threads that serve HTTP requests", "THREADS_HTTP"),
    ("--cache-prompt / --no-cache-prompt", "cache_prompt", "prompt caching", "CACHE_PROMPT"),
    ("--cache-reuse N", "n_cache_reuse", "smallest chunk reused by shifting the KV cache", "CACHE_REUSE"),
    ("--metrics", "endpoint_metrics", "Prometheus endpoint", "ENDPOINT_METRICS"),
    ("--props", "endpoint_props", "changes by POST /props", "ENDPOINT_PROPS"),
    ("--slots / --no-slots", "endpoint_slots", "endpoint that shows the slots", "ENDPOINT_SLOTS"),
    ("-sps --slot-prompt-similarity SIMILARITY", "slot_prompt_similarity",
     "how like a slot's prompt a new one must be to get that slot", "", stof, "0.10"),
)
# fmt: on
SECTIONS = {
    "common": [HELP, VERSION, *COMMON],
    "sampling": SAMPLING,
    "speculative": SPECULATIVE,
    "example-specific": SPECIFIC,
}
OPTIONS = [option for options in SECTIONS.values() for option in options]


def defaults() -> Any:
    """The library's parameters with llama-server's own defaults where the library has others."""
    params = lib.CommonParams()
    params.n_parallel, params.port = -1, 8080
    return params


def read_environment(params: Any, environ: Mapping[str, str]) -> None:
    """Applies the options' environment variables; UsageError names the one that is wrong."""
    for option in OPTIONS:
        text = option.from_environment(environ)
        if text is None:
            continue
        try:
            if option.hint:
                option.put(params, option.parse(text))
            elif option.off or text in TRUE_WORDS:
                option.put(params, boolean(text))
        except ValueError as error:
            raise UsageError(f'error while handling environment variable "{option.variable}": {error}\n\n') from error


def read_arguments(params: Any, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Applies the command line; True if help was asked for, UsageError names the argument that is wrong."""
    by_name = {name: option for option in OPTIONS for name in option.names}
    words, wants_help = iter(argv), False
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        option = by_name.get(name)
        if option is None:
            raise UsageError(f"error: invalid argument: {name}")
        if option.from_environment(environ) is not None:
            variable = f"warn: {option.variable} environment variable is set"
            say(f"{variable}, but will be overwritten by command line argument {name}")
        if option is VERSION:
            print_version()
            sys.exit(0)
        if option is HELP:
            wants_help = True
        else:
            read_argument(option, name, words, params)
    return wants_help


def read_argument(option: Option, name: str, words: Iterator[str], params: Any) -> None:
    """Applies one option, taking its value from `words`."""
    try:
        if not option.hint:
            option.put(params, name not in option.off)
            return
        text = next(words, None)
        if text is None:
            raise ValueError("expected value for argument")
        option.put(params, option.parse(text))
    except ValueError as error:
        usage = f"usage:\n{option.usage(defaults())}\n\nto show complete usage, run with -h"
        raise UsageError(f'error while handling argument "{name}": {error}\n\n{usage}') from error


def say(text: str) -> None:
    """Writes a line to standard error, where llama-server's own messages go."""
    print(text, file=sys.stderr, flush=True)


def print_version() -> None:
    """Says which library this is, in llama-server's two lines."""
    build = lib.BUILD_INFO
    say(f"version: {lib.__version__} (build {build['build_number']}, commit {build['commit']})")
    say(f"built with {build['compiler']} for {build['build_target']}")


def print_help() -> None:
    """Prints all options by section to standard output."""
    params = defaults()
    sections = (
        f"----- {name} params -----\n\n" + "".join(option.usage(params) for option in options)
        for name, options in SECTIONS.items()
    )
    print("\n\n".join(sections), end="")


def serve(params: Any) -> int:
    """Loads the model and serves until SIGTERM or SIGINT; the exit code, 1 if the server did not come up."""
    signals = (signal.SIGINT, signal.SIGTERM)
    # While the model loads a signal must end the process at once, and so must a second one while it stops.
    for number_ in signals:
        signal.signal(number_, signal.SIG_DFL)
    try:
        server = lib.Server(params)
    except (RuntimeError, ValueError) as error:
        say(f"error: {error}")
        return 1
    stop = threading.Event()
    for number_ in signals:
        signal.signal(number_, lambda *_: stop.set())
    # In short waits: a signal that another thread received is only noticed when this one runs again.
    while not stop.wait(0.5):
        pass
    for number_ in signals:
        signal.signal(number_, signal.SIG_DFL)
    del server
    return 0


def main() -> int:
    """Runs the program on sys.argv and os.environ; the exit code."""
    params = defaults()
    try:
        read_environment(params, os.environ)
        if read_arguments(params, sys.argv[1:], os.environ):
            print_help()
            return 0
    except UsageError as error:
        say(str(error))
        return 1
    if not params.model.path:
        say("error: no model given: name its GGUF file with -m FNAME or LLAMA_ARG_MODEL")
        return 1
    return serve(params)


if __name__ == "__main__":
    sys.exit(main())
