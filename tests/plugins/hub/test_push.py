"""`asyncrl export --push` against a hub on loopback: files arrive bit for bit, a broken connection is said, the same
command completes, and the token is nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plugins.hub.hub_stand_in import TOKEN, Hub, serving
from tests.rigs.tiny import ROOT

CHILD = """
import sys, time
time.sleep = lambda seconds: None  # the client waits between its own attempts
from asyncrl.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
Export = Callable[..., tuple[int, str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as one:
        yield one


@pytest.fixture
def export(hub: Hub, tmp_path: Path) -> Export:
    """Call `asyncrl export` in a process that knows this hub. Returns exit code and what it printed."""

    def call(*words: str | Path, token: str = TOKEN, **variables: str) -> tuple[int, str]:
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": token,
            "PYTHONPATH": str(ROOT),
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, "export", *map(str, words)],
            env=kept | settings | variables, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


@pytest.mark.slow
def test_a_broken_connection_is_said_and_the_same_command_completes(
    hub: Hub, export: Export, finished_run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    before = {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}
    hub.broken = "PUT /lfs"
    code, said = export(finished_run, target, "--push", "acme/digits", "--private")
    assert code == 2, said
    assert f"{target} -> acme/digits at {hub.address}: the files could not be sent whole." in said
    assert "Nothing is committed, the repository is as it was" in said
    assert "give the command again: files whose contents the hub has are not sent twice" in said
    assert hub.repositories == {"acme/digits": {}}
    assert hub.private == {"acme/digits": True}

    hub.broken = "POST /api/models/acme/digits/commit"
    code, said = export(finished_run, target, "--push", "acme/digits")
    assert code == 2, said
    assert "the files arrived, and their commit is not confirmed" in said
    assert hub.repositories == {"acme/digits": {}}
    sent = len(hub.objects)
    assert sent >= 2, "weights and tokenizer"

    hub.broken = ""
    del hub.requests[:]
    code, said = export(finished_run, target, "--push", "acme/digits")
    assert code == 0, said
    assert f"{target} is there, of this checkpoint: it is sent as it is" in said
    assert f"pushed: {hub.address}/acme/digits/commit/" in said
    assert not [asked for asked in hub.requests if asked.startswith("PUT")], "what had arrived is not sent twice"
    arrived = dict(hub.repositories["acme/digits"])
    card = arrived.pop("README.md").decode()
    assert arrived == contents(target)
    assert "model.safetensors" in arrived
    assert 'AutoModelForImageTextToText.from_pretrained("acme/digits"' in card
    assert "after step 5: a whole model" in card
    assert hub.commits == ["asyncrl run run, step 5"]

    code, said = export(finished_run, target, "--push", "acme/digits")
    assert code == 0, said
    assert len(hub.commits) == 1, "nothing has changed"
    written = [file.read_bytes() for file in target.rglob("*") if file.is_file()]
    assert not [data for data in [*written, *arrived.values(), card.encode()] if TOKEN.encode() in data]
    assert {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_the_end_product_of_a_finished_run_is_sent_with_a_card_of_ones_own(
    hub: Hub, export: Export, finished_run: Path, tmp_path: Path
) -> None:
    card = tmp_path / "card.md"
    assert export(finished_run, "--card", card)[0] == 0
    made = card.read_text()
    assert made.startswith("---\nlibrary_name: transformers\npipeline_tag: image-text-to-text\n")
    code, said = export(finished_run, "--card", card)
    assert (code, "exists already. Name a new file" in said) == (2, True)
    card.write_text(made.replace("# run", "# Digits of mine"))
    hub.repositories["acme/digits"] = {".gitattributes": b"", "old.safetensors": b"old"}
    code, said = export(finished_run, "--push", "acme/digits", "--card", card)
    assert code == 0, said
    assert "note: acme/digits has other files, which stay: old.safetensors" in said
    arrived = dict(hub.repositories["acme/digits"])
    assert arrived.pop("README.md").decode() == card.read_text()
    assert arrived.pop("old.safetensors") == b"old"
    assert arrived.pop(".gitattributes") == b""
    assert arrived == contents(finished_run / "export")


@pytest.mark.slow
def test_what_cannot_be_sent_is_refused_with_the_fix(
    hub: Hub, export: Export, finished_run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    fix = "Check network and token (hf auth login, or HF_TOKEN with the right to write)"
    for words, variables, says in (
        (("--push", "digits"), {}, "--push is 'digits': expected the name of a repository on the hub, such as my-org/"),
        (("--private", tmp_path / "new"), {}, "--private is about a repository that --push makes"),
        (("--push", "acme/a", "--card", "none.md"), {}, "there is no such file. With --push it names a card"),
        (("--push", "acme/a", "--checkpoint", "4"), {}, "Name a new folder for it: asyncrl export RUN TARGET --push"),
        ((other, "--push", "acme/a"), {}, "no `asyncrl export --push` of this checkpoint made it. Name a new folder"),
        ((), {}, "the following arguments are required: target"),
        (
            ("--push", "acme/a"),
            {"token": "hf_of_a_stranger"},
            "Nothing was sent (HfHubHTTPError: Client error '401 Unauth",
        ),
        (("--push", "acme/a"), {"token": "hf_of_a_stranger"}, fix),
        (("--push", "acme/a"), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the repository could not be made. Nothing was"),
        (("--push", "acme/a"), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids it: set it to 0"),
    ):
        code, said = export(finished_run, *words, **variables)
        assert code == 2, said
        assert says in said
        assert "hf_of" not in said
    assert hub.repositories == {}


def test_pickles_and_hidden_files_are_not_sent(tmp_path: Path) -> None:
    from asyncrl.errors import UserError
    from asyncrl_plugins.hub.upload import files_to_send

    for name in ("model.safetensors", "README.md", ".asyncrl_export_of.json", "sub/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(name))
    assert sorted(files_to_send(tmp_path)) == ["model.safetensors", "sub/a.json"]
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(UserError, match=r"has training_args\.bin, which readers would unpickle"):
        files_to_send(tmp_path)
