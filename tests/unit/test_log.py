"""Where safedist's own lines go: to standard error in one format, until the user says something else."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from flytekitplugins_safedist import log

ROOM = f"{log.NAME}.room"


class Kept(logging.Handler):
    """A user's handler, which keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def root() -> logging.Logger:
    """The root logger, as the fixture below has it."""
    found = logging.getLogger(log.NAME).parent
    assert found is not None
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    """What standard error gets, in a process whose user has not touched logging (pytest itself has)."""
    logger = logging.getLogger(log.NAME)
    monkeypatch.setattr(logger, "parent", logging.RootLogger(logging.WARNING))  # pytest has handlers on the real one
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    logger.setLevel(logging.NOTSET)
    log.install()
    yield capsys
    logger.setLevel(level)


def test_every_line_has_one_prefix_and_what_is_wrong_says_so(shown: pytest.CaptureFixture[str]) -> None:
    room = logging.getLogger(ROOM)
    room.debug("for nobody")
    room.info("round 1: 100 % are there")
    room.warning("the disk is nearly full")
    room.error("no rank was started")
    assert shown.readouterr().err == (
        "[safedist] round 1: 100 % are there\n"
        "[safedist] warning: the disk is nearly full\n"
        "[safedist] error: no rank was started\n"
    )


def test_installed_twice_it_shows_each_line_once(shown: pytest.CaptureFixture[str]) -> None:
    log.install()
    logging.getLogger(ROOM).info("once")
    assert shown.readouterr().err == "[safedist] once\n"


@pytest.mark.parametrize("name", [None, log.NAME, ROOM])
def test_a_handler_of_the_users_takes_the_lines(
    shown: pytest.CaptureFixture[str], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, logger = Kept(), root() if name is None else logging.getLogger(name)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, users])
    logging.getLogger(ROOM).info("routed")
    assert users.texts == ["routed"]
    assert shown.readouterr().err == ""


def test_a_handler_above_a_logger_that_passes_nothing_up_takes_nothing(
    shown: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Kept()
    monkeypatch.setattr(root(), "handlers", [users])
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", False)
    logging.getLogger(ROOM).info("kept")
    assert (users.texts, shown.readouterr().err) == ([], "[safedist] kept\n")


def test_a_null_handler_silences(shown: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(log.NAME)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, logging.NullHandler()])
    logging.getLogger(ROOM).error("nobody hears that")
    assert shown.readouterr().err == ""


def test_a_level_of_the_users_stays(shown: pytest.CaptureFixture[str]) -> None:
    logging.getLogger(log.NAME).setLevel(logging.WARNING)
    log.install()
    logging.getLogger(ROOM).info("less")
    logging.getLogger(ROOM).warning("more")
    assert shown.readouterr().err == "[safedist] warning: more\n"


class WriteOnly:
    """A stream of the user's with no more than ``write()``."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class Broken:
    def write(self, _text: str) -> None:
        raise BrokenPipeError


@pytest.mark.usefixtures("shown")
def test_a_stream_of_the_users_needs_only_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = WriteOnly()
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger(ROOM).info("there")
    assert stream.text == "[safedist] there\n"


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("stream", [Broken(), closed(), None], ids=["broken", "closed", "none"])
def test_a_line_that_cannot_be_written_costs_nothing_else(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger(ROOM).info("nowhere")


@pytest.mark.processes
def test_importing_the_package_adds_no_handler(warm_to_train, tmp_path) -> None:
    (tmp_path / "imports.py").write_text(
        "import logging, pkgutil, importlib, flytekitplugins_safedist as package\n"
        "for module in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):\n"
        "    importlib.import_module(module.name)\n"
        "names = [name for name in logging.root.manager.loggerDict if name.startswith(package.__name__)]\n"
        "print(len(names) > 3, [name for name in names if logging.getLogger(name).handlers])\n"
    )
    ended = warm_to_train.run(f"{tmp_path}/imports.py:__main__", tmp_path / "job", kind="main")
    assert ended.out.splitlines()[-1:] == ["True []"], ended.err
