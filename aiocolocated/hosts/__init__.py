# SPDX-License-Identifier: Apache-2.0
"""Hosts: where bodies run, behind one interface."""
