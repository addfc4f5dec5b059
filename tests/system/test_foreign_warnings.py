from __future__ import annotations

import warnings

from peer.system.foreign_warnings import hush_deprecations


def test_one_warning_is_not_shown_and_others_are() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hush_deprecations()
        warnings.warn("`torch.jit.script` is deprecated.", FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["another"]
