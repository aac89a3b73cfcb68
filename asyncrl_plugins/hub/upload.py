"""An exported folder becomes one commit of a repository on the hub: all of it, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.user_functions import shorten

CARD = "README.md"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
"""Endings of files that a reader would unpickle: they stay here."""


def files_to_send(folder: Path) -> dict[str, Path]:
    """Files of the export by their names in the repository, without hidden ones and a card. Raises UserError where one
    would be unpickled."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    pickles = [name for name in found if name.endswith(PICKLES)]
    if pickles:
        raise UserError(
            f"{folder} has {', '.join(pickles)}, which readers would unpickle. Take it out: exports have none"
        )
    hidden = {name for name in found if any(part.startswith(".") for part in name.split("/"))}
    return {name: path for name, path in found.items() if name not in hidden and name != CARD}


def send(folder: Path, card: str, repository: str, message: str, *, private: bool) -> str:
    """Make the repository where there is none, send the files, and commit them with the card. Returns the commit's
    address. Raises UserError that says how far it came."""
    from huggingface_hub import CommitOperationAdd, HfApi

    files, hub = files_to_send(folder), HfApi()
    what = f"{folder} -> {repository} at {hub.endpoint}"
    with _said(f"{what}: the repository could not be made. Nothing was sent"):
        hub.create_repo(repository, private=True if private else None, exist_ok=True)
        found = hub.model_info(repository)
    if private and found.private is False:
        raise UserError(f"--private: {repository} exists and is public, and nothing was sent. Name another one")
    there = {file.rfilename for file in found.siblings or ()}
    others = sorted(there - {*files, CARD, ".gitattributes"})
    if others:
        print(f"note: {repository} has other files, which stay: {', '.join(others[:10])}{', ...' * (len(others) > 10)}")
    nbytes = sum(path.stat().st_size for path in files.values())
    print(f"{what}: {len(files)} files of {nbytes / 1e6:,.1f} MB, and the card")
    additions = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    additions.append(CommitOperationAdd(CARD, card.encode()))
    with _said(f"{what}: the files could not be sent whole. Nothing is committed, the repository is as it was"):
        hub.preupload_lfs_files(repository, additions, free_memory=False)
    with _said(f"{what}: the files arrived, and their commit is not confirmed"):
        return hub.create_commit(repository, additions, commit_message=message).commit_url


@contextmanager
def _said(how_far: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into a UserError, without the token."""
    from huggingface_hub import constants, get_token

    try:
        yield
    except Exception as error:  # of the client, or of the HTTP library below it: not all have a base of their own
        # The client names the file in an error of its own, and the cause is that of the library.
        causes = [error, *([error.__cause__] if type(error) is RuntimeError and error.__cause__ else [])]
        reason = "; ".join(f"{type(cause).__name__}: {' '.join(str(cause).split())}" for cause in causes)
        for secret in filter(None, (get_token(), os.environ.get("HF_TOKEN"))):
            reason = reason.replace(secret, "(the token)")
        fix = "Check network and token (hf auth login, or HF_TOKEN with the right to write), and give the command again"
        if constants.HF_HUB_OFFLINE:
            fix = "HF_HUB_OFFLINE forbids it: set it to 0, and give the command again"
        raise UserError(
            f"{how_far} ({shorten(reason)}). {fix}: files whose contents the hub has are not sent twice"
        ) from None
