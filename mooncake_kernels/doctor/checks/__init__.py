"""One file a group of checks. Each has a TOPIC and a function ``check`` that yields findings."""
