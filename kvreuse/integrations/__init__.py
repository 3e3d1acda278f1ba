"""Connectors of engines. Nothing else in kvreuse imports them, and each imports its engine only when it is used."""
