"""Build results by what they were made from: found, or built once a machine. No compiler here."""
