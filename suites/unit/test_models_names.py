"""Names of models resolve to a source, or the refusal says why not and what there is."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from harness.cli import main
from harness.errors import UsageError
from harness.models import bundled, resolve
from harness.models.cache import CACHE_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_bundled_names_are_unique_and_resolve_without_building(own_cache: Path) -> None:
    names = [source.name for source in bundled()]
    assert names[:2] == ["smollm2-135m", "tiny-llama"]
    assert len(set(names)) == len(names)
    families = {resolve(name).description.split()[2].rstrip(":") for name in names[1:]}
    assert len(families) == 21, "every family with an overlay has a checkpoint"
    for name in names:
        assert resolve(name).kind == "bundled"
        assert resolve(name).description
    assert not own_cache.exists()


def test_a_local_folder_resolves_to_itself(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tiny_folder).fetch() == tiny_folder
    assert resolve(tiny_folder).kind == "local"
    monkeypatch.chdir(tiny_folder.parent)
    assert resolve("checkpoint").fetch() == tiny_folder
    assert resolve("./checkpoint").fetch() == tiny_folder


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"unknown model 'smolm2-135M': did you mean 'smollm2-135m'\?"
    ) as caught:
        resolve("smolm2-135M")
    assert "owner/name" in str(caught.value)


@pytest.mark.parametrize("name", ["zzzz", "", "a/b/c", "-/-"])
def test_a_name_like_nothing_lists_what_there_is(name: str) -> None:
    with pytest.raises(UsageError, match="smollm2-135m, tiny-llama") as caught:
        resolve(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere-at-all", "/nowhere/at/all", Path("owner/name")])
def test_a_missing_folder_is_called_one(path: str | Path) -> None:
    with pytest.raises(UsageError, match=r"model folder '.*' does not exist"):
        resolve(path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub switched off; the client reads both settings once, at import."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_id_offline_says_so() -> None:
    with pytest.raises(
        UsageError, match=r"'owner/tiny-lama' is neither a folder nor in the local hub cache.*HF_HUB_OFFLINE"
    ) as caught:
        resolve("owner/tiny-lama")
    assert "'tiny-llama'" in str(caught.value)


def test_a_cached_hub_id_needs_no_network(hub_cache: Path) -> None:
    commit = "0" * 40
    repo = hub_cache / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    source = resolve("owner/name")
    assert (source.kind, source.has_tokenizer) == ("hub", False)
    assert source.fetch() == snapshot
    (snapshot / "tokenizer.json").write_text("{}")
    assert resolve("owner/name").has_tokenizer


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as one file needs; notes what is asked for."""

    asked: ClassVar[list[str]] = []
    config = json.dumps({"model_type": "llama"}).encode()

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        found = self.path == "/owner/name/resolve/main/config.json"
        self.send_response(200 if found else 404)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1234"')
        self.send_header("Content-Length", str(len(self.config)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.config)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@pytest.fixture
def hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine, switched on; nothing of it is cached."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setenv(CACHE_ENV, str(hub_cache / "ours"))
    Hub.asked.clear()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_plan_needs_no_weights(hub: type[Hub]) -> None:
    source = resolve("owner/name")
    folder = source.fetch_config()
    assert (folder / "config.json").read_bytes() == hub.config
    assert {path for path in hub.asked if "owner" in path} == {"/owner/name/resolve/main/config.json"}
    assert resolve("owner/name").has_tokenizer is None, "a config alone must not be taken for a cached model"


def test_a_plan_is_made_of_a_config_that_came_alone(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "config", (resolve("tiny-llama").fetch() / "config.json").read_bytes())
    assert main(["plan", "owner/name", "--step", "64"]) == 0
    alone = capsys.readouterr().out
    assert main(["plan", "tiny-llama", "--step", "64"]) == 0
    assert alone.splitlines()[1:] == capsys.readouterr().out.splitlines()[1:]


def test_a_config_that_cannot_be_had_says_so(hub: type[Hub]) -> None:
    with pytest.raises(UsageError, match=r"'owner/other' could not be fetched from the hub"):
        resolve("owner/other").fetch_config()


def test_a_bundled_model_s_config_lies_with_it() -> None:
    source = resolve("tiny-llama")
    assert source.fetch_config() == source.fetch()
