# SPDX-License-Identifier: Apache-2.0
"""An async HTTP server that classifies handwritten digits (``python -m examples.server``).

Uploads are decoded and recorded on threads of the server, or with ``--hosts N`` in host processes.

Read in this order:

* ``predict.py``: what one request does with aiocolocated. This is the part to copy.
* ``app.py``: the HTTP side: admission, client disconnects, health, draining.
* ``work.py``, ``model.py``: the ordinary Python and JAX that is being served.
* ``baselines.py``: the same work with plain JAX colocated Python, for comparison.
* ``__main__.py``: the command line; ``launch.py``: start the server from the demo and the tests.
"""
