"""Serving a model by this project's own engine: OpenAI servers, and a cluster of them by a command.

``python -m mooncake_serving serve up`` starts engines that prefill, engines that decode and the
router in front of them; ``serve --help`` lists the rest. Needs the packages of the extras
``serving`` and ``router``.
"""
