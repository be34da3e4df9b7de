# SPDX-License-Identifier: Apache-2.0
"""The public names: each exported once, documented, and known by its public path."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from typing import TYPE_CHECKING

import pytest

import aiocolocated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMES = list(aiocolocated.__all__)
ERRORS = [
    value
    for name in NAMES
    if isinstance(value := getattr(aiocolocated, name), type) and issubclass(value, BaseException)
]

# Constructor arguments for error classes that need more than strings.
SAMPLES: dict[str, tuple[object, ...]] = {}


def sample(error: type[BaseException]) -> BaseException:
    """An instance, made from SAMPLES or from one string per argument."""
    if error.__name__ in SAMPLES:
        return error(*SAMPLES[error.__name__])
    try:
        parameters = inspect.signature(error).parameters.values()
    except ValueError:  # a class that inherits the constructor of a built-in one
        return error("what happened")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return error(*(f"the {name}" for name in names or ["message"]))


def all_subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from all_subclasses(subclass)


def test_all_is_sorted_and_unique() -> None:
    assert sorted(set(NAMES)) == NAMES


def test_all_names_everything_public() -> None:
    """A public name of the package's namespace that is not a submodule is in `__all__`."""
    public = {
        name
        for name, value in vars(aiocolocated).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - set(NAMES) == set()


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(aiocolocated, name)
    if name.startswith("__"):
        return
    doc = value.__doc__ if isinstance(value, types.ModuleType) else inspect.getdoc(value)
    assert doc, f"{name} has no docstring"


@pytest.mark.parametrize("name", NAMES)
def test_name_is_known_by_its_public_path(name: str) -> None:
    """Tracebacks, pickles and help() say `aiocolocated.X`, not the private file it lives in."""
    value = getattr(aiocolocated, name)
    if isinstance(value, type | types.FunctionType):
        assert value.__module__ == "aiocolocated"
        assert value.__qualname__ == name


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize(
    "round_trip",
    [
        *(
            pytest.param(lambda e, p=p: pickle.loads(pickle.dumps(e, p)), id=f"pickle-{p}")
            for p in range(2, pickle.HIGHEST_PROTOCOL + 1)
        ),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
    ],
)
def test_error_survives_a_copy(
    error: type[BaseException], round_trip: Callable[[BaseException], BaseException]
) -> None:
    """Same type, arguments, text, fields and notes."""
    original = sample(error)
    original.add_note("a note")
    again = round_trip(original)
    assert type(again) is type(original)
    assert again.args == original.args
    assert str(again) == str(original)
    assert vars(again) == vars(original)
    assert again.__notes__ == ["a note"]


def test_errors_have_one_root() -> None:
    """`except AiocolocatedError` catches every error of the library, and never a cancellation."""
    assert [e for e in ERRORS if not issubclass(e, aiocolocated.AiocolocatedError)] == []
    assert issubclass(aiocolocated.AiocolocatedError, Exception)


def test_errors_are_all_exported() -> None:
    """No error class of the library can reach a user without a public name."""
    own = {
        e
        for e in all_subclasses(aiocolocated.AiocolocatedError)
        if e.__module__.split(".")[0] == "aiocolocated"
    }
    assert own - set(ERRORS) == set()
