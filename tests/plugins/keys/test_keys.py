"""`asyncrl keys`: files, their modes, and where each belongs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asyncrl.cli import main
from protocol.curve import read_learner_keys, read_server_keys


def test_keys_are_made_private_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "keys"
    before_umask = os.umask(0)
    try:
        assert main(["keys", str(folder)]) == 0
    finally:
        os.umask(before_umask)
    printed = capsys.readouterr().out
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["learner.public", "learner.secret", "server.secret", "servers/server.public"]
    for name in files:
        assert str(folder / name) in printed
        assert (folder / name).read_text().strip() not in printed, "only names of files, never a key"
        mode = stat.S_IMODE((folder / name).stat().st_mode)
        assert mode == (0o600 if name.endswith(".secret") else 0o644)
    assert "network.keys_dir" in printed
    before = {name: (folder / name).read_bytes() for name in files}
    assert main(["keys", str(folder)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert before == {name: (folder / name).read_bytes() for name in files}

    assert main(["keys", str(folder), "--server", "gpu7"]) == 0
    assert "gpu7.secret as server.secret" in capsys.readouterr().out
    assert set(read_learner_keys(folder).authorised().values()) == {"server", "gpu7"}
    assert read_server_keys(folder).public in read_learner_keys(folder).authorised(), "as the core reads them"
    assert main(["keys", str(folder), "--server", "../x"]) == 2
    assert main(["keys", str(tmp_path / "none"), "--server", "gpu8"]) == 2
