"""Plugins for other engines: each folder is named after its engine, and imports it."""
