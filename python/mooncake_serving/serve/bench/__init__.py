"""``serve bench``: a load on an OpenAI endpoint, and how it was answered.

Names of options and figures are those of vLLM's ``bench serve``.
"""
