# SPDX-License-Identifier: Apache-2.0
"""Real programs built on aiocolocated; each one is run by the tests."""
