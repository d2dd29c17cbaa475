"""An action of all ranks that fails on all of them if it fails on one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from titanlab.distributed.world import World
from titanlab.errors import ConfigError
from titanlab.records.outcome import first_line

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Do an action on this rank, and wait for the others; all ranks call it.

    Raises:
        Exception: an error of this rank, or the error of another one. A ConfigError of any rank is raised on all of
            them, because it is the line that users see.
    """
    value, failure = attempted(action)
    raise_first(world.gather(failure), own=failure)
    return value  # type: ignore[return-value]  # None only if the action returns it.


def attempted(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The value of an action, or its error in a form that other ranks can receive."""
    try:
        return action(), None
    except Exception as error:
        return None, _portable(error)


def raise_first(failures: Sequence[Exception | None], *, own: Exception | None = None) -> None:
    """Raise the error that says most about the failures of the ranks; nothing if there are none.

    Args:
        own: this rank's failure, which has its traceback.
    """
    known = [failure for failure in failures if failure is not None]
    if not known:
        return
    config_error = next((failure for failure in known if isinstance(failure, ConfigError)), None)
    raise config_error or own or known[0]


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # Any exception class may be impossible to pickle, and then no rank would learn of the failure.
        portable = RuntimeError(first_line(error))
        portable.__cause__ = error
        return portable
    return error
