"""Tables, the runs that fill them, the identities and records of these, and how tables are shown."""
