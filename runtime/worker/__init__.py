"""The reference worker: a `transformers` model behind vLLM's HTTP contract, as a prefill or a decode instance.

For machines where vLLM is not installed. It computes real tokens, moves real KV between processes, keeps real tiers and
publishes real events; docs/workers.md says how. `python -m runtime.worker --help`.
"""
