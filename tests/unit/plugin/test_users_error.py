"""The error of a failed job in a class that is the user's, too."""

from __future__ import annotations

import errno
import pickle
import sys

import pytest

from flytekitplugins_safedist.errors import RankFailedError, SafedistError
from flytekitplugins_safedist.plugin.task import RecoverableRankFailedError
from flytekitplugins_safedist.plugin.users_error import as_users
from flytekitplugins_safedist.rank.outcome import Raised

HERE = __name__


class Demanding(ValueError):
    """Its constructor is not to be called."""

    def __init__(self, *, rows: int) -> None:
        super().__init__(f"{rows} rows")
        self.rows = rows

    class Inner(KeyError):
        """One more."""


class Odd(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("nobody derives from it")


def of(name: str, error: SafedistError | None = None, **facts: object) -> SafedistError:
    error = error or RankFailedError("rank 0 raised", where={"a": 1}, hint="mend it")
    return as_users(error, Raised(name, "x", "", **facts))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ValueError", ValueError),
        ("UnicodeDecodeError", UnicodeDecodeError),
        ("KeyError", LookupError),
        (f"{HERE}.Demanding", Demanding),
        (f"{HERE}.Demanding.Inner", Demanding.Inner),
        ("json.decoder.JSONDecodeError", ValueError),
        ("subprocess.TimeoutExpired", Exception),
    ],
)
def test_it_is_both_and_keeps_its_facts_also_through_pickling(name: str, kind: type[Exception]) -> None:
    for ours in (RankFailedError, RecoverableRankFailedError):
        error = ours("rank 0 raised", where={"a": 1}, hint="mend it")
        error.code = "USER:X"
        both = of(name, error)
        for each in (both, pickle.loads(pickle.dumps(both))):
            assert isinstance(each, kind)
            assert isinstance(each, ours)
            assert (str(each), each.args, each.error_code) == (str(error), (str(error),), "USER:X")
        assert type(of(name, error)) is type(both), "made once"


def test_the_class_of_a_script_is_found_in_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "OfAScript", Demanding, raising=False)
    assert isinstance(of("OfAScript"), Demanding)
    assert isinstance(of("__mp_main__.OfAScript"), Demanding)


def test_an_oserror_has_its_number() -> None:
    both = of("FileNotFoundError", errnos=(errno.ENOENT,))
    assert isinstance(both, FileNotFoundError)
    assert both.errno == errno.ENOENT


def test_where_there_is_no_such_class_it_stays_ours() -> None:
    error = RankFailedError("x")
    here = [f"{HERE}.{name}" for name in ("Missing", "f.<locals>.Error", "HERE", "Odd")]
    names = ["no.such.module.Error", *here, "SystemExit", "int"]
    assert [name for name in names if of(name, error) is not error] == []


def test_what_is_of_that_class_already_stays() -> None:
    error = RecoverableRankFailedError("x")
    assert of("flytekit.exceptions.base.FlyteRecoverableException", error) is error
