# SPDX-License-Identifier: Apache-2.0
"""The tests of :mod:`aiocolocated.testing.conformance`, a file for each part of the contract."""
