# SPDX-License-Identifier: Apache-2.0
"""Every kind of host keeps the contract: one suite for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aiocolocated import configure, open_hosts
from aiocolocated.testing.conformance import HostConformance, HostsUnderTest

pytestmark = pytest.mark.timeout(60)

DEVICES = 4  # of each host


class TestInProcess(HostConformance):
    """Bodies run in the process of the program."""

    @pytest.fixture
    def hosts(self, cpu_devices: list[Any]) -> HostsUnderTest:
        return HostsUnderTest([cpu_devices[:DEVICES]], by_value=False, handles=False)


class TestStrict(HostConformance):
    """The same, but plain values go by value."""

    @pytest.fixture
    def hosts(self, cpu_devices: list[Any]) -> HostsUnderTest:
        configure(strict=True)
        return HostsUnderTest([cpu_devices[:DEVICES]], by_value=True, handles=False)


@pytest.fixture(scope="class")
def processes(request: pytest.FixtureRequest) -> Iterator[HostsUnderTest]:
    """As many as the class says, for all of its tests."""
    with open_hosts("processes", n=request.cls.number, cpu_devices=DEVICES) as hosts:
        yield HostsUnderTest(
            [host.devices for host in hosts],
            by_value=True,
            handles=True,
            received_bytes=lambda: sum(link.received_bytes for link in hosts._set.links),
        )


class TestTwoProcesses(HostConformance):
    """Two host processes of this machine."""

    number = 2

    @pytest.fixture
    def hosts(self, processes: HostsUnderTest) -> HostsUnderTest:
        return processes


class TestThreeProcesses(HostConformance):
    """Three of them."""

    number = 3

    @pytest.fixture
    def hosts(self, processes: HostsUnderTest) -> HostsUnderTest:
        return processes
