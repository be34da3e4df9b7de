# SPDX-License-Identifier: Apache-2.0
"""Tests that every kind of host has to pass, as a class to subclass.

A host kind of your own conforms if calls on its devices pass all of them::

    from aiocolocated.testing.conformance import HostConformance, HostsUnderTest


    class TestMyHosts(HostConformance):
        @pytest.fixture(scope="class")
        def hosts(self):
            with open_hosts("mine", n=2) as hosts:
                yield HostsUnderTest(
                    devices=[host.devices for host in hosts], by_value=True, handles=True
                )

The tests need pytest and pytest-asyncio, and hosts that can import aiocolocated.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("aiocolocated.testing._conformance")

from aiocolocated._types import publish as _publish  # noqa: E402
from aiocolocated.testing._conformance.base import (  # noqa: E402
    HostsUnderTest as HostsUnderTest,
)
from aiocolocated.testing._conformance.cancelling import Cancellation  # noqa: E402
from aiocolocated.testing._conformance.failing import Errors, Refusals  # noqa: E402
from aiocolocated.testing._conformance.ordering import (  # noqa: E402
    Channels,
    Dependencies,
    Groups,
)
from aiocolocated.testing._conformance.placed import (  # noqa: E402
    Handles,
    Placement,
    Transfers,
)
from aiocolocated.testing._conformance.running import (  # noqa: E402
    Configuration,
    Coroutines,
    SyncBridge,
)
from aiocolocated.testing._conformance.specified import Specs  # noqa: E402
from aiocolocated.testing._conformance.stateful import Objects, Streams  # noqa: E402
from aiocolocated.testing._conformance.valued import Code, Values  # noqa: E402

__all__ = ["HostConformance", "HostsUnderTest"]


class HostConformance(
    Channels,
    Groups,
    Dependencies,
    Cancellation,
    Errors,
    Refusals,
    Values,
    Code,
    Specs,
    Placement,
    Transfers,
    Handles,
    Configuration,
    Coroutines,
    SyncBridge,
    Objects,
    Streams,
):
    """What a host promises; subclass it, and override the fixture ``hosts``.

    .. versionadded:: 0.4
    """


_publish(globals(), "aiocolocated.testing.conformance")
