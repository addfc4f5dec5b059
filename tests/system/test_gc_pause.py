from __future__ import annotations

import gc
import warnings

import pytest

from peer.system.gc_pause import starting


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_meanwhile_and_what_stands_then_never():
    with starting():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert not any(thing is kept for thing in gc.get_objects())


def test_after_a_start_that_failed_garbage_is_collected_again():
    with pytest.raises(ImportError), starting():
        raise ImportError
    assert gc.isenabled()


def test_libraries_warn_of_each_other_in_silence():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with starting():
            warnings.warn("`torch.jit.script` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("after the start", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["after the start"]
