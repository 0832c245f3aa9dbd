"""Pickle functions and classes by value, for processes that cannot import them."""

import io
import types
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import cloudpickle


def dumps(value: Any) -> bytes:
    """Return a value as a pickle that contains functions and classes of a script or a notebook.

    The code keeps the name of its file, so that errors on other processes have file and line.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduce_code(code: types.CodeType) -> Any:
    # cloudpickle 3.1: the name of the file is replaced, so that equal code gives equal pickles
    function, args, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    kept = tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)
    return (function, kept, *rest)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Mapping[type, Callable[[Any], Any]]] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )
