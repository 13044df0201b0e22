"""Compiled parts of the sidecar: block hashes, the table of known blocks, the scan of KV-event payloads."""
