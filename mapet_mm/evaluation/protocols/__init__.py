"""Protocols of frozen evaluation, a file each; `protocol.PROTOCOLS` imports them in the table's order."""
