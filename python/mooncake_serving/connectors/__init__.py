"""What plugs into other engines: each folder is named by its engine, and imports it."""
