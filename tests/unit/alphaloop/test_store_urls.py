"""URLs of databases, read without a database."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.store.database import Database, parse_url


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_means_psycopg_3(scheme: str) -> None:
    parsed = parse_url(SecretStr(f"{scheme}://u:p%40ss@host:5433/name?sslmode=require"))
    assert parsed.render_as_string(hide_password=False) == (
        "postgresql+psycopg://u:p%40ss@host:5433/name?sslmode=require"
    )
    assert parsed.password == "p@ss"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hello hunter2",
        "mysql://u:hunter2@h/n",
        "postgresql+psycopg2://u:hunter2@h/n",
        "postgresql://u:hunter2@h:x/n",
    ],
)
def test_anything_else_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match="expected") as refusal:
        Database(SecretStr(url))
    assert "hunter2" not in str(refusal.value)
    assert "postgresql://user:password@host:5432/name" in str(refusal.value)
