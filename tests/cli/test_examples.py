"""The examples refuse what cannot work before any work is done, in a message and not in a traceback."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("digits_table.py", "--seeds", "1"), "--seeds must be 2 or more, got 1: one seed has no spread"),
        (("two_moons.py", "--seeds", "1"), "--seeds must be 2 or more, got 1: one seed has no spread"),
        (("certified_and_attacked.py", "nowhere", "--sigma", "0.25"), "there is no run folder or checkpoint nowhere"),
        (("certified_and_attacked.py", "nowhere", "--sigma", "0"), "sigma must be a number > 0, got 0.0"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", list(words))
    monkeypatch.setattr("torch.set_num_threads", lambda threads: pytest.fail("it began"))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / words[0]), run_name="__main__")
    assert told in f"{caught.value.code} {capsys.readouterr().err}"
    assert list(tmp_path.iterdir()) == []
