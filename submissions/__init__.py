"""Policies of others: a folder each, checked, and run where they can do nothing but decide (docs/submissions.md)."""
