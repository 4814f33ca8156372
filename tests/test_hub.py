"""Hub ids, with a stub in place of huggingface_hub and the network."""

import sys
from types import ModuleType

import pytest

from mla_jax.errors import EngineError
from mla_jax.hub import folder_of

ID = "deepseek-ai/DeepSeek-V2-Lite"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """What was asked of ``snapshot_download``; ``hub.error`` is raised if it is set."""
    stub = ModuleType("huggingface_hub")
    stub.asked, stub.error = [], None

    def snapshot_download(repo_id, *, allow_patterns, ignore_patterns):
        stub.asked.append((repo_id, allow_patterns))
        if stub.error is not None:
            raise stub.error
        return str(tmp_path)

    stub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)
    monkeypatch.chdir(tmp_path)
    return stub


def test_an_id_is_downloaded(hub, tmp_path):
    assert folder_of(ID) == tmp_path
    assert folder_of(ID, weights=False) == tmp_path
    assert hub.asked == [(ID, ["*.json", "*.jinja", "*.safetensors"]), (ID, ["*.json", "*.jinja"])]


@pytest.mark.parametrize("name", ["/nowhere/at-all", "no-owner", "a/b/c", "../up", "./a/b", "~/x"])
def test_what_is_no_id_is_a_path(hub, name):
    assert str(folder_of(name)) == name.removeprefix("./")
    assert hub.asked == []


def test_a_folder_that_is_there_is_taken(hub, tmp_path):
    (tmp_path / ID).mkdir(parents=True)
    assert str(folder_of(ID)) == ID
    assert hub.asked == []


def test_a_failed_download_says_what_to_do(hub):
    hub.error = OSError("no route\nto host")
    with pytest.raises(EngineError, match=r"download failed \(OSError: no route\).*hf download"):
        folder_of(ID)
    hub.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        folder_of(ID)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = rf"model {ID}: given no folder {ID} here.*pip install huggingface_hub"
    with pytest.raises(EngineError, match=message):
        folder_of(ID)


@pytest.mark.parametrize("name", ["", "a\0b", "/tmp/\ud800"])
def test_what_no_folder_can_be_called_is_refused(name):
    with pytest.raises(EngineError, match="allowed: a folder, or a hub id"):
        folder_of(name)
