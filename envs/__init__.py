"""A Mooncake-style LLM serving cluster as Gymnasium environments, and the types its schedulers are written against."""
