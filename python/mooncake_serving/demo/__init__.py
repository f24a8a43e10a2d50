"""The demo: a cluster as ``serve up`` starts it, and what happens to chats and their blocks."""
