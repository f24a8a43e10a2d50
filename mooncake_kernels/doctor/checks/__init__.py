"""One file per group of checks. Each has a TOPIC and a function ``check`` that yields findings."""
